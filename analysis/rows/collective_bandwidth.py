"""Collective bandwidth over the number of nodes, as runs measured it before training."""

from __future__ import annotations

import pandas as pd

from analysis.rows.frame_cache import cache_per_frame

COLLECTIVES = {
    "all_reduce": "All-reduce",
    "all_gather": "All-gather",
    "reduce_scatter": "Reduce-scatter",
}
BAND = (0.05, 0.95)


@cache_per_frame
def by_nodes(frame: pd.DataFrame) -> pd.DataFrame:
    """Quantiles and mean over the runs of each number of nodes, in GB/s (10⁹), one row for each collective and scope.

    ``scope`` is ``world`` (all ranks) or ``node`` (inside a node). ``regime`` is ``all``; if runs have a network
    regime, there are also rows for ``fast`` and ``slow``. The table is empty if no row has a bandwidth.
    """
    rows = []
    for name in COLLECTIVES:
        for scope, column in (("world", f"{name}_bytes_per_s"), ("node", f"{name}_intra_bytes_per_s")):
            if column not in frame or "node_count" not in frame:
                continue
            known = frame[frame[column].notna()]
            groups = [("all", known)]
            if scope == "world":
                groups += [(str(regime), part) for regime, part in known.groupby("network_regime")]
            for regime, part in groups:
                for nodes, values in part.groupby("node_count")[column]:
                    rows.append(
                        _summary(values / 1e9) | {"nodes": nodes, "collective": name, "scope": scope, "regime": regime}
                    )
    columns = ["collective", "scope", "regime", "nodes", "runs", "mean", "q05", "median", "q95"]
    return pd.DataFrame(rows, columns=columns)


def _summary(values: pd.Series) -> dict[str, float]:
    low, middle, high = values.quantile([BAND[0], 0.5, BAND[1]])
    return {"runs": len(values), "mean": float(values.mean()), "q05": low, "median": middle, "q95": high}
