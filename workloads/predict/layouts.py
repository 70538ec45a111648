"""Predicted step times of experiments: the closed form of a table row for each, and a factor for how a layout differs.

A table row (`workloads.predict.points`) has degrees, a ZeRO stage and a kind of recomputation. An experiment may have
more: another schedule, recomputation of every n-th layer, experts, latent attention, replicas of shards, 32 bits. Its
time follows from the form's prediction of ``plain(e)``, the nearest experiment that a row describes, and from both
steps as sums of their parts at calibrated rates (`workloads.predict.factors`). A plain experiment needs only the form.
Tiers of a network beyond its first are in the sum of e alone, unless e is plain, so that a faster tier never makes a
step longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from workloads.costs.shape.params import matmul_of
from workloads.costs.shape.peer_memory import WITHOUT_SHARED_MEMORY, shares_memory
from workloads.costs.time.attention_rates import attention_relative
from workloads.costs.time.model_parallel import ModelParallel
from workloads.costs.time.rank_times import Ints
from workloads.costs.time.step_times import StepTimes
from workloads.predict.experts.overheads import host_waits_of_experts, host_work_of_experts
from workloads.predict.factors import Factors
from workloads.predict.hardware import CALIBRATED_AT
from workloads.predict.network_terms import network_rows, without_outer_tiers
from workloads.predict.points import CAPTURED, RATE_NAMES, RECOMPUTE, UNLIKE, Floats, Points, Texts, fp8_kind
from workloads.predict.recomputed_layers import host_share, nearest_word
from workloads.predict.time_terms import fill_share
from workloads.rules.captured_steps import is_captured
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Precision
from workloads.spec.model_layers import layers_of, splits_of
from workloads.spec.model_spec import ModelSpec, canonical_model
from workloads.spec.recomputation import is_by_stage
from workloads.spec.updates.words import UPDATE_FIELDS

CODEBASE = "ultrasweep"
"""Name of this engine's profile."""
PRECISIONS = ("bf16", "fp16")
"""16-bit precisions that the form knows; it knows fp8, too."""
STRUCTURE_SPREAD = 0.5
"""Standard deviation of log(structure factor), relative to that logarithm, at least `LEAST_STRUCTURE_SPREAD`, of a
measured row that teaches: with 0.2, captured steps of a model that was left out were 3.6 % off instead of 3.5."""
PLANNED_SPREAD = 0.2
"""The same of a layout that is predicted. With factors of 1.8 to 2.7 and nothing fitted, nine in ten of the recorded
layouts are off by at most 0.33 (53 on H200) and 0.40 (15 on H100) in logarithms if steps are eager, and by 0.10 (54) if
they are captured."""
LEAST_STRUCTURE_SPREAD = 0.03
IN_COMMON = 0.5
"""Share of the variance of a table row's structure factor that is off alike in rows that are alike: half, as nothing is
known of its parts."""
_MOST_KEPT = 100_000
"""Maximum number of plain neighbours whose times are cached."""
_PLAIN_SCHEDULES = ("none", "1f1b")
_CHUNKED = "interleaved_1f1b"
"""The schedule that a row describes, too, but of which the form only divides the fill by chunks. What its execution
takes beyond that is in the factor."""


def is_predicted(experiment: Experiment, cluster: ClusterSpec) -> bool:
    """Whether the form knows enough: the device's rates in this precision, and links between its nodes."""
    device, precision = cluster.device, experiment.precision
    return (
        device.peak_of(precision) is not None
        and (device.peak_of("bf16") is not None or not fp8_kind(precision))
        and device.memory_bandwidth is not None
        and cluster.matmul_efficiency is not None
        and (cluster.joined_devices is None or experiment.world_size <= cluster.joined_devices)
    )


