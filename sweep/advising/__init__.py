"""Recommends layouts to train a model with, and numbers of devices, from predictions alone."""
