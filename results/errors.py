"""The root of every error meant for a user, and the errors of the results themselves.

It stands in the lowest room so that every other room can derive from it. Everything else that goes wrong is ours:
an ``assert`` or a traceback.
"""

from __future__ import annotations


class UltrasweepError(ValueError):
    """What is wrong, the numbers, what would work, in one line. The command line prints it and exits with 2."""


class InvalidResults(UltrasweepError):
    """A results folder or file that is not one of ours, or that cannot be read."""
