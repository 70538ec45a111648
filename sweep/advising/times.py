"""Step times for ``advise``: predictions with intervals as in a plan, and bounds for many rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sweep.advising.axes import KINDS
from sweep.advising.question import Question
from sweep.advising.space import Ints, LayoutSpace
from sweep.grids.step_time import StepTime
from sweep.predicting.codebases import key_of_engine
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known, known_of
from workloads.predict import layouts
from workloads.predict.factors import Factors
from workloads.predict.points import CAPTURED, Floats, Points, fp8_kind
from workloads.spec.experiment import ENGINE, ENGINE_VERSION, Experiment


@dataclass(frozen=True, slots=True)
class Times:
    forecast: Forecast
    engine: tuple[str, str] = (ENGINE, ENGINE_VERSION)
    """The engine that is asked for, and its version."""

    @classmethod
    def of(cls, question: Question, known: Known | None = None) -> Times:
        """``known``: by default the measurements that a plan of the same cluster would use."""
        if known is None:
            known = known_of(question.config)
        return cls(Forecast.of(question.cluster, known), (question.engine, question.engine_version))

    @property
    def source(self) -> str:
        """Source of the times, in words."""
        return (
            self.forecast.used_for([self.engine])
            or "fitted on no row of this cluster: the closed form's shipped values alone"
        )

    def of_layouts(self, experiments: Sequence[Experiment]) -> list[StepTime | None]:
        """Predictions as in a plan."""
        return self.forecast.times(experiments)

    def bounds(self, space: LayoutSpace, rows: Ints, *, context: bool = True, ring: bool = True) -> Bounds:
        """Seconds of a step for these rows, in parts: a schedule or another structure may shorten each part
        differently.

        ``context``: include the messages of a ring of context-parallel ranks, which other kinds may not send. ``ring``:
        include the host time of the ring.
        """
        cluster, peak = self.forecast.cluster, self._peak(space)
        nearest = cluster.with_nearest_network()  # what further tiers add is in the structure factor
        bounds_of_rows = Bounds(*(np.empty((len(rows), len(KINDS))) for _ in Bounds._fields))
        for kind in range(len(KINDS)):
            for start in range(0, len(rows), _CHUNK):
                part = slice(start, min(start + _CHUNK, len(rows)))
                count = part.stop - part.start
                asked = self.engine[0] == ENGINE and space.question.cuda_graph != "none"
                captured = asked and cluster.backend == "cuda"  # at best: a bound
                version = f"engine {self.engine[1]}" + (CAPTURED if captured else "")
                versions = np.array([version] * count, dtype=np.str_)
                choices = {"ring": np.full(count, float(ring)), "captured": np.full(count, float(captured))}
                columns = _columns(space, rows[part], kind) | choices
                points = layouts.points_from(columns, np.full(count, peak), versions, nearest, self.forecast.rates)
                if self.engine[0] != ENGINE:
                    points = _of_engine(points, self.engine, space.question.compile != "none")
                parts = self.forecast.predictor.seconds(points, None if context else {"context": 1e-9})
                bounds_of_rows.work[part, kind] = parts.busy + parts.after
                bounds_of_rows.fill[part, kind] = parts.pipeline - parts.busy
                bounds_of_rows.traffic[part, kind] = parts.seen
        return bounds_of_rows

    def shares(self, experiment: Experiment) -> Shares:
        """Shares of a layout's step, on the assumption that its structure scales the work of all its micro-batches by
        the same factor."""
        parts = self.forecast.predictor.seconds(self.forecast.points([experiment]))
        factors = self.forecast.structures.factors([experiment])
        busy, pipeline = (float(factors.work[0] * one[0]) for one in (parts.busy, parts.pipeline))
        others = float(factors.traffic_s(parts)[0]), float(factors.after_s(parts)[0])
        return Shares(*(one / (pipeline + sum(others)) for one in (busy, pipeline - busy, *others)))

    def factors(self, experiments: Sequence[Experiment]) -> Floats:
        """Ratio of the step time with each layout's structure to the time of the bounds, for experiments of one
        model."""
        structures = self.forecast.structures
        factors = structures.factors(experiments)
        points = self.forecast.points(experiments, structures.of_layers(experiments, factors))
        return self.of_bounds(factors, points)

    def narrowest(self, space: LayoutSpace, rows: Ints) -> float:
        """Least log-width of half of a 90 % interval over some of the rows, without the part of a structure factor."""
        some = rows[:: max(1, len(rows) // _SAMPLE)].tolist()
        points = self.forecast.points([space.spelled(row, space.plain_group(row, "ring")) for row in some])
        predicted = self.forecast.predictor.predict(points)
        return float(np.log(predicted.high_s / predicted.step_time_s).min(initial=np.inf))

    def of_bounds(self, factors: Factors, points: Points) -> Floats:
        """Structure factors relative to the bounds, whose hosts are those of dense layers. ``points``: with the host's
        part of the layers."""
        with_structure, plain = map(self.forecast.predictor.seconds, (points, layouts.without_layers(points)))
        ratios: Floats = factors.step_s(with_structure) / (plain.pipeline + plain.seen + plain.after)
        return ratios

    def _peak(self, space: LayoutSpace) -> float:
        device = self.forecast.cluster.device
        peak = device.peak_of("bf16") or device.peak_of(space.question.precision)
        assert peak is not None
        return peak


def _of_engine(points: Points, engine: tuple[str, str], compiled: bool) -> Points:
    """The points of another engine, whose launch overhead was not measured."""
    name, ones = key_of_engine(*engine), np.ones(len(points))
    versions = np.array([f"{one} compiled" if compiled else one for one in points.version], dtype=np.str_)
    codebase = np.array([name] * len(points), dtype=np.str_)
    return dataclasses.replace(
        points, codebase=codebase, version=versions, compiled=compiled * ones, launch=ones, pace=ones
    )


class Shares(NamedTuple):
    """Shares of a step; their sum is 1."""

    work: float
    """Work of the busiest stage, including waits for its tensor- and context-parallel peers."""
    fill: float
    """Filling and emptying the pipeline."""
    traffic: float
    """Exposed communication of gradients and weights."""
    after: float
    """The optimizer, and the constant part of a step."""


class Bounds(NamedTuple):
    """Seconds of a step, each of shape (rows, `KINDS`); their sum is the time with 1F1B."""

    work: Floats
    """Time of the busiest stage and of the optimizer step. No schedule and no number of replicas shortens it."""
    fill: Floats
    """Filling and emptying the pipeline."""
    traffic: Floats
    """Exposed communication of gradients and weights."""


_CHUNK = 20_000
"""Rows per batch: their stages are arrays as wide as the longest pipeline."""
_SAMPLE = 256
"""Number of rows whose intervals stand for all."""


def _columns(space: LayoutSpace, rows: Ints, kind: int) -> dict[str, Floats]:
    q, model = space.question, layouts.plain_model(space.question.model)

    def same(value: float) -> Floats:
        return np.full(len(rows), float(value))

    columns = {
        "gpus": space.size[rows], "layers": same(model.num_layers), "hidden": same(model.hidden_size),
        "heads": same(model.num_heads), "kv_heads": np.maximum(model.num_kv_heads, space.tp[rows]),
        "ffn": same(model.ffn_hidden_size),
        "vocab": same(model.vocab_size), "tied": same(model.tie_embeddings), "seq": same(q.seq_len),
        "mbs": space.mbs[rows], "micro_batches": space.micro_batches[rows], "dp": space.dp[rows], "tp": space.tp[rows],
        "pp": space.pp[rows], "vpp": same(1), "cp": space.cp[rows], "zero": space.zero[rows], "recompute": same(kind),
        "fp8": same(fp8_kind(q.precision)),
        "fp16": same(q.precision == "fp16"), "queries": same(model.num_heads * model.head_dim),
    }  # fmt: skip
    return {name: values.astype(float) for name, values in columns.items()}
