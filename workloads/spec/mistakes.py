"""Collects the mistakes of a user, so that all of them are reported at once."""

from __future__ import annotations

from types import TracebackType

from results.errors import UltrasweepError


class Mistakes:
    """Checks run inside ``with mistakes.collected():``, one block for each; `refuse` then raises what they reported."""

    def __init__(self) -> None:
        self._errors: list[UltrasweepError] = []

    def __bool__(self) -> bool:
        return bool(self._errors)

    def collected(self) -> _Collection:
        """A block whose error, if there is one, is kept instead of raised."""
        return _Collection(self._errors)

    def refuse(self) -> None:
        """Raises an error with every message, each once; a single error is raised as it is."""
        if len(self._errors) == 1:
            raise self._errors[0]
        if self._errors:
            messages = dict.fromkeys(message for error in self._errors for message in error.messages)
            raise type(self._errors[0])(*messages) from None


class _Collection:
    """The block of `Mistakes.collected`; a class, so that type checkers know that it ends exceptions."""

    def __init__(self, errors: list[UltrasweepError]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, UltrasweepError):
            return False
        self._errors.append(error)
        return True
