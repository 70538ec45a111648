"""Checks of values that a user wrote (YAML, command line): their type, their range, their names. No torch here.

Each check returns the value, or raises `InvalidSweep` with one line that says where the value is (``place``, for
example ``launcher: max_nodes``), what it is and what it must be. True and false never count as numbers.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from results.errors import UltrasweepError
from workloads.spec.errors import InvalidSweep
from workloads.spec.example_lines import example_line
from workloads.spec.other_names import same_here, what_to_write

T = TypeVar("T")
_CLOSE = 0.7
"""Similarity from which a word of a short list is suggested. It is high because the message shows the whole list
anyway."""
_LEAST_PART, _MOST_MEANT = 3, 4
"""A word of fewer letters is not searched in others, and no more words than this are suggested."""
_PARTS = re.compile(r"[^a-z0-9]+")
_CODE = re.compile(r"([a-z]{1,2})[0-9]{2,4}(?![0-9])")
"""The name of a device or precision: h200, bf16."""
LARGEST = 1e30
"""Largest size of a number that a user may write; above it, arithmetic on numbers soon overflows."""
MOST = 2**63 - 1
"""Largest whole number: tables hold 64 bits."""
_MOST_SHOWN = 100
"""A message repeats at most this many characters of what a user wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Rule for one field, declared once: the test of a value, and the words that say what the value must be."""

    accepts: Callable[[object], bool]
    must: str
    choices: tuple[bool | int | str, ...] = ()
    """All allowed values; empty if they cannot be listed."""
    is_text: bool = False
    """The field is text, although YAML may read it as a number (``2``, ``8``)."""

    def check(self, place: str, value: Any, *, error: type[UltrasweepError] = InvalidSweep) -> Any:
        """Returns the value, converted to text if the field is text. Raises ``error`` for a value that is not
        allowed."""
        if self.is_text and isinstance(value, int) and not isinstance(value, bool):  # a float is 1.1 for 1.10
            value = str(value)
        if not self.accepts(value):
            raise error(self.refusal(place, value))
        return value

    def refusal(self, place: str, value: object) -> str:
        if not self.choices:
            return f"{place}={shown(value)} must be {self.must}{_at_most(value)}"
        return f"{place}={shown(value)}{did_you_mean(value, self.choices, _CLOSE) or ';'} it may be {self.must}"


def whole_numbers(least: int) -> Values:
    """Rule for a field of whole numbers of at least ``least``; accepts the same values as `whole_number`."""
    return Values(
        accepts=lambda value: type(value) is int and least <= value <= MOST,
        must=f"a whole number of at least {least}",
    )


def one_of(*choices: bool | int | str, is_text: bool = False) -> Values:
    """Rule for a field with a list of known values. 1 and true are different values here, as in a hash over the
    field."""
    by_type = {kind: frozenset(choice for choice in choices if type(choice) is kind) for kind in map(type, choices)}

    def accepts(value: object) -> bool:
        known = by_type.get(type(value))
        return known is not None and value in known

    return Values(accepts=accepts, must=_alternatives(choices), choices=choices, is_text=is_text)


def texts() -> Values:
    return Values(accepts=lambda value: isinstance(value, str) and bool(value), must="text", is_text=True)


def whole_number(
    place: str, value: object, least: int | None = None, *, error: type[UltrasweepError] = InvalidSweep
) -> int:
    lowest = -MOST if least is None else least
    if isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= MOST:
        return value
    at_least = f" of at least {least}" if least is not None else ""
    raise error(f"{place}={shown(value)} must be a whole number{at_least}{_at_most(value)}")


def number(
    place: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    unit: str = "",
    error: type[UltrasweepError] = InvalidSweep,
) -> float:
    """Returns a number that is not NaN and is at least ``least`` or above ``above``; ``unit`` is for the message."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
        high_enough = (least is None or value >= least) and (above is None or value > above)
        if high_enough and (isinstance(value, float) or abs(value) <= LARGEST):
            return value
    limit = f" of at least {least:g}" if least is not None else f" above {above:g}" if above is not None else ""
    if isinstance(value, int) and abs(value) > LARGEST:
        limit += f", at most {LARGEST:g}"
    raise error(f"{place}={shown(value)} must be a number{f' of {unit}' if unit else ''}{limit}")


