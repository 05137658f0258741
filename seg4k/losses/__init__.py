"""Objectives as sums over pixels."""
