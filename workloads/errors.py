"""What a user can get wrong when describing an experiment, a cluster or a sweep."""

from __future__ import annotations

from results.errors import UltrasweepError


class InvalidExperiment(UltrasweepError):
    """An experiment or model description that cannot mean anything (a degree of 0, an unknown precision)."""


class InfeasibleLayout(UltrasweepError):
    """A meaningful experiment that breaks a structural rule (tp does not divide the heads)."""


class UnsupportedByEngine(UltrasweepError):
    """A feasible experiment that this version of the engine cannot run yet."""


class InvalidSweep(UltrasweepError):
    """A sweep configuration that cannot be read: unknown grid, misspelt axis, no layout of the asked world size."""
