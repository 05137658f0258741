"""Datasets, transforms, formats and checks."""
