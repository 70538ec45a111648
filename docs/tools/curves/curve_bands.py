"""The bands that training curves stay in: how far the loss of a run may be from that of another that learns the same.

A layout computes what one rank computes, and only rounds in another order: its curve is held to one rank's in the same
precision. A precision rounds every product: its curve is held to fp32's, on one rank.

Training amplifies rounding: two runs that differ in the last bits of a sum are hundredths of a nat apart some dozens
of steps later. So the sharp comparison is that of the first steps, before there was time for it. Later, means over
`WINDOW` steps are compared, and these bands are about as wide as layouts of one precision were apart: they tell that a
run learns as well, not that it computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docs.tools.curves.curve_table import by_run

ONE_RANK = "one rank"
FIRST_STEPS = 5
"""Of the sharp comparison. With the documented recipe the gradient's norm jumps at step 7, and differences with it."""
WINDOW = 20
"""One batch is easier than another, so later losses are compared as means over so many steps."""


@dataclass(frozen=True, slots=True)
class Band:
    """The largest differences from the other run's loss, in nats a token."""

    first: float
    """At each of the `FIRST_STEPS`."""
    mean: float
    """Of the means over any `WINDOW` steps from step `WINDOW` on."""
    end: float
    """Of the means over the last `WINDOW` steps, and of the held-out loss."""


LAYOUT_BANDS: Mapping[str, Band] = {"fp32": Band(1e-4, 0.12, 0.08), "bf16": Band(1e-3, 0.12, 0.08)}
"""By precision: a layout against one rank. Found in bf16: 0.0002, 0.082 and 0.061 at most."""
PRECISION_BANDS: Mapping[str, Band] = {
    "bf16": Band(3e-3, 0.12, 0.08),
    "fp16": Band(1e-3, 0.12, 0.08),
    **dict.fromkeys(("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"), Band(0.02, 0.15, 0.10)),
}
"""By precision: on one rank, against fp32. Found at most: bf16 0.0009, 0.032 and 0.016; fp16 0.0003, 0.075 and 0.052;
fp8 0.0093, 0.116 and 0.076."""


LEAST_ENTROPY = 0.6
"""Learned routing has collapsed where a layer's load ends with less of an even load's entropy. With 8 experts, two that
share all tokens have 0.33 of it, four 0.67. Routers begin with a dip: while all tokens still look alike, most of them
choose the same experts."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one run was from the run that it is held to."""

    run: str
    reference: str
    band: Band
    first: float
    mean: float | None
    """None where no run went on that long."""
    end: float
    held_out: float | None
    """None where a run has no held-out loss."""
    any_step: float
    """At the step with the largest difference; no band is for it."""

    @property
    def is_inside(self) -> bool:
        """Whether every difference is within the band."""
        at_end = max(self.end, self.held_out or 0.0)
        return self.first <= self.band.first and (self.mean or 0.0) <= self.band.mean and at_end <= self.band.end


def distances(rows: Sequence[Mapping[str, Any]]) -> list[Distance]:
    """Every run that has a reference among ``rows``, against it. Runs without one, or without a band, are left out."""
    return list(_distances(by_run(rows)))


def _distances(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Distance]:
    place = {(own[0]["model"], own[0]["precision"], own[0]["layout"]): name for name, own in runs.items()}
    for name, own in runs.items():
        model, precision, layout = (own[0][column] for column in ("model", "precision", "layout"))
        if layout == ONE_RANK:
            reference, band = place.get((model, "fp32", ONE_RANK)), PRECISION_BANDS.get(precision)
        else:
            reference, band = place.get((model, precision, ONE_RANK)), LAYOUT_BANDS.get(precision)
        if reference is not None and band is not None and reference != name:
            yield distance(own, runs[reference], band)


def distance(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], band: Band) -> Distance:
    """Of the rows of two runs, at the steps that both have."""
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
    found = {}
    for name, own in by_run(rows).items():
        last = [row["load_entropy"] for row in own[-WINDOW:] if row["load_entropy"]]
        if last and (least := min(sum(layer) / len(last) for layer in zip(*last, strict=True))) < LEAST_ENTROPY:
            found[name] = least
    return found
