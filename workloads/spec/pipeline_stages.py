"""Reads the stages of a pipeline that are written out in Megatron-Core's notation, such as ``Et|(tt|)*30mL``.

``E`` is the embedding, ``t`` a layer, ``m`` a multi-token module, ``L`` the loss with the head, ``|`` the border of two
stages. ``t*3`` is ``ttt``, ``(tt|)*3`` is ``tt|tt|tt|``; commas have no effect. The stages are in the order of the
model: under interleaved schedules stage s is chunk s // pp of rank s % pp, as in Megatron-Core
(``megatron.core.transformer.pipeline_parallel_layer_layout``). What is read here Megatron-Core reads the same way; it
also takes repetitions of repetitions and of zero times, which are refused here. No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from workloads.spec.checks import Values, shown
from workloads.spec.model_spec import MOST_LAYERS

_LETTERS = "EtmL"
_MUST = "the stages of a pipeline, such as Et|(tt|)*30L, or null"
_COUNT = re.compile(r"\*(\d+)")


@dataclass(frozen=True, slots=True)
class WrittenStages:
    """The stages of one text, in the order of the model."""

    stages: tuple[str, ...]
    """Letters of each stage, without repetitions."""
    layers: tuple[int, ...]
    """Number of layers of each stage."""

    @property
    def with_modules(self) -> tuple[int, ...]:
        """Number of layers and multi-token modules of each stage."""
        return tuple(layers + stage.count("m") for layers, stage in zip(self.layers, self.stages, strict=True))

    @property
    def num_layers(self) -> int:
        return sum(self.layers)

    @property
    def multi_token_modules(self) -> int:
        return sum(stage.count("m") for stage in self.stages)

    @property
    def empty_stage(self) -> int:
        """The first stage that holds nothing, counted from 1; 0 if every stage holds something."""
        return self.stages.index("") + 1 if "" in self.stages else 0


class _Mistake(Exception):
    """What is wrong with a text, as the rest of a sentence."""


@lru_cache(maxsize=1024)
def written_stages(text: str) -> WrittenStages:
    """The stages of a text without mistakes (`mistake_in`)."""
    stages = tuple("".join(letter for letter, _ in _unrolled(text)).split("|"))
    return WrittenStages(stages, tuple(stage.count("t") for stage in stages))


@lru_cache(maxsize=1024)
def mistake_in(text: str) -> str | None:
    """What is wrong with a text and at which character (counted from 1); None if it can be read."""
    try:
        _refuse_order(_unrolled(text))
    except _Mistake as mistake:
        return str(mistake)
    return None


def canonical_stages(text: str) -> str:
    """The shortest spelling that repeats letters within a stage and equal stages, so that one pipeline has one id."""
    *stages, last = [_shortest(stage) for stage in written_stages(text).stages]
    parts = []
    for stage, equal in groupby(stages):
        count = sum(1 for _ in equal)
        parts.append(min(f"{stage}|" * count, f"({stage}|)*{count}", key=len))
    return "".join([*parts, last])


class StagesText(Values):
    """The rule of the field: its refusal says what is wrong at which character."""

    __slots__ = ()

    def refusal(self, place: str, value: object) -> str:
        if not isinstance(value, str):
            return Values.refusal(self, place, value)
        return f"{place}={shown(value)}: {mistake_in(value)}"


def stages_texts() -> Values:
    return StagesText(
        accepts=lambda value: value is None or (isinstance(value, str) and mistake_in(value) is None), must=_MUST
    )


def _shortest(stage: str) -> str:
    runs = [(letter, sum(1 for _ in equal)) for letter, equal in groupby(stage)]
    return "".join(min(letter * count, f"{letter}*{count}", key=len) for letter, count in runs)


def _unrolled(text: str) -> Sequence[tuple[str, int]]:
    """Every letter and border with the position of its character, without repetitions and commas."""
    unrolled: list[tuple[str, int]] = []
    group: int | None = None  # where the open parenthesis is in the text
    start = 0  # of the last letter, or of the last group, in `unrolled`
    for at, character, count in _characters(text):
        if character == "(":
            if group is not None:
                raise _Mistake(f"character {at}, '(', opens a repetition inside of another; write the inner one out")
            group, start = at, len(unrolled)
            continue
        if character == ")":
            if group is None:
                raise _Mistake(f"character {at}, ')', closes nothing")
            if count is None:
                raise _Mistake(f"character {at}, ')', must be followed by *n, the number of repetitions")
            if start == len(unrolled):
                raise _Mistake(f"character {at}, ')', ends an empty repetition")
            repeated, group = unrolled[start:], None
        else:
            repeated = [(character, at)]
            unrolled += repeated
        if len(unrolled) + len(repeated) * ((count or 1) - 1) > 3 * MOST_LAYERS:
            raise _Mistake(f"character {at} repeats more than a model of at most {MOST_LAYERS:,} layers can have")
        unrolled += repeated * ((count or 1) - 1)
    if group is not None:
        raise _Mistake(f"character {group}, '(', is not closed")
    return unrolled


def _characters(text: str) -> Iterator[tuple[int, str, int | None]]:
    """Position, character and number of repetitions (None: none is written) of everything but commas."""
    at = 0
    while at < len(text):
        character, place = text[at], at + 1
        at += 1
        if character == ",":
            continue
        if character == "*":
            raise _Mistake(f"character {place}, '*', repeats nothing; it must follow one of {_LETTERS}| or ')'")
        if character not in f"{_LETTERS}|()":
            raise _Mistake(
                f"character {place}, {character!r}, is none of E (embedding), t (layer), m (multi-token module), "
                "L (loss), | (next stage), *n and (…)*n"
            )
        count = None
        if text[at : at + 1] == "*" and character != "(":
            if (written := _COUNT.match(text, at)) is None or not 1 <= len(written[1]) <= 6 or int(written[1]) < 1:
                raise _Mistake(f"character {at + 1}, '*', must be followed by a number from 1 to 999999")
            count, at = int(written[1]), written.end()
        yield place, character, count


def _refuse_order(unrolled: Sequence[tuple[str, int]]) -> None:
    """Raises `_Mistake` unless the embedding is first, the loss last, each once, and no layer follows a module."""
    for letter, name in (("E", "the embedding"), ("L", "the loss")):
        found = [at for one, at in unrolled if one == letter]
        if not found:
            raise _Mistake(f"it has no {letter}, {name}; the first stage begins with E, the last one ends with L")
        if len(found) > 1:
            raise _Mistake(f"character {found[1]} is a second {letter}; {name} is once in a model")
    if unrolled[0][0] != "E":
        raise _Mistake(f"character {unrolled[0][1]}, {unrolled[0][0]!r}, is before E; the first stage begins with E")
    if unrolled[-1][0] != "L":
        raise _Mistake(f"character {unrolled[-1][1]}, {unrolled[-1][0]!r}, is after L; the last stage ends with L")
    modules = [place for place, (letter, _) in enumerate(unrolled) if letter == "m"]
    late = [at for letter, at in unrolled[modules[0] :] if letter == "t"] if modules else []
    if late:
        raise _Mistake(f"character {late[0]}, 't', is after m; multi-token modules follow the last layer")