def is_plain(e: Experiment) -> bool:
    """Whether a table row describes the experiment completely."""
    return (
        _is_form_precision(e.precision)
        and e.model.moe is None
        and e.model.mla is None
        and e.model.layers is None
        and not _has_odd_schedule(e)
        and (e.cp == 1 or e.cp_kind == "ring")
        and (e.tp == 1 or e.sequence_parallel)
        and (e.zero_stage == 0 or e.dp_replicate == 1)
        and e.recompute in RECOMPUTE
        and e.recompute_every == 1
        and e.activation_offload == "none"
        and not e.gradient_accumulation_fusion
        and not e.update_words
        and e.documents is None
        and not shares_memory(e)
    )


def has_odd_layers(e: Experiment) -> bool:
    """Whether the experiment has layers that a table row does not describe."""
    odd = e.model.moe is not None or e.model.mla is not None or e.model.layers is not None
    return odd or e.recompute not in RECOMPUTE or e.recompute_every > 1


def _has_odd_schedule(e: Experiment) -> bool:
    return e.pp_schedule not in _PLAIN_SCHEDULES or (e.pp > 1 and (e.pp_split != "balanced" or e.pp_stages is not None))


def _plain_schedule(e: Experiment) -> dict[str, Any]:
    schedule, stages = (e.pp_schedule, e.virtual_stages) if e.pp_schedule == _CHUNKED else (_unchunked(e), 1)
    return {"pp_schedule": schedule, "virtual_stages": stages, "pp_split": "balanced", "pp_stages": None}


def _unchunked(e: Experiment) -> str:
    return e.pp_schedule if e.pp_schedule in _PLAIN_SCHEDULES else "1f1b"


def _chunks(e: Experiment) -> int:
    """`Points.vpp`."""
    return e.virtual_stages if e.pp_schedule == _CHUNKED else 1


def _with_plain_schedule(e: Experiment) -> Experiment:
    schedule = {**_plain_schedule(e), "pp_schedule": _unchunked(e), "virtual_stages": 1}
    if is_by_stage(e.recompute) and schedule["virtual_stages"] != e.virtual_stages:  # then there are other stages
        schedule["recompute"] = nearest_word(e)
    return dataclasses.replace(e, **schedule)


def _is_form_precision(precision: str) -> bool:
    return precision in PRECISIONS or fp8_kind(precision) > 0


def plain(e: Experiment) -> Experiment:
    """The nearest experiment that `is_plain`: equal degrees, batch and size."""
    precision: Precision = e.precision if _is_form_precision(e.precision) else "bf16"
    near = dataclasses.replace(
        e,
        **_plain_schedule(e),
        model=plain_model(e.model),
        precision=precision,
        dp_replicate=1 if e.zero_stage else e.dp_replicate,
        dp_shard=e.dp_replicate * e.dp_shard if e.zero_stage else e.dp_shard,
        ep=1,
        etp=1,
        routing="balanced",
        routing_imbalance=1.0,
        capacity_factor=None,
        cp_kind="ring",
        sequence_parallel=True,
        recompute=nearest_word(e),
        recompute_every=1,
        activation_offload="none",
        gradient_accumulation_fusion=False,
        **UPDATE_FIELDS,
        recurrence="torch",
        documents=None,
        document_balance="none",
    )
    return dataclasses.replace(near, engine_version=WITHOUT_SHARED_MEMORY[-1]) if shares_memory(near) else near


@lru_cache(maxsize=256)
def plain_model(model: ModelSpec) -> ModelSpec:
    """A dense model with equally many layers, whose heads have the size of queries and whose feed-forward part has the
    mean number of columns that a token uses."""
    if model.layers is not None:
        return _plain_of_layers(model)
    if model.moe is None and model.mla is None:
        return model
    model = canonical_model(model)
    columns = model.ffn_hidden_size
    if (moe := model.moe) is not None:
        routed = (moe.experts_per_token + moe.num_shared_experts) * moe.expert_hidden_size
        first = min(moe.num_dense_layers, model.num_layers)
        columns = round((first * columns + (model.num_layers - first) * routed) / model.num_layers)
    return dataclasses.replace(
        model, name=f"{model.name} as a dense one", ffn_hidden_size=max(1, columns), moe=None, mla=None
    )


