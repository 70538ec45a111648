"""Collects the mistakes of a user, so that all of them are reported at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from results.errors import UltrasweepError


class Mistakes:
    """Checks run inside ``with mistakes.collected():``, one block for each; `refuse` then raises what they reported."""

    def __init__(self) -> None:
        self._errors: list[UltrasweepError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keeps the error of the block, if there is one, instead of raising it."""
        try:
            yield
        except UltrasweepError as error:
            self._errors.append(error)

    def refuse(self) -> None:
        """Raises an error with every message, each once; a single error is raised as it is."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            messages = dict.fromkeys(message for error in self._errors for message in error.messages)
            raise type(self._errors[0])(*messages) from None