def plausible(place: str, value: object, low: float, high: float, unit: str, example: str) -> float:
    """Returns a number that hardware can have: between ``low`` and ``high``. The message shows the number with its
    unit, because the usual mistake is a number in another unit; ``example`` shows how to write it."""
    amount = number(place, value, unit=unit)
    if low <= amount <= high:
        return amount
    raise InvalidSweep(
        f"{place}={shown(value)} means {amount:g} {unit}; between {low:g} and {high:g} {unit} is plausible; "
        f"write the unit with the number: '{example}'"
    )


def flag(place: str, value: object, *, error: type[UltrasweepError] = InvalidSweep) -> bool:
    if isinstance(value, bool):
        return value
    raise error(f"{place}={shown(value)} must be true or false")


def text(place: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise InvalidSweep(f"{place}={shown(value)} must be text{_quotes(value)}")


def matching(place: str, value: object, shape: re.Pattern[str], what: str) -> str:
    """Returns text that matches ``shape`` from its first to its last character; ``what`` describes the shape in the
    message."""
    if isinstance(value, str) and shape.fullmatch(value):
        return value
    raise InvalidSweep(f"{place}={shown(value)} must be {what}{_quotes(value)}")


def _quotes(value: object) -> str:
    """The end of a message about a number, true or false where text was expected."""
    return "; put it in quotes" if isinstance(value, (bool, int, float)) else ""


def choice(place: str, value: object, choices: Sequence[str]) -> str:
    if isinstance(value, str) and value in choices:
        return value
    hint = did_you_mean(value, choices, _CLOSE) or ";"
    raise InvalidSweep(f"{place}={shown(value)}{hint} it may be {_alternatives(choices)}")


def mapping(place: str, value: object, *, error: type[UltrasweepError] = InvalidSweep) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): entry for key, entry in value.items()}
    raise error(f"{place}={shown(value)} must be a mapping, NAME: VALUE")


def sequence(place: str, value: object) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise InvalidSweep(f"{place}={shown(value)} must be a list, such as ['...','...']")


def known_names(
    place: str,
    names: Iterable[str],
    known: Collection[str],
    *,
    noun: str = "option",
    error: type[UltrasweepError] = InvalidSweep,
) -> None:
    """Refuses those of ``names`` that are not in ``known``, each in a message; ``noun`` is the message's word for a
    name. If ``names`` is a mapping, the message has the line to write."""
    if messages := _unknown_names(place, names, known, noun):
        raise error(*messages)


def _unknown_names(place: str, names: Iterable[str], known: Collection[str], noun: str) -> list[str]:
    values = names if isinstance(names, Mapping) else {}
    unknown = {name: values.get(name) for name in names if name not in known}
    return [f"{place}: no {noun} {name!r}{hint}" for name, hint in hints(unknown, known).items()]


def hints(unknown: Mapping[str, Any], known: Collection[str]) -> dict[str, str]:
    """The end of the message about each unknown name, with the line to write where it is clear. ``unknown``: the names
    with what was written for them. The list of known names is in the last message only."""
    endings = {}
    for name, given in unknown.items():
        value = _as_yaml(given)
        ending = suggest(name, known, value)
        if name != list(unknown)[-1]:
            ending = ending.rpartition("known: ")[0].rstrip("; ")
        line = _line_to_write(name, known, value)
        endings[name] = ending + (line.removeprefix(";") if ending.endswith("?") else line)
    return endings


def _line_to_write(name: str, known: Collection[str], value: str) -> str:
    """The end of a message with the line that was probably meant; empty if that is not clear."""
    meant = meant_by(name, known)
    elsewhere = not _is_here(name, known) and what_to_write(name, known)
    return f"; write {meant[0]}: {value}" if len(meant) == 1 and value and not elsewhere else ""


def _as_yaml(value: object) -> str:
    """A single value as a line of YAML has it; empty for other values."""
    if isinstance(value, bool):
        return str(value).lower()
    return shown(value).strip("'") if isinstance(value, (int, float, str)) else ""


