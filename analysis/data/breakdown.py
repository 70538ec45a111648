"""Where the time of a step goes: of the fastest layouts, and along tp, pp and dp while everything else stays.

Measured rows time forward and backward (with the collectives inside them: tensor parallelism's, ZeRO 3's gathers),
gradient reduction left exposed after the last backward, waiting for other pipeline stages, and the optimizer; each is
a mean over ranks of medians over steps. Rehearsed rows have compute (with bubble and optimizer) and the modelled
communication. What those leave of the step is ``rest``: a little above or below 0, as the step is the slowest rank's.
"""

from __future__ import annotations

import pandas as pd

from analysis.rows import labels, metrics, pairs
from analysis.rows.frame_cache import cache_per_frame

MEASURED = {
    "forward_backward_s": "forward and backward",
    "reduce_exposed_s": "exposed reduction",
    "pipeline_idle_s": "pipeline bubble",
    "optimizer_s": "optimizer",
}
REHEARSED = {
    "compute_time_s": "compute, bubble and optimizer",
    "communication_time_s": "modelled communication",
}
REST = "rest"
AXES = ("tp", "pp", "dp")
_FREE = {
    "tp": ("dp", "tp", "num_microbatches", "sequence_parallel", "zero_stage"),
    "pp": ("dp", "pp", "num_microbatches", "pp_schedule", "virtual_stages", "zero_stage"),
    "dp": ("dp", "world_size", "tokens_per_step", "zero_stage"),
}
"""What may differ along an axis. tp and pp take ranks from dp on the same devices; along dp the work of a rank stays.
The ZeRO stage may differ only from a single data-parallel rank, which has nothing to shard."""


def parts_of(frame: pd.DataFrame) -> dict[str, str]:
    """The columns that these rows split their steps by, with their names; empty when they have none."""
    for parts in (MEASURED, REHEARSED):
        if frame[list(parts)].notna().all(axis=1).any():
            return parts
    return {}


def shares(rows: pd.DataFrame, parts: dict[str, str]) -> pd.DataFrame:
    """Each part of the step as a fraction of it, by name, and `REST`; they sum to 1."""
    found = pd.DataFrame({name: rows[column] / rows["step_time_s"] for column, name in parts.items()})
    return found.assign(**{REST: 1 - found.sum(axis=1, skipna=False)})


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Ranked rows with all parts of their step, fastest first in each group: `shares`, `analysis.rows.pairs.SETTINGS`,
    and what tables and names need."""
    parts = parts_of(frame)
    rows = pairs.comparable(frame)
    if not parts:
        return rows.head(0)
    beside = ["step_time_s", "layout", "rank", "num_params", "seq_len", metrics.RANK_BY, "attempt_id"]
    rows = rows.loc[rows[[*parts, "step_time_s"]].notna().all(axis=1), [*pairs.SETTINGS, *beside, *parts]]
    return rows.assign(**shares(rows, parts))


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Shares of the step of every ranked run that has them, fastest first in each group."""
    rows = timed(frame)
    kept = [*metrics.GROUP, "layout", "rank", "step_time_s", *_names(frame), metrics.RANK_BY, "attempt_id"]
    return labels.in_group_order(rows)[kept].reset_index(drop=True) if len(rows) else rows[kept]


@cache_per_frame
def along_axes(frame: pd.DataFrame) -> pd.DataFrame:
    """The longest family of each axis: runs that differ in its degree alone, and in what makes room for it.

    ``axis``, ``degree``, and for each part ``<name>`` in device-microseconds a token: time of the part × devices /
    tokens, so that families of one batch and of growing ones read alike and the parts sum to 1e6 / (tokens/s/GPU).
    Of families equally long, the one with the fastest run.
    """
    rows = timed(frame)
    names = _names(frame)
    columns = ["axis", "degree", *metrics.GROUP, "layout", *names, metrics.RANK_BY, "attempt_id"]
    found = [family for axis in AXES if len(family := _family(rows, axis)) > 1]
    if not found:
        return pd.DataFrame(columns=columns)
    families = pd.concat(found, ignore_index=True)
    per_token = 1e6 / families[metrics.RANK_BY]
    return families.assign(**{name: families[name] * per_token for name in names})[columns]


def _names(frame: pd.DataFrame) -> list[str]:
    parts = parts_of(frame)
    return [*parts.values(), REST] if parts else []


def _family(rows: pd.DataFrame, axis: str) -> pd.DataFrame:
    if rows.empty or rows[axis].nunique() < 2:
        return rows.head(0)
    codes = pairs.Matching(rows).codes(_FREE[axis])
    members = rows.assign(axis=axis, degree=rows[axis].astype(int), _code=codes)
    if axis != "dp":  # a pipeline of one stage has no schedule, others must have the same
        members = members[(members["pp"] == 1) | (members["pp_schedule"] == "1f1b")]
    members = members.sort_values(metrics.RANK_BY, ascending=False, kind="stable")
    families = []
    for stage in sorted(rows["zero_stage"].dropna().unique()):
        own = members[(members["dp"] == 1) | (members["zero_stage"] == stage)]
        own = own.drop_duplicates(["_code", "degree"])
        sizes = own.groupby("_code")[metrics.RANK_BY].agg(["size", "max"])
        if len(sizes):
            longest = sizes.sort_values(["size", "max"]).iloc[-1]
            family = own[own["_code"] == longest.name]
            families.append((int(longest["size"]), float(longest["max"]), family.sort_values("degree")))
    return max(families, key=lambda found: found[:2])[2] if families else rows.head(0)
