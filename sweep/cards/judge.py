"""Judges whether a run is as good as its card, and lists what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from results.text.numbers import format_bytes
from sweep.cards.card import WIDEST, Band, Card
from sweep.cards.make import CHECKS, CODE, ENVIRONMENT, canonical
from workloads.spec import experiment as ex

_WORDS = {
    "step_time_s": "step time",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
}
_LESS_IS_WORSE = ("tokens_per_s_per_gpu",)
_CLOCKS = ("sm_clock_median_step_mhz", "sm_clock_mhz")
CLOCK_OFF, CHECK_OFF = 0.01, 0.03
"""Least relative difference of a clock, and of a node-check rate, to be named as a reason."""
_CHECKED = {
    "check_matmul_flops": "slower device: its matrix products",
    "check_copy_bytes_per_s": "slower memory: its copies",
    "check_all_reduce_inside_node_bytes_per_s": "slower network inside the node: its all-reduce",
    "check_all_reduce_between_nodes_bytes_per_s": "other network between nodes: its all-reduce",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Judgement of one card and one row."""

    card: Card
    passed: bool
    lines: tuple[str, ...]
    """Each expected value next to the measured one."""
    not_judged: tuple[str, ...]
    """Names of expected values for which the card has no band."""
    reasons: tuple[str, ...]
    """Differences from the card: possible reasons if the run failed."""


def judge(card: Card, row: Mapping[str, Any]) -> Judgement:
    """Judges a run: slower or more memory than the band fails; faster or less memory passes with a remark."""
    if row["outcome"] != "ok":
        why = f"{row['outcome']}, not ok: {row.get('evidence') or 'no evidence'}"
        return Judgement(card=card, passed=False, lines=(why,), not_judged=(), reasons=differences(card, row))
    lines, not_judged, passed, judged = [], [], True, False
    for column, band in card.expected.items():
        measured = row.get(column)
        name = _WORDS.get(column, column)
        if measured is None:
            lines.append(f"{name}: not measured; the card has {_shown(column, band.value)}")
            passed = False
            continue
        change = f"{measured / band.value - 1:+.1%}"
        comparison = f"{name}: {_shown(column, measured)}, the card {_shown(column, band.value)} ({change})"
        if band.low is None or band.high is None or band.low < 0:
            why = "no band" if band.low is None or band.high is None else "no band, since its low end is below 0"
            lines.append(f"{comparison}; {why}: not judged")
            not_judged.append(name)
            continue
        judged = True
        worse = measured < band.low if column in _LESS_IS_WORSE else measured > band.high
        better = measured > band.high if column in _LESS_IS_WORSE else measured < band.low
        edges = f"{_shown(column, band.low)} to {_shown(column, band.high)}{_remark(column, band)}"
        lines.append(f"{comparison}; {'outside' if worse else 'better than' if better else 'within'} {edges}")
        passed = passed and not worse
    if not judged:
        lines.append(f"nothing could be judged: the card has no bands ({card.bands_from})")
    reasons = differences(card, row)
    return Judgement(
        card=card, passed=passed and judged, lines=tuple(lines), not_judged=tuple(not_judged), reasons=reasons
    )


def _remark(column: str, band: Band) -> str:
    """Says of a band that it is wide: its worse end is further than `WIDEST` from the value."""
    assert band.low is not None and band.high is not None
    reach = band.value / (1 + WIDEST) - band.low if column in _LESS_IS_WORSE else band.high - band.value * (1 + WIDEST)
    return " (a wide band, in which nearly any run lies)" if reach > 0 else ""


def differences(card: Card, row: Mapping[str, Any]) -> tuple[str, ...]:
    """Differences between the row and the card: configuration, device, clock, node check, versions, code."""
    reasons = list(_configuration(card, row))
    if _differs(card.method, row.get("method")):
        reasons.append(f"other method: {row['method']}, the card {card.method}")
    if _differs(card.machine.get("device_name"), row.get("device_name")):
        reasons.append(f"other device: {row['device_name']}, the card {card.machine['device_name']}")
    for column in _CLOCKS:
        known, now = card.machine.get(column), row.get(column)
        if known and now:
            if now < known * (1 - CLOCK_OFF):
                reasons.append(f"slower clock: {now:,.0f} MHz, the card {known:,.0f} MHz ({now / known - 1:+.1%})")
            break
    if _differs(card.machine.get("power_limit_w"), row.get("power_limit_w")):
        reasons.append(
            f"other power limit: {row['power_limit_w']:,.0f} W, the card {card.machine['power_limit_w']:,.0f} W"
        )
    if row.get("throttle_reasons") and row["throttle_reasons"] != card.machine.get("throttle_reasons"):
        reasons.append(f"throttled: {row['throttle_reasons']}")
    for column in CHECKS:
        known, now = card.machine.get(column), row.get(column)
        if known and now and now < known * (1 - CHECK_OFF):
            reasons.append(f"{_CHECKED[column]} reach {now / known:.0%} of the card's")
    for column in (*ENVIRONMENT, *CODE):
        known, now = card.environment.get(column, card.code.get(column)), row.get(column)
        if _differs(known, now) and column != "git_dirty":
            reasons.append(f"other {column.replace('_', ' ')}: {_short(column, now)}, the card {_short(column, known)}")
    if row.get("git_dirty"):
        reasons.append("uncommitted changes")
    return tuple(reasons)


def _configuration(card: Card, row: Mapping[str, Any]) -> list[str]:
    if not row.get("config_json"):
        return []
    theirs = ex.to_dict(canonical(ex.from_json(row["config_json"])))
    ours = ex.to_dict(canonical(card.experiment))
    return [
        f"other configuration: {name}={theirs[name]}, the card {name}={ours[name]}"
        for name in ours
        if theirs[name] != ours[name] and name != "engine_version"
    ]


def _differs(known: Any, now: Any) -> bool:
    return known is not None and now is not None and known != now


def _short(column: str, value: Any) -> str:
    return str(value)[:10] if column == "git_commit" else str(value)


def _shown(column: str, value: float) -> str:
    if column.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value * 1e3:,.1f} ms" if column.endswith("_s") else f"{value:,.0f}"
