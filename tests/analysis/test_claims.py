"""The study's claims: verdicts on its own rows, and on made-up rows where each must pass, fail or decline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.claims import published, verdicts
from analysis.claims import study as claims
from analysis.rows import pairs
from analysis.rows.cohorts import Cohort, split
from analysis.rows.load import load
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

pytestmark = pytest.mark.slow

TABLE = Path(__file__).resolve().parents[3] / "shared" / "study" / "bench_final2_mfu2.csv"
MODEL = synthetic.MODELS[0]


@pytest.fixture(scope="module")
def study() -> dict[str, dict[str, str]]:
    if not TABLE.exists():
        pytest.skip(f"the study's raw table is not at {TABLE}")
    table = claims.table(split(load(TABLE).attempts))
    assert set(table["data"]) == {"the study"}
    return table.set_index("name").to_dict("index")  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verdict", "told"),
    [
        ("published_winners", verdicts.PASS, "27 of 27 cells agree in layout, MFU and memory"),
        ("winners_by_throughput", verdicts.PASS, "7 of 27 winners change"),
        ("cells_are_of_their_model", verdicts.FAIL, "80B on 64 GPUs is 80B (8 kv heads)"),
        ("mfu_formula", verdicts.PASS, "1,765 of 1,765 values reproduced"),
        ("tied_embeddings", verdicts.PASS, "× 1.168 for 1.34B and × 1.096 for 3.57B"),
        ("pipeline_rewrite", verdicts.PASS, "7.9 % before, 36.9 % after"),
        ("zero_one_matched", verdicts.PASS, "n = 204; memory: 0.72"),
        ("tensor_beyond_node", verdicts.PASS, "tp 8 → 16: 0.51"),
        ("bubble_is_waited", verdicts.UNKNOWN, "was not timed"),
        ("no_pipeline_wins_from_16_nodes", verdicts.FAIL, "9 of 13 winners"),
        ("no_pipeline_wins_in_one_regime", verdicts.UNKNOWN, "4 of 15 models and sizes"),
        ("data_parallel_falls", verdicts.PASS, "1.34B from 40,150 to 15,700 tokens/s each over dp 8 to 256"),
        ("short_pipelines_are_slower", verdicts.UNKNOWN, "with few micro-batches and with 32 on as many devices"),
        ("published_bars", verdicts.FAIL, "6 of 6 for dp, 1.34B and 0 of 5 for tp with sequence parallelism, 3B"),
        (
            "bandwidths_are_medians",
            verdicts.FAIL,
            "of 21 published values 21 are the mean of their runs and 0 the median",
        ),
        ("bandwidth_falls_in_one_regime", verdicts.FAIL, "fast: 187, 173, 188 and 176 GB/s on 8, 16, 32 and 64 nodes"),
        (
            "failures_take_devices",
            verdicts.PASS,
            "45.0 % of the requested devices: 1,917 out of memory, 1,765 ok and 422",
        ),
        ("throughputs_repeat", verdicts.UNKNOWN, "every throughput is that of one step"),
        ("throughputs_repeat", verdicts.UNKNOWN, "the furthest apart with 3,449 and 737 tokens/s/GPU"),
    ],
)
def test_on_the_study(study: dict[str, dict[str, str]], name: str, verdict: str, told: str) -> None:
    assert study[name]["verdict"] == verdict
    assert told in study[name]["evidence"]


def test_regimes_are_aligned_with_the_strategy(study: dict[str, dict[str, str]]) -> None:
    told = study["no_pipeline_wins_in_one_regime"]["evidence"]
    assert told.startswith("231 of 284 runs without a pipeline had the fast network, 11 of 775 with one.")


def point(model: ModelSpec = MODEL, **fields: Any) -> Experiment:
    return Experiment.canonical(model=model, **{"global_batch_size": 64, "micro_batch_size": 1, **fields})


def cohort(*rows: dict[str, Any]) -> Cohort:
    [found] = split(frame_of(list(rows)))
    return found


def timed(experiment: Experiment, index: int, rate: float, **columns: Any) -> dict[str, Any]:
    return synthetic.attempt(experiment, index, outcome="ok", tokens_per_s_per_gpu=rate, **columns)


def verdict(name: str, *rows: dict[str, Any]) -> verdicts.Verdict:
    [claim] = [claim for claim in claims.CLAIMS if claim.name == name]
    return claim.check(cohort(*rows).frame)


@pytest.mark.slow
def test_every_claim_declines_on_one_failed_row_and_on_one_run() -> None:
    for outcome in ("oom", "ok"):
        table = claims.table([cohort(synthetic.attempt(point(dp=2), outcome=outcome))])
        assert len(table) == len(claims.CLAIMS)
        decided = set(table.loc[table["verdict"] != verdicts.UNKNOWN, "name"])
        assert decided <= {"mfu_formula"}
        assert (table["evidence"].str.len() > 10).all()
        assert table.columns[:4].tolist() == ["claim", "data", "verdict", "evidence"]


def test_rehearsed_rows_are_not_asked() -> None:
    assert claims.table([cohort(synthetic.attempt(point(dp=2), method="rehearsed"))]).empty


def zero_pairs(slowdown: float) -> list[dict[str, Any]]:
    rows = []
    for i, mbs in enumerate((1, 2, 4, 8, 16, 32)):
        for zero, rate in ((0, 1000.0), (1, 1000.0 * slowdown)):
            experiment = point(dp=2, zero_stage=zero, micro_batch_size=mbs)
            rows.append(timed(experiment, 2 * i + zero, rate, peak_allocated_bytes=2**30 * (4 - zero)))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("slowdown", "expected"), [(1.0, verdicts.PASS), (0.98, verdicts.PASS), (0.9, verdicts.FAIL)])
def test_zero_one_against_zero_zero_is_matched(slowdown: float, expected: str) -> None:
    found = verdict("zero_one_matched", *zero_pairs(slowdown))
    assert found.verdict == expected
    assert f"{slowdown:.2f} (95 % interval" in found.evidence
    assert "n = 6; memory: 0.75" in found.evidence
    few = verdict("zero_one_matched", *zero_pairs(slowdown)[:8])
    holding = verdicts.Tally(4 if expected == verdicts.PASS else 0, 4)
    assert few == verdicts.Verdict(verdicts.UNKNOWN, "4 pairs of runs that differ only in ZeRO 0 or 1", holding)


def test_runs_that_differ_in_more_are_no_pair() -> None:
    rows = zero_pairs(1.0)
    other = [row | {"compile": "block"} if row["zero_stage"] else row for row in rows]
    assert verdict("zero_one_matched", *other).verdict == verdicts.UNKNOWN


def test_waiting_below_the_closed_form_fails() -> None:
    rows = [timed(point(dp=2, pp=2, micro_batch_size=mbs), i, 1000.0) for i, mbs in enumerate((1, 2, 4, 8, 16))]
    for row, share in ((row, 1 / row["num_microbatches"]) for row in rows):
        row["pipeline_idle_s"] = 1.1 * share / (1 + 1.1 * share) * row["step_time_s"]
    good = verdict("bubble_is_waited", *rows)
    assert good.verdict == verdicts.PASS
    assert "1.10 times the closed form in the median" in good.evidence
    for row in rows:
        row["pipeline_idle_s"] *= 0.2
    assert verdict("bubble_is_waited", *rows).verdict == verdicts.FAIL


def test_wrong_mfu_is_found() -> None:
    model = synthetic.llama("llama8b", 32, 4096, 32, 14336)
    row = timed(point(model, dp=2), 0, 1000.0)
    assert verdict("mfu_formula", row | {"mfu_playbook": 0.9}).verdict == verdicts.FAIL


def test_tied_embeddings_inflate_only_the_studys_mfu() -> None:
    rows = [timed(point(dp=2), 0, 1000.0, mfu_playbook=0.40, mfu_palm=0.40)]
    rows.append(timed(point(pp=2), 1, 900.0, mfu_playbook=0.45, mfu_palm=0.36))
    assert verdict("tied_embeddings", *rows).evidence.startswith("the MFU of a pipeline is higher by × 1.250")
    found = verdict("winners_by_throughput", *rows)
    assert (found.verdict, found.compared) == (verdicts.PASS, verdicts.Tally(1, 1))
    # 1,000 and 900 tokens/s/GPU are further apart than steps that vary by some percent.
    told = "1 of 1 winner change: llama1b on 2 GPUs; in 0 of the 1 with known noise both may be as fast"
    assert found.evidence == told


def test_published_winners_are_looked_for_by_shape_whatever_the_name() -> None:
    shape = ModelSpec(
        name="mine",
        num_layers=16,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=32,
        head_dim=64,
        ffn_hidden_size=8192,
        vocab_size=131_072,
        tie_embeddings=True,
    )
    same = point(shape, dp=4, pp=2, micro_batch_size=4, zero_stage=1, global_batch_size=256)
    other = point(shape, dp=8, micro_batch_size=2, global_batch_size=256)
    assert verdict("published_winners", timed(same, 0, 1000.0)).verdict == verdicts.PASS
    faster = verdict("published_winners", timed(same, 0, 1000.0), timed(other, 1, 5000.0, mfu_playbook=0.9))
    assert faster.verdict == verdicts.FAIL
    assert "1.34B on 8 GPUs: dp8 z0 · mbs 2×16" in faster.evidence


def test_tensor_parallelism_beyond_the_node() -> None:
    rows = []
    for i, (size, dp) in enumerate((s, d) for s in range(5) for d in (16, 8, 4, 2)):
        model = synthetic.llama(f"m{size}", 16, 2048, 32, 8192)
        tp = 32 // dp
        rate = {2: 1000.0, 4: 950.0, 8: 900.0, 16: 400.0}[tp]
        rows.append(timed(point(model, dp=dp, tp=tp), i, rate, nodes=[f"n{k}" for k in range(4)]))
    found = verdict("tensor_beyond_node", *rows)
    assert found.verdict == verdicts.PASS
    assert found.evidence.startswith("tp 8 → 16: 0.44")
    one_node = verdict("tensor_beyond_node", *(row | {"nodes": ["n0"]} for row in rows))
    assert one_node.verdict == verdicts.UNKNOWN


def test_data_parallelism_that_gains_with_every_doubling_fails() -> None:
    def rows(*rates: float) -> list[dict[str, Any]]:
        return [timed(point(dp=2 ** (i + 1), zero_stage=1), i, rate) for i, rate in enumerate(rates)]

    assert verdict("data_parallel_falls", *rows(1000.0, 900.0, 800.0)).verdict == verdicts.PASS
    level = verdict("data_parallel_falls", *rows(1000.0, 1010.0, 800.0))
    assert level.verdict == verdicts.PASS
    assert "not llama1b over dp 2 to 4 (1.0 % faster)" in level.evidence
    assert verdict("data_parallel_falls", *rows(1000.0, 1100.0, 800.0)).verdict == verdicts.FAIL
    assert verdict("data_parallel_falls", *rows(1000.0, 900.0)).verdict == verdicts.UNKNOWN


def test_short_pipelines_against_long_ones() -> None:
    rows = []
    for i in range(5):
        model = synthetic.llama(f"m{i}", 16, 2048, 32, 8192)
        for m, rate in ((4, 600.0), (32, 1000.0)):
            experiment = point(model, pp=4, micro_batch_size=64 // m)
            rows.append(timed(experiment, 2 * i + (m > 4), rate))
    found = verdict("short_pipelines_are_slower", *rows)
    assert found.verdict == verdicts.PASS
    assert "speed against 32: 0.60" in found.evidence
    faster = [row | {"tokens_per_s_per_gpu": 2000.0} if row["num_microbatches"] == 4 else row for row in rows]
    assert verdict("short_pipelines_are_slower", *faster).verdict == verdicts.FAIL
    assert verdict("short_pipelines_are_slower", *rows[:4]).verdict == verdicts.UNKNOWN


def test_share_of_failures() -> None:
    def rows(failed: int) -> list[dict[str, Any]]:
        outcomes = ["oom"] * failed + ["ok"] * (20 - failed)
        return [synthetic.attempt(point(dp=2), i, outcome=o, experiment_id=f"e{i}") for i, o in enumerate(outcomes)]

    assert verdict("failures_take_devices", *rows(9)) == verdicts.Verdict(
        verdicts.PASS, "45.0 % of the requested devices: 11 ok and 9 out of memory"
    )
    assert verdict("failures_take_devices", *rows(2)).verdict == verdicts.FAIL
    assert verdict("failures_take_devices", *rows(0)[:3]).verdict == verdicts.UNKNOWN


def test_published_cells_and_shapes_are_complete() -> None:
    assert len(published.WINNERS) == 27
    for (label, nodes), cell in published.WINNERS.items():
        assert label in published.SHAPES
        assert cell.dp * cell.tp * cell.pp == nodes * published.DEVICES_PER_NODE
        assert cell.dp * cell.acc * cell.mbs == 256


def test_ratio_of_no_pair_is_none() -> None:
    empty = pd.DataFrame({"x_one": [], "x_two": []})
    assert pairs.ratio(empty, "x") is None
