"""Which layouts are worth their memory: no other finished layout is at least as fast in less."""

from __future__ import annotations

import pandas as pd

from analysis.rows import labels, metrics
from analysis.rows.frame_cache import cache_per_frame

COLUMNS = (
    *(*metrics.GROUP, "layout", "memory_bytes", "memory_kind", metrics.RANK_BY, "on_front"),
    *("device_memory_bytes", "attempt_id"),
)


@cache_per_frame
def table(frame: pd.DataFrame) -> pd.DataFrame:
    """Every ranked run whose peak memory is known, `COLUMNS`, by group and then by memory.

    ``on_front``: of its model and number of devices, no run has at least its throughput in at most its memory and
    better one of the two. Runs equal in both are on the front together.
    """
    memory = metrics.memory_column(frame)
    rows = metrics.ranked(frame)
    rows = rows[rows["rank"].notna() & rows[memory].notna()]
    rows = rows.assign(memory_bytes=rows[memory].astype(float), memory_kind=metrics.MEMORY_NAMES[memory])
    rows = rows.sort_values(["memory_bytes", metrics.RANK_BY], ascending=[True, False], kind="stable")
    groups = rows.groupby(metrics.GROUP, sort=False)
    rate = rows[metrics.RANK_BY]
    # Sorted by memory, then fastest first: the running maximum is reached first by the run on the front.
    reached = groups[metrics.RANK_BY].cummax()
    before = reached.groupby([rows[name] for name in metrics.GROUP]).shift(fill_value=0.0)
    leads = rate > before
    leader = rows["memory_bytes"].where(leads).groupby([rows[name] for name in metrics.GROUP]).ffill()
    equal = (rate == reached) & (rows["memory_bytes"] == leader)
    rows = rows.assign(on_front=leads | equal)
    return labels.in_group_order(rows)[[*COLUMNS]].reset_index(drop=True) if len(rows) else rows[[*COLUMNS]]
