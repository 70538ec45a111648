"""Formats options as text for an engine: TOML, YAML, JSON or command-line flags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from sweep.engine_configs.draft import Options


def commented(lines: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def nested(options: Options) -> dict[str, Any]:
    """Options as sections: ``a.b = 1`` becomes ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for name, value in options.items():
        *sections, last = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return tree


def toml(options: Options) -> str:
    """Sections with their values. Strings, numbers, booleans and lists are written as in JSON, which is valid TOML."""
    sections: dict[str, list[str]] = {}
    for name, value in options.items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {json.dumps(value)}")
    return "\n".join(f"[{section}]\n" + "".join(f"{line}\n" for line in lines) for section, lines in sections.items())


def yaml_text(options: Options) -> str:
    return str(yaml.safe_dump(nested(options), sort_keys=False))


def json_text(options: Options) -> str:
    return json.dumps(nested(options), indent=2) + "\n"


def flags(options: Mapping[str, Any]) -> str:
    """One flag per line. A value with spaces is a list, which such flags take as several words."""
    return "".join(f"--{name}\n" if value is True else f"--{name} {value}\n" for name, value in options.items())
