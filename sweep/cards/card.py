"""A result as a card: what ran, on which machine, and the bands within which another run passes. One YAML document per
card."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from results.errors import InvalidResults
from workloads.spec import experiment as ex
from workloads.spec.experiment import Experiment

FORMAT = 1
WIDEST = 0.5
"""Widest relative half of a band that says anything about a run: at this one a run that takes half as long again
passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A measured value, and the range in which another run passes.

    ``low`` and ``high`` are None if no spread is known: then the value is not judged.
    """

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One complete result: enough to run it again and to judge the new run."""

    format: int = FORMAT
    id: str
    """The experiment's id, as in its rows."""
    method: str
    """measured or rehearsed."""
    cluster: str | None
    command: str
    """Command that runs it again."""
    recorded_command: str | None
    """Command that produced the rows."""
    warmup_steps: int
    timed_steps: int
    attempts: tuple[str, ...]
    """Ids of the attempts behind the card."""
    code: Mapping[str, Any]
    """Columns of the newest row about the code: commit and versions of package, engine and measurement."""
    environment: Mapping[str, Any]
    """Columns about installed software."""
    machine: Mapping[str, Any]
    """Columns about the devices: name, number, clock, and the results of the node check."""
    bands_from: str
    """Source of the bands, in words."""
    expected: Mapping[str, Band]
    """Expected values by column."""
    verified: Mapping[str, Mapping[str, Any] | None]
    """Date and commit of a further run that passed, by device; None: recorded there and not run again."""
    configuration: Mapping[str, Any]
    """The experiment, field by field."""

    @property
    def experiment(self) -> Experiment:
        """The experiment. Raises `InvalidExperiment` for a configuration with other fields."""
        return ex.from_dict(json.loads(json.dumps(self.configuration)))


def to_yaml(cards: Iterable[Card]) -> str:
    """The cards as a stream of YAML documents."""
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    plain = [json.loads(json.dumps(dataclasses.asdict(card))) for card in cards]
    return str(
        yaml.dump_all(plain, Dumper=dumper, sort_keys=False, explicit_start=True, width=120, default_flow_style=None)
    )


def read_cards(path: Path) -> list[Card]:
    """The cards of one file. Raises `InvalidResults` with one line for anything that is not a card."""
    try:
        documents = list(yaml.load_all(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidResults(f"{path}: {getattr(error, 'strerror', None) or 'no text'}") from None
    except yaml.YAMLError as error:
        raise InvalidResults(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not documents:
        raise InvalidResults(f"{path} holds no card")
    return [_card(path, document) for document in documents]


def _card(path: Path, document: object) -> Card:
    if not isinstance(document, dict) or "format" not in document:
        raise InvalidResults(f"{path} is not a card: `python -m sweep card ID` writes one")
    if document["format"] != FORMAT:
        raise InvalidResults(f"{path}: a card of format {document['format']!r}; this program reads format {FORMAT}")
    names = {field.name for field in dataclasses.fields(Card)}
    if wrong := sorted(names.symmetric_difference(document)):
        raise InvalidResults(f"{path}: unknown or missing in the card: {', '.join(map(str, wrong))}")
    expected = document["expected"]
    if not isinstance(expected, dict) or not all(_is_band(band) for band in expected.values()):
        raise InvalidResults(f"{path}: expected must give each column a value, a low and a high")
    for name in ("code", "environment", "machine", "verified", "configuration"):
        if not isinstance(document[name], dict):
            raise InvalidResults(f"{path}: {name} must be a mapping")
    bands = {name: Band(**band) for name, band in expected.items()}
    card = Card(**{**document, "expected": bands, "attempts": tuple(document["attempts"])})
    try:
        _ = card.experiment
    except ValueError as error:
        raise InvalidResults(f"{path}: configuration: {error}") from None
    return card


def _is_band(band: object) -> bool:
    if not isinstance(band, dict) or set(band) != {"value", "low", "high"}:
        return False
    numbers = [band["value"], *(edge for edge in (band["low"], band["high"]) if edge is not None)]
    return all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in numbers)
