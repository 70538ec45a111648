"""Step times for ``advise``: predictions with intervals as in a plan, and bounds for many rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sweep.advising.question import Question
from sweep.advising.space import KINDS, Ints, LayoutSpace
from sweep.grids.step_time import StepTime
from sweep.predicting.codebases import key_of_engine
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known, known_of
from workloads.predict import layouts
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
                points = layouts.points_from(columns, np.full(count, peak), versions, cluster, self.forecast.rates)
                if self.engine[0] != ENGINE:
                    points = _of_engine(points, self.engine, space.question.compile != "none")
                parts = self.forecast.predictor.seconds(points, None if context else {"context": 1e-9})
                bounds_of_rows.work[part, kind] = parts.busy + parts.after
                bounds_of_rows.fill[part, kind] = parts.pipeline - parts.busy
                bounds_of_rows.traffic[part, kind] = parts.seen
        factor = layouts.EXPERTS if space.question.model.moe is not None else 1.0
        return Bounds(*(factor * one for one in bounds_of_rows))

    def shares(self, experiment: Experiment) -> Shares:
        """Shares of a layout's step, on the assumption that its structure scales every part by the same factor."""
        points = self.forecast.points([experiment])
        parts = self.forecast.predictor.seconds(points)
        whole = float(parts.pipeline[0] + parts.seen[0] + parts.after[0])
        return Shares(
            work=float(parts.busy[0]) / whole,
            fill=float(parts.pipeline[0] - parts.busy[0]) / whole,
            traffic=float(parts.seen[0]) / whole,
            after=float(parts.after[0]) / whole,
        )

    def factors(self, experiments: Sequence[Experiment]) -> Floats:
        """Ratio of the step time with each layout's structure to the time of the bounds, for experiments of one
        model."""
        forecast, structures = self.forecast, self.forecast.structures
        factors = structures.factors(experiments)
        of_layers = structures.of_layers(experiments, factors)
        with_structure, plain = (
            forecast.predictor.seconds(forecast.points(experiments, known)) for known in (of_layers, None)
        )
        # For layers that differ the host's part is known separately; the bounds use that of dense layers.
        of_form = (with_structure.pipeline + with_structure.seen + with_structure.after) / (
            plain.pipeline + plain.seen + plain.after
        )
        ratios: Floats = factors * of_form / (layouts.EXPERTS if experiments[0].model.moe is not None else 1.0)
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


def _columns(space: LayoutSpace, rows: Ints, kind: int) -> dict[str, Floats]:
    q, model = space.question, layouts.plain_model(space.question.model)

    def same(value: float) -> Floats:
        return np.full(len(rows), float(value))

    columns = {
        "gpus": space.size[rows], "layers": same(model.num_layers), "hidden": same(model.hidden_size),
        "heads": same(model.num_heads), "kv_heads": same(model.num_kv_heads), "ffn": same(model.ffn_hidden_size),
        "vocab": same(model.vocab_size), "tied": same(model.tie_embeddings), "seq": same(q.seq_len),
        "mbs": space.mbs[rows], "micro_batches": space.micro_batches[rows], "dp": space.dp[rows], "tp": space.tp[rows],
        "pp": space.pp[rows], "vpp": same(1), "cp": space.cp[rows], "zero": space.zero[rows], "recompute": same(kind),
        "fp8": same(fp8_kind(q.precision)),
        "fp16": same(q.precision == "fp16"),
    }  # fmt: skip
    return {name: values.astype(float) for name, values in columns.items()}
