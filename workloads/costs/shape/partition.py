"""Layers, embedding and head that each pipeline stage, and each rank, holds.

``even`` gives all stages equally many layers. ``balanced`` counts the head too: its matrix product costs as much as one
or several layers, so the rank with the head gets fewer layers. The embedding is a look-up and counts nothing.
With packed documents it is the split of whole sequences, so that documents change no stage.
``ends_count`` counts embedding and head as one layer each, as most published recipes do. Stages that are written out
(``pp_stages``) hold what they say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.params import Counts, counted_tokens, layer_counts, matmul_of, whole_model
from workloads.costs.shape.schedule import place_of, stage_at
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PipelineSplit
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec
from workloads.spec.pipeline_stages import written_stages
from workloads.spec.recomputation import StageWord, is_by_stage, stage_words

MIXED = "mixed"


class LayerPlace(NamedTuple):
    """A layer of a stage in whose backward the stage may need most memory."""

    role: str
    """What it is among the layers of the stage, or, as a word before the name of its kind, among those of its kind."""
    kind: int
    """Index of its kind in `workloads.spec.model_layers.layers_of`."""
    recomputed: bool
    """Whether the policy of recomputation covers it."""
    after: tuple[tuple[int, int], ...]
    """For each kind: number of layers, and of recomputed ones, after it."""
    neighbours: tuple[int, int]
    """Kinds of the layers before and after it; -1 where there is none."""


@dataclass(frozen=True, slots=True)
class StageParams:
    """Parameters and layers of one pipeline rank. Counts are over the whole tensor-parallel group."""

    layers: Counts
    embedding: int
    """Parameters of the input embedding; 0 if this rank has none."""
    head: int
    """Parameters of the output projection; 0 if this rank has none, or has it as the tied embedding."""
    has_head: bool
    final_norm: int
    of_kind: tuple[int, ...] = ()
    """Number of layers of each kind of `workloads.spec.model_layers.layers_of`."""
    recomputed_of_kind: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    """Kinds of the layers, from the first to the last."""
    places: tuple[LayerPlace, ...] = ()
    """Layers of one stage in whose backward it may need most, from the last layer to the first; of several chunks
    together none."""
    recompute: str = ""
    """The word of its layers where ``Experiment.recompute`` has words of stages, else empty; `MIXED` for chunks with
    different words together."""

    @property
    def num_layers(self) -> int:
        return sum(self.of_kind)

    @property
    def total(self) -> int:
        return self.layers.total + self.embedding + self.head + self.final_norm


@lru_cache(maxsize=4096)
def stage_layers(
    model: ModelSpec, schedule: str, pp: int, virtual_stages: int, split: PipelineSplit, seq_len: int
) -> tuple[range, ...]:
    """Contiguous layers of every stage, in the order of the model.

    even        the first ``num_layers % stages`` stages hold one more than the others
    ends_count  as even, with embedding and head as two more layers (Megatron-LM's
                ``--account-for-embedding-in-pipeline-split`` and ``--account-for-loss-in-pipeline-split``)
    balanced    every stage gets a layer; each further one goes to the rank with least work, and there to the stage with
                least. Work is forward FLOPs per token; this makes the largest work of a rank as small as whole layers
                allow. Ties go to the earlier stage

    All modules of multi-token prediction are in the last stage; if that gives it more layers than the others have, the
    rest is divided over those. In a model of fewer layers than stages, which the rules refuse, the last stages have no
    layers.
    """
    count, modules = pp * virtual_stages, model.mtp_modules
    base, extra = divmod(model.num_layers, count)
    layers = [base + (stage < extra) for stage in range(count)]
    if split == "ends_count" and base:
        base, extra = divmod(model.num_layers + 2, count)
        layers = [base + (stage < extra) - (stage == 0) - (stage == count - 1) for stage in range(count)]
    elif split == "balanced" and base and model.layers is not None:
        head = 2.0 * model.vocab_size * model.hidden_size
        layers = _balanced_by_work(_work_of_layers(model, seq_len), head, count, max(1, modules))
    elif split == "balanced" and base:
        ranks = [place_of(schedule, stage, pp, virtual_stages)[0] for stage in range(count)]
        head = head_in_layers(model, seq_len)
        work = [1.0] * (count - 1) + [1.0 + head]
        of_rank = [0.0] * pp
        for rank, layers_of_work in zip(ranks, work, strict=True):
            of_rank[rank] += layers_of_work
        layers = [1] * count
        for _ in range(model.num_layers - count):
            stage = min(range(count), key=lambda s: (of_rank[ranks[s]], work[s], s))
            layers[stage] += 1
            work[stage] += 1.0
            of_rank[ranks[stage]] += 1.0
    if layers[-1] < modules and count > 1:
        base, extra = divmod(model.num_layers - modules, count - 1)
        layers = [*(base + (stage < extra) for stage in range(count - 1)), modules]
    return _contiguous(layers)


def _contiguous(layers: Sequence[int]) -> tuple[range, ...]:
    starts = [sum(layers[:stage]) for stage in range(len(layers))]
    return tuple(range(start, start + size) for start, size in zip(starts, layers, strict=True))


def _places(held: Sequence[tuple[int, bool]], kinds: int) -> tuple[LayerPlace, ...]:
    """`StageParams.places` of layers in order, each a kind and whether it is recomputed.

    Of layers alike, the last one needs most if each saves more than its gradient takes, else the first one; and with
    tensors that come back from the host for two layers at a time, the second one. Beside the last layer's backward
    nothing was reduced, so that the layer before it may need more.
    """
    alike: dict[tuple[int, bool], list[int]] = {}
    for place, one in enumerate(held):
        alike.setdefault(one, []).append(place)
    last = len(held) - 1
    roles: dict[int, str] = {}
    for of_class, places in alike.items():
        word = " recomputed" if of_class[1] and (of_class[0], False) in alike else ""
        if len(places) > 1:
            roles[places[1]] = f"second{word}"
            roles[places[-1]] = f"last{word}"
        roles[places[0]] = f"first{word}"
    if last > 0 and not roles.get(last - 1, "").startswith("first"):
        roles[last - 1] = "layer before"
    roles[last] = "last layer"
    found: list[LayerPlace] = []
    layers, again = [0] * kinds, [0] * kinds
    for at in range(last, -1, -1):
        kind, recomputed = held[at]
        if at in roles:
            neighbours = (held[at - 1][0] if at else -1, held[at + 1][0] if at < last else -1)
            after = tuple(zip(layers, again, strict=True))
            found.append(LayerPlace(roles[at], kind, recomputed, after, neighbours))
        layers[kind] += 1
        again[kind] += recomputed
    return tuple(found)


def _work_of_layers(model: ModelSpec, seq_len: int) -> list[float]:
    """Forward FLOPs of a token in each layer."""
    layers, hidden, counted = layers_of(model), model.hidden_size, counted_tokens(model, seq_len)
    head = 2.0 * model.vocab_size * hidden
    work = [2.0 * matmul_of(k, hidden) + k.mixing(counted).forward + k.ahead * head for k in layers.kinds]
    return [work[at] for at in layers.order]


def _balanced_by_work(work: Sequence[float], head: float, count: int, at_end: int) -> list[int]:
    """Layers of each stage, at least ``at_end`` of the last one, so that the most work of a stage is least, of layers
    that differ; then the same of the stages before the last one, and so on. Later stages get more, because earlier ones
    hold more micro-batches."""
    before = [0.0, *accumulate(work)]
    sizes: list[int] = []
    left = len(work)
    for stages in range(count, 1, -1):
        ends, least = (head, at_end) if stages == count else (0.0, 1)
        low, high = 0.0, before[left] + ends
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if _fits(before, left, stages, ends, least, middle) else (middle, high)
        first = max(stages - 1, min(left - least, bisect_left(before, before[left] + ends - high)))
        sizes.append(left - first)
        left = first
    return [left, *reversed(sizes)]


def _fits(before: Sequence[float], left: int, stages: int, ends: float, least: int, most: float) -> bool:
    """Whether the first ``left`` layers fit into this many stages, each of at most this much work and at least one
    layer, the last one ``least``. ``before``: work of all layers before each; ``ends``: that of the head."""
    for stage in range(stages - 1, 0, -1):
        first = min(left - least, bisect_left(before, before[left] + ends - most))
        if first < stage:
            first = stage
        if before[left] - before[first] + ends > most:
            return False
        left, ends, least = first, 0.0, 1
    return before[left] + ends <= most


@lru_cache(maxsize=1024)
def _written(text: str, stages: int, num_layers: int) -> tuple[range, ...] | None:
    """Layers of every stage that is written out, with multi-token modules where the model has them among its layers;
    None for another number of stages or layers, which the rules refuse."""
    written = written_stages(text)
    for layers in (written.layers, written.with_modules):
        if (len(layers), sum(layers)) == (stages, num_layers):
            return _contiguous(layers)
    return None


def head_in_layers(model: ModelSpec, seq_len: int) -> float:
    """Forward FLOPs of the head divided by those of a layer (of the mean layer if they differ)."""
    work = _work_of_layers(model, seq_len)
    return 2.0 * model.vocab_size * model.hidden_size * len(work) / sum(work)


def experiment_layers(experiment: Experiment) -> tuple[range, ...]:
    """Layers of every stage of an experiment."""
    e = as_held(experiment)
    if e.pp_stages is not None and (written := _written(e.pp_stages, e.num_stages, e.model.num_layers)) is not None:
        return written
    return stage_layers(e.model, e.pp_schedule, e.pp, e.virtual_stages, e.pp_split, e.seq_len)


def experiment_stages(experiment: Experiment) -> tuple[StageParams, ...]:
    """`StageParams` of each pipeline rank of an experiment, summed over its stages."""
    return _ranks(*_split(experiment))


def experiment_chunks(experiment: Experiment) -> tuple[tuple[StageParams, ...], ...]:
    """`StageParams` of each chunk of each pipeline rank of an experiment."""
    return _chunks(*_split(experiment))


def ranks_alike(experiment: Experiment) -> tuple[int, ...]:
    """A number for each pipeline rank, equal for ranks whose chunks hold the same."""
    return _alike(*_split(experiment))


def part_of_experiment(e: Experiment, held: StageParams) -> Experiment:
    """The experiment whose every layer has the word of recomputation of a rank's or chunk's layers; itself if that is
    the word of all. Chunks with different words together have none: nothing that the word changes may be read."""
    return e if not held.recompute else with_word(e, "none" if held.recompute == MIXED else held.recompute)


def with_word(e: Experiment, word: str) -> Experiment:
    """The experiment with one word of recomputation for all layers."""
    return e if e.recompute == word else replace(e, recompute=word)


def words_of_stages(e: Experiment) -> tuple[StageWord, ...]:
    """The word of every stage of the pipeline. For another number of words than of stages, which the rules refuse, the
    first word stands for those that lack."""
    words = stage_words(e.recompute)
    return tuple(words[stage] if stage < len(words) else words[0] for stage in range(e.num_stages))


def recompute_by_layer(e: Experiment) -> tuple[str, ...]:
    """The word of recomputation of every layer of the model."""
    found: list[str] = []
    for layers, one in zip(experiment_layers(e), words_of_stages(e), strict=True):
        for place, layer in enumerate(layers):
            covered = layer % e.recompute_every == 0 if not one.first else place < one.first
            found.append(one.word if covered else "none")
    return tuple(found)


_Split = tuple[ModelSpec, str, int, int, tuple[range, ...], int, tuple[StageWord, ...]]


def _split(e: Experiment) -> _Split:
    """Arguments of `_chunks`. The last ones: layers whose index is a multiple of it are recomputed; or the words of the
    stages, if there is more than one word for all layers."""
    e, every = as_held(e), e.recompute_every if e.recompute != "none" else 1
    words = words_of_stages(e) if is_by_stage(e.recompute) else ()
    return e.model, e.pp_schedule, e.pp, e.virtual_stages, experiment_layers(e), every, words


@lru_cache(maxsize=4096)
def _alike(*split: *_Split) -> tuple[int, ...]:
    chunks = _chunks(*split)
    return tuple(chunks.index(of_rank) for of_rank in chunks)


@lru_cache(maxsize=4096)
def _ranks(*split: *_Split) -> tuple[StageParams, ...]:
    return tuple(_together(of_rank) for of_rank in _chunks(*split))


def _together(stages: tuple[StageParams, ...]) -> StageParams:
    holding = [one for one in stages if one.num_layers] or [stages[0]]
    return StageParams(
        layers=sum((one.layers for one in stages), Counts()),
        embedding=sum(one.embedding for one in stages),
        head=sum(one.head for one in stages),
        has_head=any(one.has_head for one in stages),
        final_norm=sum(one.final_norm for one in stages),
        of_kind=tuple(map(sum, zip(*(one.of_kind for one in stages), strict=True))),
        recomputed_of_kind=tuple(map(sum, zip(*(one.recomputed_of_kind for one in stages), strict=True))),
        order=tuple(kind for one in stages for kind in one.order),
        places=stages[0].places if len(stages) == 1 else (),
        recompute=holding[0].recompute if len({one.recompute for one in holding}) == 1 else MIXED,
    )


@lru_cache(maxsize=4096)
def _chunks(
    model: ModelSpec,
    schedule: str,
    pp: int,
    virtual_stages: int,
    layers: tuple[range, ...],
    every: int,
    words: tuple[StageWord, ...],
) -> tuple[tuple[StageParams, ...], ...]:
    """`StageParams` by rank and chunk. The two end stages of a tied embedding both hold and train it, and those of a
    model with modules of multi-token prediction."""
    model_layers, at_end = layers_of(model), whole_model(model).streams
    kinds, order = range(len(model_layers.kinds)), model_layers.order
    last_norm = model.hidden_size
    if at_end is not None:
        last_norm += sum(weight.parameters for weight in at_end.weights_at_end(model.hidden_size))
    vocabulary = model.vocab_size * model.hidden_size
    last = len(layers) - 1
    embeds = [stage == 0 or (stage == last and model.mtp_modules > 0) for stage in range(last + 1)]
    stages = []
    for stage, held in enumerate(layers):
        of_kind = Counter(order[layer] for layer in held)
        first = words[stage].first if words else 0
        recomputed = [at for place, at in enumerate(held) if (place < first if first else at % every == 0)]
        recomputed_of_kind = Counter(order[layer] for layer in recomputed)
        stages.append(
            StageParams(
                layers=sum((layer_counts(model, model_layers.kinds[kind]) * of_kind[kind] for kind in kinds), Counts()),
                embedding=vocabulary if embeds[stage] else 0,
                head=vocabulary if stage == last and not (embeds[last] and model.tie_embeddings) else 0,
                has_head=stage == last,
                final_norm=last_norm if stage == last else 0,
                of_kind=tuple(of_kind[kind] for kind in kinds),
                recomputed_of_kind=tuple(recomputed_of_kind[kind] for kind in kinds),
                order=tuple(order[layer] for layer in held),
                places=_places([(order[layer], layer in recomputed) for layer in held], len(kinds)),
                recompute=words[stage].word if words else "",
            )
        )
    return tuple(
        tuple(stages[stage_at(schedule, rank, chunk, pp)] for chunk in range(virtual_stages)) for rank in range(pp)
    )
