"""A result as a card: what ran, on which machine, and the bands within which another run passes. One YAML document per
card."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import yaml

from results.errors import InvalidResults
from results.tables.schema import ATTEMPTS
from sweep.composing.yaml_files import read_documents
from workloads.contract.protocol import Method
from workloads.spec import experiment as ex
from workloads.spec.checks import number, shown, whole_number
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment

FORMAT = 1
WIDEST = 0.5
"""Widest relative half of a band that says anything about a run: at this one a run that takes half as long again
passes."""
_ID = re.compile(r"[\w.+-]+-[0-9a-f]{8}")
"""The id names a folder and a job (`Experiment.id`)."""
_METHODS = get_args(Method)
_EDGES = ("low", "high")
_MOST_NAMED = 20


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
    """The cards of one file. Raises `InvalidResults` with one line for anything that is not a card.

    Cards come from strangers, so every value that is run, judged or printed has its type checked.
    """
    try:
        documents = read_documents(path)
    except InvalidSweep as error:
        raise InvalidResults(str(error)) from None
    if not documents:
        raise InvalidResults(f"{path} holds no card")
    return [_card(path, document) for document in documents]


def _card(path: Path, document: object) -> Card:
    if not isinstance(document, dict) or "format" not in document:
        raise InvalidResults(f"{path} is not a card: `python -m sweep card ID` writes one")
    if document["format"] != FORMAT:
        raise InvalidResults(
            f"{path}: a card of format {shown(document['format'])}; this program reads format {FORMAT}"
        )
    names = {field.name for field in dataclasses.fields(Card)}
    if wrong := sorted(names.symmetric_difference(document)):
        raise InvalidResults(f"{path}: unknown or missing in the card: {', '.join(map(str, wrong[:_MOST_NAMED]))}")
    _check_texts(path, document)
    for name, least in (("warmup_steps", 0), ("timed_steps", 1)):
        whole_number(f"{path}: {name}", document[name], least, error=InvalidResults)
    for name in ("code", "environment", "machine", "verified", "configuration"):
        if not isinstance(document[name], dict):
            raise InvalidResults(f"{path}: {name} must be a mapping")
    _check_columns(path, document)
    bands = _bands(path, document["expected"])
    card = Card(**{**document, "expected": bands, "attempts": tuple(document["attempts"])})
    try:
        _ = card.experiment
    except ValueError as error:
        raise InvalidResults(f"{path}: configuration: {error}") from None
    return card


def _check_texts(path: Path, document: Mapping[str, Any]) -> None:
    for name in ("id", "method", "command", "bands_from"):
        if not isinstance(document[name], str):
            raise InvalidResults(f"{path}: {name}={shown(document[name])} must be text")
    for name in ("cluster", "recorded_command"):
        if not isinstance(document[name], str | None):
            raise InvalidResults(f"{path}: {name}={shown(document[name])} must be text or null")
    if not _ID.fullmatch(document["id"]):
        raise InvalidResults(f"{path}: id={shown(document['id'])} is not the id of an experiment")
    if document["method"] not in _METHODS:
        raise InvalidResults(f"{path}: method={shown(document['method'])} may be {', '.join(_METHODS)}")
    attempts = document["attempts"]
    if not isinstance(attempts, list) or not all(isinstance(attempt, str) for attempt in attempts):
        raise InvalidResults(f"{path}: attempts must be a list of texts")
    for name in ("cluster", "configuration"):  # both become words of a command
        if (text := _interpolation(document[name])) is not None:
            raise InvalidResults(f"{path}: {name} holds {shown(text)}; a card may not refer to other values with ${{")


def _interpolation(value: object) -> str | None:
    """The first text in ``value`` that OmegaConf would replace by another value, such as an environment variable."""
    if isinstance(value, str):
        return value if "${" in value else None
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((text for part in parts if (text := _interpolation(part)) is not None), None)


def _check_columns(path: Path, document: Mapping[str, Any]) -> None:
    """Columns that are compared with those of a row are single values, and numbers where the column holds numbers."""
    for name in ("code", "environment", "machine"):
        for column, value in document[name].items():
            if isinstance(value, (dict, list)):
                raise InvalidResults(f"{path}: {name}.{column}={shown(value)} must be a single value")
            if value is not None and _is_measure(column) and not _is_number(value):
                raise InvalidResults(f"{path}: {name}.{column}={shown(value)} must be a number or null")
    for device, verification in document["verified"].items():
        if not isinstance(verification, dict | None):
            raise InvalidResults(f"{path}: verified.{device}={shown(verification)} must be a mapping or null")
    model = document["configuration"].get("model")
    if isinstance(model, dict) and not isinstance(model.get("name"), str):
        raise InvalidResults(f"{path}: configuration: model: name={shown(model.get('name'))} must be text")


def _bands(path: Path, expected: object) -> dict[str, Band]:
    if not isinstance(expected, dict) or not all(
        isinstance(band, dict) and set(band) == {"value", "low", "high"} for band in expected.values()
    ):
        raise InvalidResults(f"{path}: expected must give each column a value, a low and a high")
    for column, band in expected.items():
        place = f"{path}: expected.{column}"
        if not _is_measure(column):
            raise InvalidResults(f"{place} is no column that a run measures in numbers")
        number(f"{place}.value", band["value"], above=0, error=InvalidResults)
        edges = [
            number(f"{place}.{name}", band[name], error=InvalidResults) for name in _EDGES if band[name] is not None
        ]
        if edges != sorted(edges):
            raise InvalidResults(f"{place}: low={edges[0]:g} is above high={edges[1]:g}")
    return {column: Band(**band) for column, band in expected.items()}


def _is_measure(column: str) -> bool:
    """Whether a column of attempts holds numbers."""
    if column not in ATTEMPTS.names:
        return False
    kind = ATTEMPTS.field(column).type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