def build(
    kind: type[T],
    place: str,
    fields: Mapping[str, Any],
    *,
    needed: Iterable[str] = (),
    noun: str = "option",
    error: type[UltrasweepError] = InvalidSweep,
) -> T:
    """Makes a dataclass from plain data. Refuses unknown names, and missing names that have no default or are in
    ``needed``."""
    declared = [field for field in dataclasses.fields(kind) if field.init]  # type: ignore[arg-type]
    absent = dataclasses.MISSING
    required = {f.name for f in declared if f.default is absent and f.default_factory is absent} | {*needed}
    names = [field.name for field in declared]
    check_names(place, fields, names, [name for name in names if name in required], noun=noun, error=error)
    return kind(**fields)


def check_names(
    place: str,
    fields: Mapping[str, Any],
    known: Collection[str],
    needed: Iterable[str],
    *,
    noun: str = "option",
    error: type[UltrasweepError] = InvalidSweep,
) -> None:
    """Refuses all unknown names of ``fields`` and all ``needed`` ones that are missing, with the lines to write."""
    messages = _unknown_names(place, fields, known, noun)
    meant = {name for given in fields if given not in known for name in meant_by(given, known)}
    if missing := [name for name in needed if name not in fields and name not in meant]:
        lines = [example for name in missing if (example := example_line(name)) is not None]
        hint = f"; write for example {' and '.join(lines)}" if lines else ""
        messages.append(f"{place}: {', '.join(missing)} must be given{hint}")
    if messages:
        raise error(*messages)


def suggest(word: str, known: Iterable[str], value: str = "") -> str:
    """The end of a message about an unknown word: ``; did you mean 'x'? known: x, y``, or where another program's name
    is written here. ``value``: what was written for the word, as YAML."""
    options = sorted(known)
    hint = "" if _is_here(word, options) else what_to_write(word, options, value or "...")
    hint = f"; {hint};" if hint else did_you_mean(word, options) or ";"
    return f"{hint} known: {', '.join(options)}"


def did_you_mean(word: object, known: Iterable[object], cutoff: float = 0.65) -> str:
    """``; did you mean 'x'?`` for the ``known`` words that ``word`` may stand for; otherwise empty."""
    meant = meant_by(word, known, cutoff)
    if not meant:
        return ""
    *others, last = map(repr, meant)
    return f"; did you mean {', '.join(others)} or {last}?" if others else f"; did you mean {last}?"


def meant_by(word: object, known: Iterable[object], cutoff: float = 0.65) -> list[str]:
    """The ``known`` words that ``word`` may stand for.

    These are the word with other case or dashes, another program's name of it, the words that begin with it, those that
    have it as a part, or the most similar word (at least ``cutoff``; equal words have 1). Nothing with other digits is
    similar, and no other short letters before digits: h200 is a misspelt h100 or gh200 to nobody.
    """
    options = sorted(map(str, known))
    if not isinstance(word, str) and word is not None:
        return []
    text = str(word).lower()
    if equal := [option for option in options if _letters(option) == _letters(text)]:
        return equal
    if (same := same_here(text, options)) is not None:
        return [same]
    if len(text) >= _LEAST_PART:
        begun = [option for option in options if option.lower().startswith(text)]
        parts = begun or [option for option in options if text in _PARTS.split(option.lower())]
        if 0 < len(parts) <= _MOST_MEANT:
            return parts
    similar = [option for option in options if _is_one_series(text, option.lower())]
    return difflib.get_close_matches(text, similar, n=1, cutoff=cutoff)


def _is_here(word: str, options: Collection[str]) -> bool:
    """Whether one of the options is the word in another spelling, or another program's name of it."""
    return any(_letters(option) == _letters(word) for option in options) or same_here(word, options) is not None


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def _is_one_series(word: str, other: str) -> bool:
    """Whether two names have the same digits in any order and, if one is a code such as h200, its letters."""
    codes = [match[1] if (match := _CODE.match(text)) else None for text in (word, other)]
    return sorted(re.findall("[0-9]", word)) == sorted(re.findall("[0-9]", other)) and codes[0] == codes[1]


def shown(value: object) -> str:
    """``value`` as a message shows it, shortened where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number with thousands of digits
        return "(a number with thousands of digits)"
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 1] + "…"


def _at_most(value: object) -> str:
    """The end of a message about a whole number that is too large."""
    return f", at most {MOST:,}" if isinstance(value, int) and abs(value) > MOST else ""


def _alternatives(choices: Sequence[bool | int | str]) -> str:
    *others, last = (str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last
