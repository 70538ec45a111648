"""Errors in user input: an experiment, a cluster or a sweep."""

from __future__ import annotations

from results.errors import UltrasweepError


class InvalidExperiment(UltrasweepError):
    """An experiment or a model has a value that is never valid (a degree of 0, an unknown precision)."""


class InfeasibleLayout(UltrasweepError):
    """Values are valid but do not fit together (tp does not divide the number of heads)."""


class UnsupportedByEngine(UltrasweepError):
    """A valid layout cannot be run by this version of the engine yet."""


class InvalidSweep(UltrasweepError):
    """A sweep configuration cannot be read: unknown grid, misspelt axis, no layout of the requested world size."""