def _plain_of_layers(model: ModelSpec) -> ModelSpec:
    """A dense model whose layers, attention and MLP in turn, have the mean number of columns that a token multiplies:
    the head as large as the largest, MLPs with the rest."""
    heads, layers = splits_of(model), layers_of(model)
    attention = 2 * model.head_dim * (heads.heads + heads.kv_heads) if heads.heads else 0
    active = sum(matmul_of(layers.kinds[at], model.hidden_size) for at in layers.order) / model.num_layers
    columns = max(1, round((active / model.hidden_size - attention) / 3))
    return dataclasses.replace(
        model, name=f"{model.name} as a dense one", ffn_hidden_size=columns, moe=None, mla=None, layers=None
    )


_OF_PLAIN = attrgetter(
    *("model", "precision", "dp", "cp", "tp", "pp", "zero_stage", "micro_batch_size", "global_batch_size", "seq_len"),
    *("recompute", "attention", "compile", "pad_vocab_to"),
)
"""Properties that determine the times of a `plain` neighbour."""


@dataclasses.dataclass(slots=True)
class Structures:
    """Factors of layouts on one cluster, with a cache of step times."""

    cluster: ClusterSpec
    _times: StepTimes = dataclasses.field(init=False)
    _near_times: StepTimes = dataclasses.field(init=False)
    """Of neighbours, on the first tier of the network alone."""
    _plain: dict[Hashable, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    """`StepTimes.parted_s` of plain neighbours, which many layouts share, by `_OF_PLAIN`."""

    def __post_init__(self) -> None:
        self._times = self._near_times = StepTimes(self.cluster)
        if (nearest := self.cluster.with_nearest_network()) is not self.cluster:
            self._near_times = StepTimes(nearest)

    def factors(self, experiments: Sequence[Experiment]) -> Factors:
        """Differences from the `plain` neighbour, by experiment; none if it `is_plain`, NaN if unknown."""
        factors = Factors.nothing(len(experiments))
        odd = [at for at, one in enumerate(experiments) if not is_plain(one)]
        if not odd:
            return factors
        odd_experiments = [experiments[at] for at in odd]
        own, near = self._times.parted_s(odd_experiments), self.plain_s(odd_experiments)
        factors.put(odd, Factors.between(own, near))
        return factors

    def plain_s(self, experiments: Sequence[Experiment]) -> Floats:
        """The first three parts of the `plain` neighbours' steps (`StepTimes.parted_s`), with their fill divided as the
        form divides it."""
        keys = [_OF_PLAIN(one) for one in experiments]
        if len(self._plain) > _MOST_KEPT:
            self._plain.clear()
        new = {key: one for key, one in zip(keys, experiments, strict=True) if key not in self._plain}
        parted = self._near_times.parted_s([self._near(one) for one in new.values()])
        self._plain |= zip(new, parted.T.tolist(), strict=True)
        work, *others, fill = np.array([self._plain[key] for key in keys]).reshape(-1, 4).T
        chunks = np.array([_chunks(one) for one in experiments])
        m, stages = (np.array([getattr(one, name) for one in experiments]) for name in ("num_microbatches", "pp"))
        return np.stack([work - (1 - fill_share(chunks, m, stages)) * fill, *others])

    def model_parallel(self, experiments: Sequence[Experiment]) -> ModelParallel:
        """What the experiments share with others, for `least_s`."""
        return self._near_times.model_parallel(experiments, least=True)

    def least(self, alike: ModelParallel, of: Ints, zero_stages: Ints, replicas: int, near_s: Floats) -> Factors:
        """`factors` with a lower bound of the work (`StepTimes.least_s`). ``near_s``: `plain_s` of the neighbours."""
        return Factors.between(self._near_times.least_s(alike, of, zero_stages, replicas), near_s)

    def of_layers(self, experiments: Sequence[Experiment], factors: Factors) -> Floats:
        """Part of the work's factors that is due to the layers, without the effect of another schedule."""
        of_layers = np.array(
            [one if has_odd_layers(e) else 1.0 for e, one in zip(experiments, factors.work, strict=True)]
        )
        both = [at for at, e in enumerate(experiments) if has_odd_layers(e) and _has_odd_schedule(e)]
        if both:
            plainly = [_with_plain_schedule(experiments[at]) for at in both]
            of_layers[both] = self.factors(plainly).work
        return of_layers

    def _near(self, e: Experiment) -> Experiment:
        near = _with_plain_schedule(plain(e))
        if self.cluster.device.peak_of(near.precision) is None:  # only the device's 32-bit rate is known
            near = dataclasses.replace(near, precision=e.precision)
        return near


def points_of(
    experiments: Sequence[Experiment],
    cluster: ClusterSpec,
    measured: Mapping[str, float] | None = None,
    of_layers: Floats | None = None,
    launch: Floats | None = None,
) -> Points:
    """Table rows for ``experiments`` (all must satisfy `is_predicted`). Device columns describe ``plain(e)``; host
    columns describe ``e`` itself.

    ``measured``: results of a probe (`workloads.predict.probed.probed`). ``launch``: `Points.launch` by experiment;
    None: that of ``measured``. ``of_layers``: `Structures.of_layers`, a part of the factors by which the caller
    multiplies: the host's part of such layers is predicted directly and takes no factor. Without it the host's part is
    that of a dense layer.
    """
    device, count = cluster.device, len(experiments)
    in_16_bits = device.peak_of("bf16")
    peak = np.array([in_16_bits or device.peak_of(e.precision) for e in experiments], dtype=float)
    rows: list[tuple[float, ...]] = []
    models: dict[str, ModelSpec] = {}
    for e in experiments:
        model = models.get(e.model.name)
        if model is None:
            model = models[e.model.name] = plain_model(e.model)
        rows.append((
            e.world_size, model.num_layers, model.hidden_size, model.num_heads, max(model.num_kv_heads, e.tp),
            model.ffn_hidden_size, model.vocab_size, model.tie_embeddings, e.seq_len, e.micro_batch_size,
            e.num_microbatches, e.dp, e.tp, e.pp, _chunks(e), e.cp,
            e.zero_stage, RECOMPUTE.index(nearest_word(e)),
            fp8_kind(e.precision), e.precision == "fp16", model.num_heads * model.head_dim, e.cp_kind == "ring",
            host_work_of_experts(e), host_waits_of_experts(e), e.model.mla is not None,
        ))  # fmt: skip
    values = np.array(rows, dtype=float).reshape(count, len(COLUMNS) + 4).T
    captured = [is_captured(e, cluster.backend) for e in experiments]
    versions = np.array([_version(*one) for one in zip(experiments, captured, strict=True)], dtype=np.str_)
    columns = dict(zip((*COLUMNS, "ring", "routed", "waits", "latents"), values, strict=True))
    if of_layers is None:
        columns |= {name: np.zeros(count) for name in _OF_HOSTS}
    columns["scaled"] = np.ones(count) if of_layers is None else of_layers
    columns["again"] = np.array([host_share(e) for e in experiments], dtype=float)
    columns["launch"] = np.ones(count) if launch is None else launch
    columns["compiled"] = np.array([e.engine != CODEBASE and e.compile != "none" for e in experiments], dtype=float)
    columns["captured"] = np.array(captured, dtype=float)
    columns["kernel"] = np.array([attention_relative(e) for e in experiments])
    points = points_from(columns, peak, versions, cluster, measured)
    return without_outer_tiers(points, [not is_plain(e) for e in experiments]) if points.outer.shape[1] else points


_OF_HOSTS = ("routed", "waits", "latents")
"""Columns of the host's part of layers that differ from dense ones."""


def without_layers(points: Points) -> Points:
    """The points of `points_of` without ``of_layers``, on the first tier of the network."""
    ones, zeros = np.ones(len(points)), np.zeros(len(points))
    return dataclasses.replace(without_outer_tiers(points), scaled=ones, **dict.fromkeys(_OF_HOSTS, zeros))


def _version(e: Experiment, captured: bool) -> str:
    """Version as in a table. Compiled layers of another engine leave errors of their own, and so do captured steps,
    which do not wait for a host."""
    compiled = " compiled" if e.engine != CODEBASE and e.compile != "none" else ""
    return f"engine {e.engine_version}" + compiled + (CAPTURED if captured else "")


def spread_of(factors: Floats, of_layers: Floats, share: float = STRUCTURE_SPREAD) -> Floats:
    """Standard deviation of log(structure factor), ``share`` of it. The parts due to layers (`Structures.of_layers`)
    and to another schedule count separately, since the two may cancel."""
    size = np.abs(np.log(of_layers)) + np.abs(np.log(factors / of_layers))
    spread: Floats = np.where(size > 0, np.maximum(LEAST_STRUCTURE_SPREAD, share * size), 0.0)
    return spread


def planned_doubt(structure_doubt: Floats) -> Floats:
    """`Points.structure_doubt`, which is that of rows that teach, of rows that are predicted."""
    least = math.sqrt(IN_COMMON) * LEAST_STRUCTURE_SPREAD
    planned = np.maximum(least, PLANNED_SPREAD / STRUCTURE_SPREAD * structure_doubt)
    doubt: Floats = np.where(structure_doubt > 0, planned, 0.0)
    return doubt


def points_from(
    columns: Mapping[str, Floats],
    peak: Floats,
    versions: Texts,
    cluster: ClusterSpec,
    measured: Mapping[str, float] | None = None,
) -> Points:
    """Rows of plain layouts given as arrays: ``columns`` has those of `COLUMNS`, and those of `UNLIKE` if there are
    such layers; ``peak``: FLOP/s of the device in 16 bits. ``measured`` as in `points_of`; the cluster's rates must be
    known (`is_predicted`)."""
    figures = measured or {}
    columns = {
        **{name: np.full(len(peak), value) for name, value in UNLIKE.items()},
        **columns,
    }
    for name in ("pace", "launch"):
        columns[name] = columns[name] * figures.get(name, 1.0)
    device, count = cluster.device, len(peak)
    share = cluster.matmul_efficiency
    assert share is not None
    scale = share / CALIBRATED_AT * figures.get("matmul", 1.0)
    peaks = np.array([device.peak_of(name) or np.nan for name in RATE_NAMES])

    def same(value: float | None) -> Floats:
        return np.full(count, np.nan if value is None else value)

    return Points(
        **columns,
        ep=np.ones(count),
        matrices=np.full(count, 3.0),
        codebase=np.array([CODEBASE] * count, dtype=np.str_),
        version=versions,
        device=np.array([cluster.name] * count, dtype=np.str_),
        peak=scale * peak,
        peak_matmul=scale * np.where(columns["fp8"] > 0, peaks[columns["fp8"].astype(int)], peak),
        memory_bandwidth=same(device.memory_bandwidth),
        capacity=same(device.memory_bytes),
        **network_rows(cluster, count),
        world_measured=same(figures.get("world_measured")),
        intra_measured=same(figures.get("intra_measured")),
    )


COLUMNS = (
    "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied", "seq", "mbs", "micro_batches", "dp", "tp",
    "pp", "vpp", "cp", "zero", "recompute", "fp8", "fp16", "queries",
)  # fmt: skip
"""Columns of `Points` that differ from experiment to experiment, in the order of `points_of`."""
