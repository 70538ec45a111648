"""Predicted MFU for tables of layouts, and the sentence that says to which peak it is relative or why there is none."""

from __future__ import annotations

from collections.abc import Iterable

from results.text.numbers import format_number
from workloads.costs.shape.flops import flops_per_token
from workloads.spec.cluster import ClusterSpec
from workloads.spec.model_spec import ModelSpec


def predicted_mfu(
    model: ModelSpec, seq_len: float, precision: str, rate: float | None, cluster: ClusterSpec
) -> float | None:
    """MFU as a fraction of the device's peak in ``precision``, with PaLM's FLOP count; None for an unknown rate or
    peak.

    ``rate``: tokens/s of one device.
    """
    peak = cluster.device.peak_of(precision)
    return rate * flops_per_token(model, seq_len, "palm") / peak if rate is not None and peak else None


def mfu_cell(model: ModelSpec, seq_len: float, precision: str, rate: float | None, cluster: ClusterSpec) -> str:
    """`predicted_mfu` in percent; empty if it is unknown."""
    mfu = predicted_mfu(model, seq_len, precision, rate, cluster)
    return "" if mfu is None else f"{100 * mfu:.1f}"


def mfu_note(precisions: Iterable[str], cluster: ClusterSpec) -> str | None:
    """What has to be said of the MFU of layouts in these precisions: the peaks where one is not that of bf16, and the
    precisions without a peak. None: nothing."""
    peaks = {precision: cluster.device.peak_of(precision) for precision in sorted(set(precisions))}
    known = {precision: peak for precision, peak in peaks.items() if peak}
    parts = []
    bf16 = cluster.device.peak_of("bf16")
    if any(peak != bf16 for peak in known.values()):
        listed = ", ".join(f"{format_number(peak / 1e12)} of {precision}" for precision, peak in known.items())
        parts.append(f"MFU is relative to the peak in each precision, in TFLOP/s: {listed}")
    if unknown := [precision for precision, peak in peaks.items() if not peak]:
        has = ", ".join(cluster.device.peak_flops) or "none"
        parts.append(
            f"no MFU in {', '.join(unknown)}: the file of cluster {cluster.name} has no such peak_flops (it has {has})"
        )
    return "; ".join(parts) or None
