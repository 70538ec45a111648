"""The bands that training curves stay in: how far the loss of a run may be from that of another that learns the same.

A layout computes what one rank computes, and only rounds in another order: its curve is held to one rank's in the same
precision. A precision rounds every product: its curve is held to fp32's, on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.curves import by_run

ONE_RANK = "one rank"
LAST_STEPS = 20
"""The end of a curve is the mean over so many steps: one batch is easier than another."""


@dataclass(frozen=True, slots=True)
class Band:
    """The largest differences from the other run's loss, in nats a token."""

    every_step: float
    """At any one step: training amplifies rounding, and single batches differ by more than the whole."""
    end: float
    """Of the means over the last `LAST_STEPS` steps, and of the held-out loss."""


LAYOUT_BANDS: Mapping[str, Band] = {"fp32": Band(0.02, 0.01), "bf16": Band(0.10, 0.02)}
"""By precision: a layout against one rank."""
PRECISION_BANDS: Mapping[str, Band] = {
    "bf16": Band(0.10, 0.02),
    "fp16": Band(0.10, 0.02),
    **dict.fromkeys(("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise"), Band(0.15, 0.04)),
}
"""By precision: on one rank, against fp32."""


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
    every_step: float
    worst_step: int
    end: float
    held_out: float | None
    """None where a run has no held-out loss."""

    @property
    def is_inside(self) -> bool:
        """Whether every difference is within the band."""
        at_end = max(self.end, self.held_out or 0.0)
        return self.every_step <= self.band.every_step and at_end <= self.band.end


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
    apart = [abs(a["loss"] - b["loss"]) for a, b in pairs]
    last = pairs[-LAST_STEPS:]
    end = abs(sum(a["loss"] - b["loss"] for a, b in last)) / len(last)
    a, b = own[-1]["held_out_loss"], other[-1]["held_out_loss"]
    worst = max(range(len(apart)), key=apart.__getitem__)
    return Distance(
        run=own[0]["run"],
        reference=other[0]["run"],
        band=band,
        every_step=apart[worst],
        worst_step=own[worst]["step"],
        end=end,
        held_out=None if a is None or b is None else abs(a - b),
    )


def collapsed(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Runs with a layer whose load ends below `LEAST_ENTROPY`, with the lowest mean of a layer over the last steps."""
    found = {}
    for name, own in by_run(rows).items():
        last = [row["load_entropy"] for row in own[-LAST_STEPS:] if row["load_entropy"]]
        if last and (least := min(sum(layer) / len(last) for layer in zip(*last, strict=True))) < LEAST_ENTROPY:
            found[name] = least
    return found
