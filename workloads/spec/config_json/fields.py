"""The fields of one config.json: each read is checked, and what nobody has read is refused at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from workloads.spec.checks import flag, number, one_of, shown, suggest, whole_number
from workloads.spec.config_json.without_effect import has_no_effect, is_generic
from workloads.spec.errors import InvalidExperiment

_REQUIRED: Final = object()


class Fields:
    """The fields of a mapping. Null means not given. Reads raise `InvalidExperiment` with one line that names the
    field."""

    def __init__(self, label: str, values: Mapping[str, Any]) -> None:
        self.label = label
        self._values = values
        self._read: set[str] = set()

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """What a family takes for fields that a file leaves out."""
        self._values = {**defaults, **{name: value for name, value in self._values.items() if value is not None}}

    def given(self, name: str) -> bool:
        """Whether a field has a value other than null."""
        return self._values.get(name) is not None

    def names(self) -> tuple[str, ...]:
        """Names of all fields that the file gives."""
        return tuple(map(str, self._values))

    def value(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = ()) -> Any:
        """A field without a check of its kind. ``also``: names that other files use for it; if a file has several,
        they must agree."""
        names = (name, *also)
        self._read |= set(names)
        values = {each: self._values[each] for each in names if self.given(each)}
        if not values:
            if default is _REQUIRED:
                raise InvalidExperiment(f"{self.label}: {name} is missing{self._close(name)}")
            return default
        first = next(iter(values))
        for other, value in values.items():
            if value != values[first]:
                raise InvalidExperiment(
                    f"{self.label}: {first}={shown(values[first])} and {other}={shown(value)} must be equal"
                )
        return values[first]

    def _close(self, name: str) -> str:
        unread = [key for key in self._values if key not in self._read and not is_generic(key)]
        hint = suggest(name, unread)
        return hint if "did you mean" in hint else ""

    def count(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = (), least: int = 1) -> int:
        value = self.value(name, default, also=also)
        return whole_number(f"{self.label}: {name}", value, least, error=InvalidExperiment)

    def number(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = ()) -> float:
        value = self.value(name, default, also=also)
        return float(number(f"{self.label}: {name}", value, least=0, error=InvalidExperiment))

    def flag(self, name: str, default: Any = _REQUIRED, *, also: tuple[str, ...] = ()) -> bool:
        return flag(f"{self.label}: {name}", self.value(name, default, also=also), error=InvalidExperiment)

    def choice(self, name: str, choices: tuple[bool | int | str, ...], default: Any = _REQUIRED) -> Any:
        """A field that may have one of some values: every other one is not understood."""
        return one_of(*choices).check(f"{self.label}: {name}", self.value(name, default), error=InvalidExperiment)

    def listing(self, name: str, length: int, *, at_least: bool = False) -> list[Any]:
        """A list with one entry for each layer. ``at_least``: entries of multi-token modules may follow."""
        value = self.value(name)
        if not isinstance(value, list) or (len(value) < length if at_least else len(value) != length):
            count = len(value) if isinstance(value, list) else shown(value)
            raise InvalidExperiment(
                f"{self.label}: {name} must be a list of {length} entries, one a layer; it is {count}"
            )
        return value[:length]

    def part(self, name: str) -> Fields:
        """A mapping inside of this one, whose fields are checked by themselves."""
        value = self.value(name)
        if not isinstance(value, Mapping):
            raise InvalidExperiment(f"{self.label}: {name}={shown(value)} must be a mapping")
        return Fields(f"{self.label}: {name}", value)

    def ignore(self, *names: str) -> None:
        """Fields that a family knows to change neither parameters nor FLOPs."""
        self._read |= set(names)

    def refuse_unread(self) -> tuple[str, ...]:
        """Raises `InvalidExperiment` with a message for every field that nobody has read and that may change the
        computation. Returns the names of the given fields without effect."""
        unread = {name: value for name, value in self._values.items() if name not in self._read}
        unknown = [name for name, value in unread.items() if not has_no_effect(name, value)]
        if unknown:
            raise InvalidExperiment(
                *(
                    f"{self.label}: {name}={shown(self._values[name])} is not understood; it may change the computation"
                    for name in sorted(unknown)
                )
            )
        return tuple(sorted(name for name in unread if not is_generic(name)))
