"""Checks of values that a user wrote (YAML, command line): their type, their range, their names. No torch here.

Each check returns the value, or raises `InvalidSweep` with one line that says where the value stands (``place``, for
example ``launcher: max_nodes``), what it is and what it must be. True and false never count as numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from results.errors import UltrasweepError
from workloads.errors import InvalidSweep

T = TypeVar("T")


def whole_number(
    place: str, value: object, least: int | None = None, *, error: type[UltrasweepError] = InvalidSweep
) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least):
        return value
    raise error(f"{place}={value!r} must be a whole number" + (f" of at least {least}" if least is not None else ""))


def number(
    place: str, value: object, *, least: float | None = None, above: float | None = None, unit: str = ""
) -> float:
    """A number that is not NaN, of at least ``least`` or above ``above``; ``unit`` is for the message."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        high_enough = (least is None or value >= least) and (above is None or value > above)
        if high_enough:
            return value
    limit = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
    raise InvalidSweep(f"{place}={value!r} must be a number{f' of {unit}' if unit else ''}{limit}")


def flag(place: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidSweep(f"{place}={value!r} must be true or false")


def text(place: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise InvalidSweep(f"{place}={value!r} must be text")


def matching(place: str, value: object, shape: re.Pattern[str], what: str) -> str:
    """Text that has the ``shape`` from its first to its last character; ``what`` describes it in the message."""
    if isinstance(value, str) and shape.fullmatch(value):
        return value
    raise InvalidSweep(f"{place}={value!r} must be {what}")


def choice(place: str, value: object, choices: Sequence[str]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    *others, last = choices
    raise InvalidSweep(f"{place}={value!r}; it may be {', '.join(others)} or {last}")


def mapping(place: str, value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    raise InvalidSweep(f"{place}={value!r} must be a mapping, NAME: VALUE")


def sequence(place: str, value: object) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise InvalidSweep(f"{place}={value!r} must be a list, such as ['...','...']")


def known_names(place: str, names: Iterable[str], known: Collection[str]) -> None:
    """Refuse the first of ``names`` that is not among the ``known`` ones."""
    for name in names:
        if name not in known:
            raise InvalidSweep(f"{place}: no option {name!r}{suggest(name, known)}")


def build(kind: type[T], place: str, fields: Mapping[str, Any]) -> T:
    """A dataclass from plain data. Refuses names that it does not have, and asks for those without a default."""
    declared = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    known_names(place, fields, [field.name for field in declared])
    absent = dataclasses.MISSING
    needed = [f.name for f in declared if f.default is absent and f.default_factory is absent]
    if missing := [name for name in needed if name not in fields]:
        raise InvalidSweep(f"{place}: {', '.join(missing)} must be given")
    return kind(**fields)


def suggest(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: ``; did you mean 'x'? known: x, y``."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} known: {', '.join(options)}"
