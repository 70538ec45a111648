"""Makes a dataclass from plain data whose types and ranges are checked, for files that other users may have written.

A record of a shared folder is data: a wrong type must be noticed where the record is read, not in the middle of a
command.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
LATEST = 253_402_300_799.0
"""The last second of the year 9999, since the epoch: later times cannot be shown."""
_TIMES = ("since", "until", "time")
"""Fields that hold seconds since the epoch, beside those whose names end in ``_at``."""
_NAMES = ("stem", "token")
"""Fields that are a part of a file's name, beside those whose names end in ``_id``."""
_MOST_SHOWN = 60


def typed(kind: type[T], fields: object, *, ignore_unknown: bool = False) -> T:
    """An instance of the dataclass ``kind``. Raises `ValueError` for a missing or unknown field, and for a value that
    is not of the field's type, not finite, not a time, or not a part of a file's name.

    Lists become tuples or frozen sets, and mappings become dataclasses, where the field has such a type.
    """
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise ValueError(f"{_shown(fields)} holds no fields")
    hints = _hints(typing.cast(Any, kind))
    if not ignore_unknown and (unknown := fields.keys() - hints.keys()):
        raise ValueError(f"unknown field {_shown(min(unknown))}")
    values = {name: _checked(name, value, hints[name]) for name, value in fields.items() if name in hints}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error).partition("() ")[2] or str(error)) from None


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _checked(name: str, value: object, hint: Any) -> Any:
    """The value in the type ``hint``. Raises `ValueError`."""
    matches, converted = _converted(name, value, hint)
    if not matches:
        raise ValueError(f"{name}={_shown(value)} is not of type {getattr(hint, '__name__', hint)}")
    if isinstance(converted, int | float) and (name.endswith("_at") or name in _TIMES) and not 0 <= converted <= LATEST:
        raise ValueError(f"{name}={_shown(value)} is not a time")
    if isinstance(converted, str) and (name.endswith("_id") or name in _NAMES) and not _is_part_of_a_name(converted):
        raise ValueError(f"{name}={_shown(value)} cannot be a part of a file's name")
    return converted


def _converted(name: str, value: object, hint: Any) -> tuple[bool, Any]:
    """Whether the value has the type ``hint``, and the value in that type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return True, value
    if origin in (types.UnionType, typing.Union):
        tried = (_converted(name, value, one) for one in arguments)
        return next((one for one in tried if one[0]), (False, value))
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in arguments), value
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return False, value
        return True, {
            _checked(f"a name of {name}", key, arguments[0]): _checked(f"{name}.{key}", one, arguments[1])
            for key, one in value.items()
        }
    if origin is not None and issubclass(origin, (Sequence, frozenset)):
        if not isinstance(value, list | tuple | frozenset):
            return False, value
        parts = tuple(_checked(f"a part of {name}", one, arguments[0]) for one in value)
        return True, frozenset(parts) if origin is frozenset else parts
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return True, value if isinstance(value, hint) else typed(hint, value)
    return _is_plain(value, hint), value


def _is_plain(value: object, hint: Any) -> bool:
    """Whether a plain value has the type ``hint``. True and false are no numbers; a whole number is also a float."""
    if hint is types.NoneType:
        return value is None
    if hint is int:
        return type(value) is int and abs(value) < 2**63
    if hint is float:
        return (type(value) is int and abs(value) < 2**63) or (type(value) is float and math.isfinite(value))
    if hint is str:
        return isinstance(value, str) and _is_unicode(value)
    return isinstance(value, hint)


def _is_unicode(text: str) -> bool:
    """Whether the text can be printed: JSON may hold halves of surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_part_of_a_name(text: str) -> bool:
    return "/" not in text and "\0" not in text and text not in (".", "..")


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
