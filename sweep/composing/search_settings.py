"""When a search is at its end, and how it chooses: the section ``search`` of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads.spec import checks
from workloads.spec.errors import InvalidSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the section ``search``; ``conf/config.yaml`` says what each means."""

    within: float = 0.01
    stop: float = 0.1
    batch: int = 3
    patience: int | None = None
    repeats: int = 2
    slow: float | None = 1.5


def settings_from(fields: Mapping[str, Any]) -> Settings:
    """Checked settings. Raises `InvalidSweep` for a value that is none, by its option's name."""
    found = checks.build(Settings, "search", fields)
    for name in ("within", "stop"):
        checks.number(f"search.{name}", getattr(found, name), least=0)
        if getattr(found, name) >= 1:
            raise InvalidSweep(f"search.{name}={getattr(found, name):g} is a share below 1")
    checks.whole_number("search.batch", found.batch, 1)
    checks.whole_number("search.repeats", found.repeats, 0)
    if found.slow is not None:
        checks.number("search.slow", found.slow, above=1)
    if found.patience is not None:
        checks.whole_number("search.patience", found.patience, 1)
    return found
