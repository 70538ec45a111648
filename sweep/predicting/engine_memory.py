"""Peak memory of other engines: the closed form of each (`workloads.costs.memory.other_engines`), fitted to the rows of
that engine and version alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sweep.predicting.codebases import key_of_engine
from workloads.costs.memory.other_engines import Moment, counts_layers, moments_of
from workloads.predict.fit import fit
from workloads.predict.parameters import Parameter
from workloads.predict.points import Floats
from workloads.spec.experiment import Experiment

PARTS: Mapping[str, Parameter] = {
    "states": Parameter(1.0, 0.01, "bytes of weights, gradients and optimizer, over those counted"),
    "layers": Parameter(1.0, 0.05, "bytes that layers save, over those counted"),
    "loss": Parameter(1.0, 0.05, "bytes of the loss, over those counted"),
}
SPREAD = 0.01
"""Standard deviation of a row's log(peak) around the closed form, in a fit."""
UNFITTED_SPREAD = 0.03
"""Standard deviation of log(peak) without rows of the engine; with rows it falls to that of the rows."""
LEAST_ROWS = 3
NORMAL_90 = 1.645


class EnginePeak(NamedTuple):
    """Predicted allocated bytes of the fullest device, without the workspace of matrix products."""

    peak_bytes: int
    stage: int
    low_bytes: int
    high_bytes: int
    """``low_bytes`` to ``high_bytes``: central 90 % interval."""


class _Fit(NamedTuple):
    values: Mapping[str, float]
    spread: float


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Closed forms with their fitted factors, by engine and version."""

    fits: Mapping[str, _Fit] = field(default_factory=dict)

    @classmethod
    def of(cls, measured: Iterable[tuple[Experiment, int]], workspace_bytes: int) -> EngineMemory:
        """``measured``: layouts of other engines with the allocated bytes at their peaks."""
        rows: dict[str, list[tuple[list[Moment], float]]] = defaultdict(list)
        for experiment, peak in measured:
            if counts_layers(experiment):
                key = key_of_engine(experiment.engine, experiment.engine_version)
                rows[key].append((moments_of(experiment), float(peak - workspace_bytes)))
        return cls({key: _fitted(of_engine) for key, of_engine in rows.items()})

    def peak(self, experiment: Experiment) -> EnginePeak | None:
        """None: the closed form does not know the model."""
        if not counts_layers(experiment):
            return None
        key = key_of_engine(experiment.engine, experiment.engine_version)
        values, spread = self.fits.get(key, _Fit({}, UNFITTED_SPREAD))
        moments = moments_of(experiment)
        totals = [_total(one, values) for one in moments]
        most = int(np.argmax(totals))
        wide = float(np.exp(NORMAL_90 * spread))
        peak = totals[most]
        return EnginePeak(round(peak), moments[most].stage, round(peak / wide), round(peak * wide))


def _total(moment: Moment, values: Mapping[str, float]) -> float:
    return sum(values.get(name, 1.0) * float(getattr(moment, name)) for name in PARTS)


def _fitted(rows: Sequence[tuple[list[Moment], float]]) -> _Fit:
    widest = max(len(moments) for moments, _ in rows)
    parts = np.zeros((len(rows), widest, len(PARTS)))
    for place, (moments, _) in enumerate(rows):
        for at, moment in enumerate(moments):
            parts[place, at] = [getattr(moment, name) for name in PARTS]
    peaks = np.array([peak for _, peak in rows])

    def model(values: Mapping[str, float]) -> Floats:
        peaks_of_rows: Floats = (parts @ np.array([values[name] for name in PARTS])).max(axis=1)
        return peaks_of_rows

    fitted = fit(model, peaks, PARTS, SPREAD)
    left = np.log(peaks / model(fitted.values))
    known = float(np.sqrt((left**2).mean()))
    # A spread from few rows is itself uncertain: it counts as if `LEAST_ROWS` rows had the unfitted one.
    weight = len(rows) / (len(rows) + LEAST_ROWS)
    return _Fit(fitted.values, float(np.hypot(np.sqrt(weight) * known, np.sqrt(1 - weight) * UNFITTED_SPREAD)))
