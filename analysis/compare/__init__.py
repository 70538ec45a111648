"""Comparison of two results, matched point by point: ``python -m analysis.compare A B``."""
