"""The words of ``Experiment.recompute``: which operations of a layer its backward runs again. No torch here.

One word is that of every layer. Words of the stages of a pipeline are written one after another with ``/``, in the
order of the model: ``full/selective/none/none``, or ``full/selective/none*2``. Under interleaved schedules stage s is
chunk s // pp of rank s % pp, as in `workloads.spec.pipeline_stages`. ``full:3`` recomputes the first three layers of a
stage and keeps the others whole, as Megatron-LM's ``--recompute-method block --recompute-num-layers 3`` does in every
stage (``megatron.core.transformer.transformer_block``).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from workloads.spec.checks import Values, shown
from workloads.spec.model_spec import MOST_LAYERS

SELECTIVE = ("norm", "rope", "swiglu")
"""The cheap operations: outputs of norms, rotated queries and keys, the SwiGLU product. ``selective`` is all of
them."""
DEARER = ("mla_up", "experts")
"""Operations that are matrix products. They are not part of ``selective``; ``selective+mla_up+experts`` is all five.

mla_up   latent attention's up-projections, recomputed from the latents (Megatron-LM's ``mla_up_proj``)
experts  routed experts, recomputed from their received token copies, up to the input of their down projections.
         Megatron-LM's ``moe`` recomputes the whole layer from its input, including routing and the exchanges; here the
         received copies are kept and nothing is sent again
"""
OPERATIONS = (*SELECTIVE, *DEARER)
"""All operations, in the order of their names in ``recompute``. A new operation is added here."""


def _joined(names: tuple[str, ...]) -> str:
    cheap = [name for name in SELECTIVE if name in names]
    if len(cheap) == len(SELECTIVE):
        cheap = ["selective"]
    return "+".join([*cheap, *(name for name in DEARER if name in names)])


def _choices() -> tuple[str, ...]:
    """All values in increasing order: none, the cheap operations, the cheap ones with each combination of the dearer
    ones, full."""

    def some_of(names: tuple[str, ...]) -> list[tuple[str, ...]]:
        return [chosen for count in range(len(names) + 1) for chosen in combinations(names, count)]

    every = [_joined((*cheap, *dear)) for dear in some_of(DEARER) for cheap in some_of(SELECTIVE)]
    return ("none", *filter(None, every), "full")


CHOICES = _choices()
"""Words of one layer."""
MUST = (
    f"none, selective, full or some of {', '.join(OPERATIONS)}, joined by '+'; full:3 for the first layers of a stage; "
    "or such words of all stages, joined by '/', such as full/selective/none*2"
)
"""List of the allowed values for messages."""

if TYPE_CHECKING:
    Recompute = str
else:
    Recompute = Literal[CHOICES]


class StageWord(NamedTuple):
    """Recomputation of the layers of one stage."""

    word: str
    first: int
    """Number of layers from the stage's first that have the word, while the others keep everything; 0: all of them."""

    @property
    def text(self) -> str:
        return f"{self.word}:{self.first}" if self.first else self.word


def is_by_stage(recompute: str) -> bool:
    """Whether a text is more than the one word of all layers."""
    return "/" in recompute or ":" in recompute or "*" in recompute


@lru_cache(maxsize=4096)
def stage_words(recompute: str) -> tuple[StageWord, ...]:
    """The words of a valid text: one if all stages have the same, else one for each stage in the order of the model."""
    words: list[StageWord] = []
    for part in recompute.split("/"):
        text, count = part, 1
        if "*" in part:
            text, count = part.split("*")[0], int(part.split("*")[1])
        word, first = text, 0
        if ":" in text:
            word, first = text.split(":")[0], int(text.split(":")[1])
        words += [StageWord(word, first)] * count
    return tuple(words)


def operations_of(recompute: str) -> tuple[str, ...]:
    """Operations that a layer of one word recomputes one by one; empty with ``none`` and ``full``."""
    names = recompute.split("+")
    return tuple(name for name in OPERATIONS if name in names or (name in SELECTIVE and "selective" in names))


def joined_stages(words: tuple[StageWord, ...]) -> str:
    """The text of the words of all stages: the one word if all are equal, else each with the number of stages in a row
    that have it."""
    if len(set(words)) == 1:
        return words[0].text
    runs = [(one, sum(1 for _ in equal)) for one, equal in groupby(words)]
    return "/".join(one.text if count == 1 else f"{one.text}*{count}" for one, count in runs)


def canonical_recompute(value: Any, stages: int | None = None) -> Any:
    """``value`` with the operations of every word in canonical order, each once, and all cheap ones as ``selective``;
    with equal words in a row counted; and as one word if all of the pipeline's ``stages`` have the same. A value that
    is no recomputation is returned unchanged."""
    if not isinstance(value, str):
        return value
    parts = value.split("/")
    texts = [_canonical_part(part) for part in parts]
    if mistake_in_recompute("/".join(texts)) is not None:
        return value
    words = stage_words("/".join(texts))
    if len(texts) == 1 and "*" not in value:
        return words[0].text
    if len(set(words)) == 1 and len(words) != stages:
        return f"{words[0].text}*{len(words)}"  # of another number of stages than there are, which the rules refuse
    return joined_stages(words)


def mistake_in_recompute(text: str) -> str | None:
    """What is wrong with a text, apart from the order of operations; None if it can be read."""
    count = 0
    for part in text.split("/"):
        word, times, repeated = part.partition("*")
        word, colon, first = word.partition(":")
        if word not in CHOICES:
            return f"{shown(word)} is no recomputation of a layer"
        for mark, number in ((times, repeated), (colon, first)):
            if mark and not (number.isdecimal() and number.isascii() and 0 < int(number[:9]) <= MOST_LAYERS):
                return f"{shown(part)}: after {mark!r} there must be a whole number from 1 to {MOST_LAYERS:,}"
        if colon and word != "full":
            return f"{shown(part)}: only full can be limited to the first layers of a stage"
        count += int(repeated) if times else 1
    return f"{count:,} stages, more than a model of {MOST_LAYERS:,} layers can have" if count > MOST_LAYERS else None


class RecomputeText(Values):
    """The rule of the field: its refusal says what is wrong with a text by stage."""

    __slots__ = ()

    def refusal(self, place: str, value: object) -> str:
        if isinstance(value, str) and is_by_stage(value) and (mistake := mistake_in_recompute(value)) is not None:
            return f"{place}={shown(value)}: {mistake}; it must be {self.must}"
        return Values.refusal(self, place, value)


def recompute_texts() -> Values:
    """The rule of the field: canonical texts, apart from the number of stages."""
    return RecomputeText(
        accepts=lambda value: isinstance(value, str) and _is_canonical(value), must=MUST, choices=CHOICES
    )


@lru_cache(maxsize=4096)
def _is_canonical(text: str) -> bool:
    if text in CHOICES:
        return True
    return mistake_in_recompute(text) is None and text in (canonical_recompute(text), joined_stages(stage_words(text)))


def _canonical_part(part: str) -> str:
    """A stage's word with its operations in canonical order; anything else unchanged."""
    ends = [at for at, character in enumerate(part) if character in ":*"]
    word = part[: ends[0]] if ends else part
    named = word.split("+")
    if not set(named) <= {"selective", *OPERATIONS}:
        return part
    return _joined(operations_of(word)) + part[len(word) :]
