"""Answers which layout a model should be trained with, and on how many devices, from predictions alone."""
