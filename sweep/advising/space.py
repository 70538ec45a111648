"""All layouts of a model on some numbers of devices, as arrays: the combinations of the axes that obey the rules.

A *row* is a family of layouts: degrees, micro-batch and ZeRO stage. Recomputation, pipeline schedule, replicas of
shards and kind of context parallelism vary within a row; they are expanded only for promising rows. The rules for rows
are repeated here for whole arrays; `workloads.rules.layout_rules` checks each layout that is expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sweep.advising.axes import axes_of, schedules_of, tensor_degrees
from sweep.advising.conditions import OF_GROUPS, OF_LAYOUTS, holds, meets
from sweep.advising.question import Question
from sweep.grids.columns import field_of
from workloads.costs.shape.schedule import V_SHAPED
from workloads.rules.derived_values import divisors
from workloads.rules.layout_rules import layout_violations, violations
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.model_layers import splits_of
from workloads.spec.recurrent_kernels import key_sizes
from workloads.spec.updates.words import UPDATE_FIELDS

Ints = NDArray[np.int64]
MOST_ROWS = 3_000_000


class LayoutGroup(NamedTuple):
    """Layouts of a row that share one bound."""

    recompute: str
    every: int
    schedule: str
    virtual_stages: int
    replicas: int
    """Replicas of ZeRO's shards. Without ZeRO every data-parallel rank is a replica, whatever this value."""

    cp_kind: str

    @property
    def values(self) -> dict[str, Any]:
        """Values of `OF_GROUPS` of the group's layouts."""
        every = self.every if self.recompute != "none" else 1
        return {**self._asdict(), "recompute_every": every, "pp_schedule": self.schedule}

    @property
    def is_plain(self) -> bool:
        """Whether the bound is nearly exact for these layouts."""
        return (
            self.cp_kind == "ring"
            and self.replicas == 1
            and self.every == 1
            and self.schedule in ("none", "1f1b", "interleaved_1f1b")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSpace:
    """Rows that obey the rules; every array has one entry per row."""

    question: Question
    size: Ints
    dp: Ints
    tp: Ints
    cp: Ints
    pp: Ints
    ep: Ints
    etp: Ints
    mbs: Ints
    zero: Ints
    recomputations: tuple[tuple[str, int], ...]
    """Pairs (kind, every) tried for each row."""
    schedules: tuple[tuple[str, int], ...]
    """Pairs (schedule, virtual stages) tried for pipelines."""
    replicas: tuple[int, ...]
    kinds: tuple[str, ...]
    """Kinds of context parallelism."""
    combinations: int
    """Number of combinations of the axes' values."""
    allowed: int
    """Number of layouts in the rows."""

    def __len__(self) -> int:
        return len(self.size)

    @property
    def unpiped(self) -> bool:
        """Whether some rows have no pipeline."""
        return bool((self.pp == 1).any())

    @property
    def micro_batches(self) -> Ints:
        counts: Ints = self.question.global_batch_size // (self.dp * self.mbs)
        return counts

    @property
    def groups(self) -> tuple[LayoutGroup, ...]:
        """Groups tried for each row."""
        schedules = (*((("none", 1),) if self.unpiped else ()), *self.schedules)
        groups = (
            LayoutGroup(kind, every, schedule, stages, replicas, cp_kind)
            for kind, every in self.recomputations
            for schedule, stages in schedules
            for replicas in dict.fromkeys((1, *self.replicas))
            for cp_kind in dict.fromkeys(("ring", *self.kinds))
        )
        conditions = [one for one in self.question.where if one.names <= OF_GROUPS]
        return tuple(group for group in groups if all(holds(one, group.values) for one in conditions))

    def meets(self, experiment: Experiment) -> bool:
        """Whether a layout meets the conditions that its family and its group do not decide."""
        return meets(experiment, [one for one in self.question.where if not one.names <= OF_GROUPS])

    def layout(self, row: int, group: LayoutGroup) -> Experiment | None:
        """The layout of a row in a group, which may still break a rule; None: the row has none in this group."""
        dp, cp, zero = int(self.dp[row]), int(self.cp[row]), int(self.zero[row])
        replicas = dp if zero == 0 else group.replicas
        if (zero == 0 and group.replicas > 1) or (zero and group.replicas not in self.replicas):
            return None
        if (cp == 1 and group.cp_kind != "ring") or (cp > 1 and group.cp_kind not in self.kinds):
            return None
        if dp % replicas or (zero and dp // replicas * cp == 1):
            return None
        return self.spelled(row, group)

    def plain_group(self, row: int, cp_kind: str, replicas: int = 1) -> LayoutGroup:
        """The group of a row whose structure stands for all its schedules and kinds of recomputation."""
        schedule = "1f1b" if self.pp[row] > 1 else "none"
        recompute = "selective" if self.question.engine == ENGINE else "none"  # others have no selective one
        return LayoutGroup(recompute, 1, schedule, 1, replicas, cp_kind)

    def spelled(self, row: int, group: LayoutGroup) -> Experiment:
        """The layout of a row in a group that need not be one of the space's; it may break a rule."""
        q, dp, zero = self.question, int(self.dp[row]), int(self.zero[row])
        replicas = dp if zero == 0 else group.replicas
        return Experiment.canonical(
            model=q.model,
            dp_replicate=replicas,
            dp_shard=dp // replicas,
            tp=int(self.tp[row]),
            cp=int(self.cp[row]),
            pp=int(self.pp[row]),
            ep=int(self.ep[row]),
            etp=int(self.etp[row]),
            micro_batch_size=int(self.mbs[row]),
            global_batch_size=q.global_batch_size,
            zero_stage=zero,
            recompute=group.recompute,
            recompute_every=group.every,
            pp_schedule=group.schedule,
            virtual_stages=group.virtual_stages,
            cp_kind=group.cp_kind,
            **{name: getattr(q, name) for name in _SAME},
        )


def space_of(question: Question) -> LayoutSpace:
    """Builds the space. Raises `InvalidSweep` with the limits of the degrees if no layout obeys the rules."""
    q, model = question, question.model
    axes = axes_of(question)
    may_split = tensor_degrees(question)
    sizes = np.array(q.sizes, dtype=np.int64)
    degrees = [axes[name] for name in ("tp", "cp", "pp", "ep", "etp", "micro_batch_size", "zero_stage")]
    dps = divisors(q.global_batch_size)
    count = int(np.prod([len(one) for one in degrees])) * len(dps)
    if count > MOST_ROWS:
        raise InvalidSweep(
            f"advise: the axes span {count:,} families of layouts, at most {MOST_ROWS:,}; narrow one: tp=[1,2,4,8]"
        )
    columns = [one.ravel() for one in np.meshgrid(*(np.array(one) for one in degrees), np.array(dps), indexing="ij")]
    tp, cp, pp, ep, etp, mbs, zero, dp = columns
    size = tp * cp * pp * dp
    keep = (
        np.isin(size, sizes)
        & (q.global_batch_size % (dp * mbs) == 0)
        & np.isin(tp, may_split)
        & (pp <= model.num_layers)
    )
    keep &= ((cp == 1) | (q.seq_len % (2 * cp) == 0)) & (mbs * q.seq_len // cp % tp == 0)
    keep &= (zero == 0) | (dp * cp > 1)
    if key_sizes(model):
        keep &= (cp == 1) | (splits_of(model).recurrent_heads // tp % cp == 0)
    if (moe := model.moe) is not None:
        keep &= ((etp == 1) | (etp == tp)) & (moe.num_experts % ep == 0) & (moe.expert_hidden_size % etp == 0)
        keep &= dp * cp * tp // etp % ep == 0
    if not keep.any():
        raise InvalidSweep(
            f"advise: no layout of {model.name} on {_span_text(q.sizes)} devices obeys the rules: dp*cp*tp*pp must "
            f"equal the number of devices, dp*micro_batch_size must divide global_batch_size={q.global_batch_size:,}, "
            f"tp must be one of {', '.join(map(str, may_split))}, and pp is at most {model.num_layers}"
        )
    keep[keep] = _meets(question, *(one[keep] for one in columns))
    if not keep.any():
        raise InvalidSweep(f"advise: no layout meets --where {' and '.join(one.text for one in q.where)}")
    rows = {
        name: array[keep]
        for name, array in zip(
            ("size", "dp", "tp", "cp", "pp", "ep", "etp", "mbs", "zero"),
            (size, dp, tp, cp, pp, ep, etp, mbs, zero),
            strict=True,
        )
    }
    recomputations, schedules, kinds = _beside_offload(question, axes)
    replicas = axes["dp_replicate"]
    inner = len(recomputations) * max(1, len(schedules)) * len(replicas) * len(kinds)
    return LayoutSpace(
        question=question,
        **rows,
        recomputations=recomputations,
        schedules=schedules,
        replicas=replicas,
        kinds=kinds,
        combinations=len(q.sizes) * int(np.prod([len(one) for one in degrees])) * inner,
        allowed=_allowed(question, rows, schedules, replicas, kinds) * len(recomputations),
    )


def _beside_offload(
    q: Question, axes: Mapping[str, tuple[Any, ...]]
) -> tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Recomputations, schedules and kinds of context parallelism, of the axes' values those that go with the question's
    activations on the host. Raises `InvalidSweep` with the rule if no recomputation does."""
    recomputations = tuple(
        (kind, every)
        for kind in axes["recompute"]
        for every in axes["recompute_every"]
        if kind != "none" or every == axes["recompute_every"][0]
    )
    schedules, kinds = schedules_of(q), axes["cp_kind"]
    if q.activation_offload == "none":
        return recomputations, schedules, kinds

    def refused(**fields: Any) -> str | None:
        e = _one(q, **{"recompute": recomputations[0][0], **fields})
        broken = (one for one in layout_violations(e) if one.rule.startswith("activation_offload"))
        return next((one.message for one in broken), None)

    why = [refused(recompute=kind, recompute_every=every) for kind, every in recomputations]
    allowed = tuple(one for one, reason in zip(recomputations, why, strict=True) if reason is None)
    if not allowed:
        raise InvalidSweep(f"advise: {why[0]}")
    recomputations = allowed
    schedules = tuple((name, v) for name, v in schedules if refused(pp=2, pp_schedule=name, virtual_stages=v) is None)
    return recomputations, schedules, tuple(one for one in kinds if refused(cp=2, cp_kind=one) is None)


def refuse_what_no_layout_may(q: Question) -> None:
    """Raises `InvalidSweep` with the rule if what all layouts of a question share breaks one on a single device."""
    if broken := violations(_one(q), q.cluster):
        raise InvalidSweep(*(f"advise: {one.message}" for one in broken))


def _one(q: Question, **fields: Any) -> Experiment:
    """A layout with what all layouts of a question share, else on one device as plain as can be."""
    same = {name: getattr(q, name) for name in _SAME}
    return Experiment.canonical(model=q.model, global_batch_size=q.global_batch_size, **{**same, **fields})


def _meets(q: Question, tp: Ints, cp: Ints, pp: Ints, ep: Ints, etp: Ints, mbs: Ints, zero: Ints, dp: Ints) -> Any:
    """Rows that meet the conditions on what all layouts of a family share."""
    met = np.ones(len(tp), dtype=bool)
    if not (conditions := [one for one in q.where if not one.names & OF_LAYOUTS]):
        return met
    columns: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp, "micro_batch_size": mbs}
    columns |= {"zero_stage": zero, "dp": dp, "world_size": tp * cp * pp * dp}
    columns["num_microbatches"] = q.global_batch_size // (dp * mbs)
    names = {name for one in conditions for name in one.names}
    used = [name for name in columns if name in names]
    same = {name: _same(q, name) for name in names - set(used)}
    for condition in conditions:
        known: dict[tuple[int, ...], bool] = {}
        for at, values in enumerate(zip(*(columns[name].tolist() for name in used), strict=True)):
            if values not in known:
                known[values] = holds(condition, {**same, **dict(zip(used, values, strict=True))})
            met[at] &= known[values]
        met &= bool(used) or holds(condition, same)
    return met


def _same(q: Question, name: str) -> Any:
    """The value of a field that is equal in all layouts of a question."""
    return field_of(_one(q), name)


_SAME = (
    *("seq_len", "precision", "routing", "routing_imbalance", "compile", "cuda_graph", "engine", "engine_version"),
    *("activation_offload", "recurrence", *UPDATE_FIELDS),
)


def _allowed(
    q: Question, rows: dict[str, Ints], schedules: tuple[tuple[str, int], ...], replicas: Any, kinds: Any
) -> int:
    """Number of layouts in the rows for each recomputation."""
    model, cp, tp, pp = q.model, rows["cp"], rows["tp"], rows["pp"]
    fitting = sum(((pp > 1) & (pp * v <= model.num_layers)).astype(np.int64) for _, v in schedules) + (pp == 1)
    whole_heads = (model.num_heads // tp % cp == 0) & (np.maximum(1, model.num_kv_heads // tp) % cp == 0)
    ways = sum(((cp > 1) & (whole_heads | (kind != "ulysses"))).astype(np.int64) for kind in kinds) + (cp == 1)
    copies = (rows["zero"] == 0).astype(np.int64)
    for r in replicas:
        sharded = (rows["zero"] > 0) & shards_are_whole(q, rows, r)
        copies = copies + sharded
    return int((fitting * ways * copies).sum())


def shards_are_whole(q: Question, rows: Mapping[str, Ints], replicas: int) -> Any:
    """Rows that may have so many replicas of ZeRO's shards, with more than one shard each, that ranks with the same
    experts are whole groups."""
    dp, cp = rows["dp"], rows["cp"]
    shards = dp // replicas * cp
    whole = (dp % replicas == 0) & (shards > 1)
    if q.model.moe is not None:
        of_experts = np.maximum(1, shards * rows["tp"] // rows["etp"])
        whole &= (of_experts % rows["ep"] == 0) | (rows["ep"] % of_experts == 0)
    return whole


def is_v_shaped(schedule: str) -> bool:
    return schedule in V_SHAPED


def _span_text(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
