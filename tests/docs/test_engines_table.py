"""The table of several engines names each peer that is faster, and takes each engine's fastest row."""

from __future__ import annotations

from typing import Any

import pandas as pd

from docs.tools.engines_table import engines_table

ROW: dict[str, Any] = {
    "model": "llama8b",
    "precision": "bf16",
    **dict.fromkeys(("dp_replicate", "pp", "cp"), 1),
    **dict.fromkeys(("dp_shard", "micro_batch_size"), 2),
    **dict.fromkeys(("tp", "zero_stage"), 1),
    "num_microbatches": 4,
    "pp_schedule": "none",
    "compile": "none",
    "outcome": "ok",
    "peak_allocated_bytes": 2**30,
    "engine": "ultrasweep",
    "tokens_per_s_per_gpu": 1000.0,
}


def table(*rows: dict[str, Any]) -> list[str]:
    return engines_table(pd.DataFrame([{**ROW, **row} for row in rows])).splitlines()


def test_a_faster_peer_is_named_first_and_its_best_row_counts() -> None:
    graph = {"engine": "megatron", "compile": "block", "tokens_per_s_per_gpu": 1250.0}
    head, *_, line = table({}, {"engine": "megatron", "tokens_per_s_per_gpu": 900.0}, graph)
    assert head == "Faster than ours: Megatron-Core at llama8b, dp 2, mbs 2 x 4 (25.0 %)."
    assert "| 1,250 (1.0; ZeRO 1; graph) |" in line and line.endswith("| 0.800 |") and "900" not in line


def test_rows_that_did_not_run_are_no_numbers() -> None:
    oom = {"engine": "megatron", "outcome": "oom", "tokens_per_s_per_gpu": None, "peak_allocated_bytes": None}
    head, *lines = table({}, oom, {"tp": 2, "outcome": "cancelled", "tokens_per_s_per_gpu": None})
    assert head.startswith("No peer is faster")
    assert lines[-1] == "| llama8b, dp 2, mbs 2 x 4 | 1,000 (1.0; ZeRO 1) | – | oom | – | – |", (
        "no line of cancelled rows"
    )
