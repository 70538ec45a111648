"""Errors in what a user wrote: an experiment, a cluster or a sweep."""

from __future__ import annotations

from results.errors import UltrasweepError


class InvalidExperiment(UltrasweepError):
    """An experiment or a model with a value that is never valid (a degree of 0, an unknown precision)."""


class InfeasibleLayout(UltrasweepError):
    """Valid values that do not fit together (tp does not divide the number of heads)."""


class UnsupportedByEngine(UltrasweepError):
    """A valid layout that this version of the engine cannot run yet."""


class InvalidSweep(UltrasweepError):
    """A sweep configuration that cannot be read: unknown grid, misspelt axis, no layout of the asked world size."""
