"""The base class of every error meant for a user, and the errors of the results themselves.

It is in the lowest room so that every other room can derive from it. Any other error is a fault of the program: an
``assert`` or a traceback.
"""

from __future__ import annotations


class UltrasweepError(ValueError):
    """A mistake of the user, in one line: what is wrong, the numbers, what would work. The command line prints it and
    exits with 2.

    An error may carry several mistakes, each a line of its own (`messages`); as one text they are joined by ``; ``.
    """

    def __init__(self, *messages: object) -> None:
        self.messages = tuple(map(str, messages))
        super().__init__("; ".join(self.messages))


class InvalidResults(UltrasweepError):
    """A results folder or file cannot be read, or was not written by this program."""
