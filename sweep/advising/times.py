"""Where ``advise`` asks for step times: a plan's form with its intervals, and the bounds of many rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sweep.advising.question import Question
from sweep.advising.space import KINDS, Ints, Space
from sweep.grids.step_time import StepTime
from sweep.predicting.forecast import Forecast, Known, known_of
from workloads.predict import layouts
from workloads.predict.points import Floats, fp8_kind
from workloads.spec.experiment import ENGINE_VERSION, Experiment


@dataclass(frozen=True, slots=True)
class Times:
    forecast: Forecast

    @classmethod
    def of(cls, question: Question, known: Known | None = None) -> Times:
        """``known``: by default the measurements that a plan of the same cluster would use."""
        if known is None:
            known = known_of(question.config)
        return cls(Forecast.of(question.cluster, known))

    @property
    def source(self) -> str:
        """What the times come from, in words."""
        return self.forecast.used or "fitted on no row of this cluster: the closed form's shipped values alone"

    def of_layouts(self, experiments: Sequence[Experiment]) -> list[StepTime | None]:
        """What a plan says of them."""
        return self.forecast.times(experiments)

    def bounds(self, space: Space, rows: Ints, *, context: bool = True, ring: bool = True) -> Bounds:
        """What steps of these rows take, in the parts that a structure may save. ``context``: with what a ring of
        context-parallel ranks sends, which other kinds may not. ``ring``: with what its turns cost the host."""
        cluster, peak = self.forecast.cluster, self._peak(space)
        found = Bounds(*(np.empty((len(rows), len(KINDS))) for _ in Bounds._fields))
        for kind in range(len(KINDS)):
            for start in range(0, len(rows), _CHUNK):
                part = slice(start, min(start + _CHUNK, len(rows)))
                count = part.stop - part.start
                versions = np.array([f"engine {ENGINE_VERSION}"] * count, dtype=np.str_)
                columns = _columns(space, rows[part], kind) | {"ring": np.full(count, float(ring))}
                points = layouts.points_from(columns, np.full(count, peak), versions, cluster, self.forecast.rates)
                parts = self.forecast.predictor.seconds(points, None if context else {"context": 1e-9})
                found.work[part, kind] = parts.busy + parts.after
                found.fill[part, kind] = parts.pipeline - parts.busy
                found.traffic[part, kind] = parts.seen
        factor = layouts.EXPERTS if space.question.model.moe is not None else 1.0
        return Bounds(*(factor * one for one in found))

    def shares(self, experiment: Experiment) -> Shares:
        """What a step of a layout is made of. What its structure changes is taken to change all parts alike."""
        points = layouts.points_of([experiment], self.forecast.cluster, self.forecast.rates)
        parts = self.forecast.predictor.seconds(points)
        whole = float(parts.pipeline[0] + parts.seen[0] + parts.after[0])
        return Shares(
            work=float(parts.busy[0]) / whole,
            fill=float(parts.pipeline[0] - parts.busy[0]) / whole,
            traffic=float(parts.seen[0]) / whole,
            after=float(parts.after[0]) / whole,
        )

    def factors(self, experiments: Sequence[Experiment]) -> Floats:
        """How many times the bounds' time of experiments of one model their structure makes it."""
        forecast, structures = self.forecast, self.forecast.structures
        factors = structures.factors(experiments)
        of_layers = structures.of_layers(experiments, factors)
        own, plain = (
            forecast.predictor.seconds(layouts.points_of(experiments, forecast.cluster, forecast.rates, known))
            for known in (of_layers, None)
        )
        # The host's part of odd layers is known by itself, where the bounds have that of dense ones.
        of_form = (own.pipeline + own.seen + own.after) / (plain.pipeline + plain.seen + plain.after)
        found: Floats = factors * of_form / (layouts.EXPERTS if experiments[0].model.moe is not None else 1.0)
        return found

    def _peak(self, space: Space) -> float:
        device = self.forecast.cluster.device
        peak = device.peak_of("bf16") or device.peak_of(space.question.precision)
        assert peak is not None
        return peak


class Shares(NamedTuple):
    """Of a step; together 1."""

    work: float
    """Of the busiest stage, with what its tensor- and context-parallel peers make it wait."""
    fill: float
    """Filling and emptying the pipeline."""
    traffic: float
    """Gradients and weights that nothing hides."""
    after: float
    """The optimizer, and what a step takes whatever its size."""


class Bounds(NamedTuple):
    """Seconds of a step, each of shape (rows, `KINDS`); together they are what 1F1B takes."""

    work: Floats
    """The busiest stage's own, and what comes after the backward: no schedule and no replicas save that."""
    fill: Floats
    """Filling and emptying the pipeline."""
    traffic: Floats
    """Gradients and weights that nothing hides."""


_CHUNK = 20_000
"""Rows at one time: their stages are arrays as wide as the longest pipeline."""


def _columns(space: Space, rows: Ints, kind: int) -> dict[str, Floats]:
    q, model = space.question, layouts.plain_model(space.question.model)

    def same(value: float) -> Floats:
        return np.full(len(rows), float(value))

    found = {
        "gpus": space.size[rows], "layers": same(model.num_layers), "hidden": same(model.hidden_size),
        "heads": same(model.num_heads), "kv_heads": same(model.num_kv_heads), "ffn": same(model.ffn_hidden_size),
        "vocab": same(model.vocab_size), "tied": same(model.tie_embeddings), "seq": same(q.seq_len),
        "mbs": space.mbs[rows], "micro_batches": space.micro_batches[rows], "dp": space.dp[rows], "tp": space.tp[rows],
        "pp": space.pp[rows], "vpp": same(1), "cp": space.cp[rows], "zero": space.zero[rows], "recompute": same(kind),
        "fp8": same(fp8_kind(q.precision)),
        "fp16": same(q.precision == "fp16"),
    }  # fmt: skip
    return {name: values.astype(float) for name, values in found.items()}
