"""The bands of training curves: how far the loss of a run may be from that of another that learns the same.

A layout computes what one rank computes and only rounds in another order: its curve is compared with one rank's in the
same precision. A precision rounds every product: its curve is compared with fp32's, on one rank.

Training amplifies rounding: two runs that differ in the last bits of a sum are hundredths of a nat apart some dozens of
steps later. So the sharp comparison is that of the first steps, before differences grow. Later, means over `WINDOW`
steps are compared, and these bands are about as wide as the differences between layouts of one precision: they show
that a run learns as well, not that it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docs.tools.curves.curve_table import by_run

ONE_RANK = "one rank"
FIRST_STEPS = 5
"""Steps of the sharp comparison. With the documented recipe the gradient norm jumps at step 7, and differences with
it."""
WINDOW = 20
"""Number of steps over which later losses are averaged, because some batches are easier than others."""


@dataclass(frozen=True, slots=True)
class CurveBand:
    """The largest differences from the other run's loss, in nats per token."""

    first: float
    """Largest difference at each of the `FIRST_STEPS`."""
    mean: float
    """Largest difference of means over any `WINDOW` steps from step `WINDOW` on."""
    end: float
    """Largest difference of means over the last `WINDOW` steps, and of the held-out loss."""


LAYOUT_BANDS: Mapping[str, CurveBand] = {"fp32": CurveBand(1e-4, 0.12, 0.08), "bf16": CurveBand(1e-3, 0.12, 0.08)}
"""Bands by precision for a layout against one rank. Largest measured in bf16: 0.0002, 0.082 and 0.061."""
PRECISION_BANDS: Mapping[str, CurveBand] = {
    "bf16": CurveBand(3e-3, 0.12, 0.08),
    "fp16": CurveBand(1e-3, 0.12, 0.08),
    **dict.fromkeys(("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"), CurveBand(0.02, 0.15, 0.10)),
}
"""Bands by precision, on one rank, against fp32. Largest measured: bf16 0.0009, 0.032 and 0.016; fp16 0.0003, 0.075 and
0.052; fp8 0.0093, 0.116 and 0.076.
"""


LEAST_ENTROPY = 0.6
"""Learned routing has collapsed if the entropy of a layer's load ends below this share of an even load's. With 8
experts, two that share all tokens have a share of 0.33, four 0.67. Routers begin with a dip: while all tokens still
look alike, most of them choose the same experts."""


@dataclass(frozen=True, slots=True)
class Distance:
    """Differences of one run from its reference run."""

    run: str
    reference: str
    band: CurveBand
    first: float
    mean: float | None
    """None if no run was that long."""
    end: float
    held_out: float | None
    """None if a run has no held-out loss."""
    any_step: float
    """Largest difference at any step; no band applies to it."""

    @property
    def is_inside(self) -> bool:
        """Whether every difference is within the band."""
        at_end = max(self.end, self.held_out or 0.0)
        return self.first <= self.band.first and (self.mean or 0.0) <= self.band.mean and at_end <= self.band.end


def distances(rows: Sequence[Mapping[str, Any]]) -> list[Distance]:
    """Differences of every run from its reference among ``rows``. Runs without a reference or a band are left out."""
    return list(_distances(by_run(rows)))


def _distances(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Distance]:
    place = {
        (rows_of_run[0]["model"], rows_of_run[0]["precision"], rows_of_run[0]["layout"]): name
        for name, rows_of_run in runs.items()
    }
    for name, rows_of_run in runs.items():
        model, precision, layout = (rows_of_run[0][column] for column in ("model", "precision", "layout"))
        if layout == ONE_RANK:
            reference, band = place.get((model, "fp32", ONE_RANK)), PRECISION_BANDS.get(precision)
        else:
            reference, band = place.get((model, precision, ONE_RANK)), LAYOUT_BANDS.get(precision)
        if reference is not None and band is not None and reference != name:
            yield distance(rows_of_run, runs[reference], band)


def distance(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], band: CurveBand) -> Distance:
    """Differences of two runs at the steps that both have."""
    pairs = list(zip(own, other, strict=False))
    assert pairs and all(a["step"] == b["step"] for a, b in pairs)
    apart = [a["loss"] - b["loss"] for a, b in pairs]
    a, b = own[-1]["held_out_loss"], other[-1]["held_out_loss"]
    later = apart[WINDOW:]
    width = min(WINDOW, len(later))
    means = [sum(later[at : at + width]) / width for at in range(len(later) - width + 1)] if later else []
    last = apart[-WINDOW:]
    return Distance(
        run=own[0]["run"],
        reference=other[0]["run"],
        band=band,
        first=max(map(abs, apart[:FIRST_STEPS])),
        mean=max(map(abs, means), default=None),
        end=abs(sum(last)) / len(last),
        held_out=None if a is None or b is None else abs(a - b),
        any_step=max(map(abs, apart)),
    )


def collapsed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Runs with a layer whose load ends below `LEAST_ENTROPY`, with the lowest mean of a layer over the last steps."""
    lowest_by_run = {}
    for name, rows_of_run in by_run(rows).items():
        last = [row["load_entropy"] for row in rows_of_run[-WINDOW:] if row["load_entropy"]]
        if last and (least := min(sum(layer) / len(last) for layer in zip(*last, strict=True))) < LEAST_ENTROPY:
            lowest_by_run[name] = least
    return lowest_by_run
