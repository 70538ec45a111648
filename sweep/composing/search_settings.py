"""The section ``search`` of the configuration: when a search ends, and how it chooses points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads.spec import checks
from workloads.spec.errors import InvalidSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the section ``search``; ``conf/config.yaml`` explains each."""

    within: float = 0.01
    stop: float = 0.1
    batch: int = 3
    patience: int | None = None
    repeats: int = 24
    slow: float | None = 1.5


def settings_from(fields: Mapping[str, Any]) -> Settings:
    """Checked settings. Raises `InvalidSweep` for an invalid value, with the option's name."""
    settings = checks.build(Settings, "search", fields)
    for name in ("within", "stop"):
        checks.number(f"search.{name}", getattr(settings, name), least=0)
        if getattr(settings, name) >= 1:
            raise InvalidSweep(f"search.{name}={getattr(settings, name):g} must be a share below 1")
    checks.whole_number("search.batch", settings.batch, 1)
    checks.whole_number("search.repeats", settings.repeats, 0)
    if settings.slow is not None:
        checks.number("search.slow", settings.slow, above=1)
    if settings.patience is not None:
        checks.whole_number("search.patience", settings.patience, 1)
    return settings
