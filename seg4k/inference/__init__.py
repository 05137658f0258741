"""Prediction, evaluation and export."""
