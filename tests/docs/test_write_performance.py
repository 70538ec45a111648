"""The page of performance: its tables are those of the shipped rows, and a cell says how a run ended that is not ok."""

from __future__ import annotations

import pytest

from docs.tools import write_performance
from docs.tools.write_performance import COLUMNS, EXPERTS, PAGE, PAIRS, measured, page, pairs_section

BOUND = {"bf16_tokens_per_s_per_gpu": 20_000, "fp8_tokens_per_s_per_gpu": 40_000}


@pytest.mark.slow
def test_the_page_is_what_the_shipped_rows_say() -> None:
    assert PAGE.read_text() == page(PAGE.read_text()), "python -m docs.tools.write_performance"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_table_by_hand() -> None:
    rows = measured(PAIRS)
    same = rows[rows["layout"] == "dp 4, mbs 2 x 8, ZeRO 2"].copy()
    assert len(same) == len(COLUMNS), "a run that was cancelled and run again counts once"
    speeds = {("ultrasweep", "none"): 11_000.4, ("ultrasweep", "block"): 12_000.0, ("torchtitan", "none"): 8_000.0}
    for (engine, compiled), speed in speeds.items():
        same.loc[(same["engine"] == engine) & (same["compile"] == compiled), "tokens_per_s_per_gpu"] = speed
    same.loc[(same["engine"] == "torchtitan") & (same["compile"] == "block"), "outcome"] = "oom"
    same["peak_allocated_bytes"] = 3 * 2**30
    same["energy_per_token_mj"] = 50.04
    same["step_time_s"], same["predicted_step_time_s"] = 2.0, 1.9
    found = _cells(pairs_section(same, BOUND).splitlines()[-1])
    assert found[1:5] == ["11,000 (3.0; 50.0)", "12,000 (3.0; 50.0)", "8,000 (3.0; 50.0)", "oom"]
    assert found[5:] == ["1.500", "60.0 %", "-5.0 %"]


@pytest.mark.slow
def test_longer_sequences_have_no_share_of_the_bound_and_no_peer_no_ratio() -> None:
    rows = measured(PAIRS)
    for line in pairs_section(rows, BOUND).splitlines()[4:]:
        cells = _cells(line)
        assert (cells[6] == "–") == ("seq 16384" in cells[0])
        assert (cells[5] == "–") == all(cell in ("–", "crash") for cell in cells[3:5])
    fp8 = next(line for line in pairs_section(rows, BOUND).splitlines() if "fp8" in line and line.startswith("| dp"))
    ours = float(_cells(fp8)[1].split()[0].replace(",", ""))
    assert float(_cells(fp8)[6].split()[0]) == pytest.approx(ours / 400, abs=0.1)


def test_the_peer_of_the_mixture_is_named_with_the_layout_of_its_configuration() -> None:
    peer = {name: {"tokens_per_s_per_gpu": [3, 1, 2], "reserved_gib": 4.0} for name in ("eager", "compiled")}
    last = _cells(write_performance.experts_section(measured(EXPERTS), peer).splitlines()[-1])
    assert last[1:4] == ["dp 4, ep 4, mbs 4 x 4, ZeRO 3", "1 to 3", "4.0 reserved"]
