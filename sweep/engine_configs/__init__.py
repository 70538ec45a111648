"""Layouts exported as configurations of other training engines."""
