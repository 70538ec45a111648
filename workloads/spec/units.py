"""Quantities as people write them: ``50 GB/s``, ``80 GiB``, ``989 TFLOP/s``, ``5 us``. No torch here.

Prefixes are SI's (``GB`` is 10⁹ bytes) or, with an i, powers of 1024 (``GiB`` is 2³⁰ bytes). A small ``b`` is a bit:
``400 Gb/s`` are 50 GB/s.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

from workloads.spec.errors import InvalidSweep

Unit = Literal["B", "B/s", "FLOP/s", "s", "W"]

_NUMBER = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?)\s*(.*)", re.DOTALL)
_SI = {"": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}
_BYTES: Mapping[str, Decimal] = {
    **{f"{prefix}B": Decimal(10**power) for prefix, power in _SI.items()},
    **{f"{prefix}B": Decimal(2**power) for prefix, power in _BINARY.items()},
}
_BITS = {f"{prefix}{bit}": Decimal(10**power) / 8 for prefix, power in _SI.items() for bit in ("b", "bit")}
_UNITS: Mapping[Unit, Mapping[str, Decimal]] = {
    "B": _BYTES,
    "B/s": {f"{name}/s": size for name, size in {**_BYTES, **_BITS}.items()},
    "FLOP/s": {f"{prefix}FLOP{end}": Decimal(10**power) for prefix, power in _SI.items() for end in ("/s", "S", "s")},
    "s": {
        **{f"{micro}s": Decimal("1e-6") for micro in ("u", "µ", "μ")},
        "ns": Decimal("1e-9"),
        "ms": Decimal("1e-3"),
        "s": Decimal(1),
        "min": Decimal(60),
        "h": Decimal(3600),
        "d": Decimal(86400),
    },
    "W": {"W": Decimal(1), "kW": Decimal(1000)},
}
"""Names of units with their size in the unit that is stored. Decimal, so that 5 us are exactly 5e-6."""
EXAMPLES: Mapping[Unit, str] = {"B": "80 GiB", "B/s": "50 GB/s", "FLOP/s": "989 TFLOP/s", "s": "5 us", "W": "700 W"}


def quantity(place: str, value: object, unit: Unit, *, example: str = "") -> object:
    """Converts text to a number in ``unit``: a float, or a whole number of bytes. Returns any other value unchanged.

    Text without a unit is taken to be in ``unit``. ``example``: how a message writes such a quantity. Raises
    `InvalidSweep`, with ``place`` first, for text that is not a number with a known unit.
    """
    if unit == "B" and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    example = example or EXAMPLES[unit]
    match = _NUMBER.fullmatch(value.strip())
    if match is None:
        raise InvalidSweep(
            f"{place}={value!r} must be a number of {unit}, or a number with a unit, such as '{example}'"
        )
    name = "".join(match[2].split())
    known = _UNITS[unit]
    if name and name not in known:
        raise InvalidSweep(
            f"{place}={value!r}: {name!r} is not a unit of {_KINDS[unit]}; "
            f"write it like '{example}', or as a number of {unit}"
        )
    amount = Decimal(match[1]) * known.get(name, Decimal(1))
    return round(amount) if unit == "B" else float(amount)


_KINDS: Mapping[Unit, str] = {"B": "memory", "B/s": "bandwidth", "FLOP/s": "computing speed", "s": "time", "W": "power"}


_DAYS = re.compile(r"([0-9]+)-([0-9]{1,2})(?::([0-5]?[0-9]))?(?::([0-5]?[0-9]))?")
_CLOCK = re.compile(r"([0-9]+):([0-5]?[0-9]):([0-5]?[0-9])")
_TIME_EXAMPLE = "2 h' or '02:00:00"


def seconds(place: str, value: object) -> object:
    """Converts text with a unit of time (``2 min``), or as Slurm writes times (``02:00:00``, ``1-12``), to seconds;
    returns any other value unchanged. Raises `InvalidSweep` for other text that begins with a number."""
    if not isinstance(value, str):
        return value
    text = value.strip()
    if (match := _DAYS.fullmatch(text)) is not None:
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    if (match := _CLOCK.fullmatch(text)) is not None:
        hours, minutes, rest = map(int, match.groups())
        return float((hours * 60 + minutes) * 60 + rest)
    if re.fullmatch(r"[0-9]+:[0-9]+", text):
        raise InvalidSweep(
            f"{place}={value!r} is minutes and seconds in Slurm, hours and minutes elsewhere; write it like "
            f"'{_TIME_EXAMPLE}'"
        )
    if (match := _NUMBER.fullmatch(text)) is not None and match[2]:
        return quantity(place, value, "s", example=_TIME_EXAMPLE)
    return value
