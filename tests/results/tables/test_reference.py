"""Reading the published study: its traps, on rows made by hand and on the table itself."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from results.errors import InvalidResults
from results.tables import reference
from results.tables.schema import ATTEMPTS, MEASUREMENT_VERSION

TABLE = Path(__file__).resolve().parents[4] / "shared" / "study" / "bench_final2_mfu2.csv"
ROW: dict[str, Any] = {
    "job_id": 14113488,
    "name": "1.34G_dp8_tp1_pp1_acc16_mbs2_seq4096_zero0_tpmodeRED_vocab131k",
    "nodes": "1.0",
    "seq_len": 4096,
    "mbs": 2,
    "batch_accum": "16.0",
    "mTFLOPs": 388.0,
    "tok/s/gpu": 40149.94,
    "AllReduce (GB/s)": 425.34,
    "AllGather (GB/s)": 241.26,
    "ReduceScatter (GB/s)": 241.67,
    "AR Intra-node (GB/s)": 423.7,
    "AG Intra-node (GB/s)": 241.59,
    "RS Intra-node (GB/s)": 240.63,
    "Mem Alloc (GB)": 25.07,
    "Mem Res (GB)": 50.18,
    "dp": 8,
    "pp": 1,
    "tp": 1,
    "hidden_size": 2048,
    "num_layers": 16,
    "num_heads": 32,
    "num_kv_heads": 32.0,
    "vocab_size": 131072,
    "tie_word_embeddings": True,
    "zero_stage": 0,
    "status": "Success",
    "oom_error": False,
    "Total Params Numeric": 1.34,
    "mfu": 39.178,
    "after_pp_fix": True,
}
EMPTY_OF_FAILURES = (
    *("mTFLOPs", "tok/s/gpu", "Mem Alloc (GB)", "Mem Res (GB)", "num_kv_heads", "tie_word_embeddings"),
    *("Total Params Numeric", "mfu"),
    *(name for name in ROW if "GB/s" in name),
)


def failed(status: str, **cells: Any) -> dict[str, Any]:
    return ROW | dict.fromkeys(EMPTY_OF_FAILURES, "") | {"status": status} | cells


def write(path: Path, *rows: dict[str, Any]) -> Path:
    lines = [",".join(f"{row[name]}" for name in rows[0]) for row in rows]
    path.write_text("\n".join([",".join(rows[0]), *lines]) + "\n")
    return path


def read(path: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = reference.read(write(path / "t.csv", *rows)).table.to_pylist()
    return found


def test_one_row_in_our_columns(tmp_path: Path) -> None:
    [row] = read(tmp_path, ROW)
    assert row["outcome"] == "ok"
    assert (row["model"], row["study_label"], row["ffn_hidden_size"]) == ("1.34B", "1.34B", 8192)
    assert (row["world_size"], row["node_count"], row["dp_replicate"], row["dp_shard"]) == (8, 1, 8, 1)
    assert row["num_microbatches"] == 16
    assert row["global_batch_size"] == 256
    assert row["tokens_per_step"] == 1_048_576
    assert row["step_time_s"] == pytest.approx(1_048_576 / (8 * 40149.94))
    assert row["published_mfu"] == pytest.approx(0.39178)
    assert row["all_reduce_bytes_per_s"] == pytest.approx(425.34e9)
    assert (row["pp_schedule"], row["timed_steps"]) == ("none", 1)


def test_allocated_after_the_reset_is_no_peak(tmp_path: Path) -> None:
    [row] = read(tmp_path, ROW)
    assert row["peak_allocated_bytes"] is None
    assert row["allocated_after_step_bytes"] == round(25.07 * 2**30)
    assert row["peak_reserved_bytes"] == round(50.18 * 2**30)


def test_rows_of_the_study_are_never_pooled_with_ours(tmp_path: Path) -> None:
    [row] = read(tmp_path, ROW)
    assert row["measurement_version"] not in range(1, MEASUREMENT_VERSION + 1)
    assert row["engine"] == "nanotron"


def test_global_batch_is_recomputed_whatever_the_file_says(tmp_path: Path) -> None:
    [row] = read(tmp_path, ROW | {"gbs": 1048576.0, "mbs": 8})
    assert row["global_batch_size"] == 8 * 8 * 16


def test_shapes_tell_models_apart(tmp_path: Path) -> None:
    large = {"num_layers": 80, "hidden_size": 8192, "num_heads": 64}
    rows = read(
        tmp_path,
        ROW | large | {"num_kv_heads": 64.0},
        ROW | large | {"num_kv_heads": 8.0},
        ROW | large | {"num_kv_heads": 64.0, "vocab_size": 49152},
        failed("OOM", **large, name=ROW["name"] + "_gqa8"),
        failed("OOM", **large),
        failed("OOM", num_layers=2, hidden_size=64, num_heads=4),
    )
    assert [row["model"] for row in rows] == [
        "80B",
        "80B (8 kv heads)",
        "80B (vocabulary 49,152)",
        "80B (8 kv heads)",
        "80B",
        "2 layers of 64",
    ]
    assert [row["study_label"] for row in rows[:5]] == ["80B"] * 5
    assert [row["num_kv_heads"] for row in rows] == [64, 8, 64, 8, None, None]
    assert rows[-1]["ffn_hidden_size"] is None
    assert len({row["experiment_id"] for row in rows[:3]}) == 3


def test_failures_keep_what_is_not_known_null(tmp_path: Path) -> None:
    oom, other = read(tmp_path, failed("OOM"), failed("Other"))
    assert (oom["outcome"], other["outcome"]) == ("oom", "unknown")
    for row in (oom, other):
        for name in (
            "tokens_per_s_per_gpu",
            "num_kv_heads",
            "tie_embeddings",
            "network_regime",
            "timed_steps",
            "phase",
        ):
            assert row[name] is None, name


@pytest.mark.parametrize(
    ("nodes", "gb_per_s", "regime"),
    [
        (8, 141.0, "fast"),
        (8, 102.0, "slow"),
        (64, 13.3, "slow"),
        (64, 177.0, "fast"),
        (4, 160.0, None),
        (8, None, None),
    ],
)
def test_network_regime(nodes: int, gb_per_s: float | None, regime: str | None) -> None:
    assert reference.network_regime(nodes, None if gb_per_s is None else gb_per_s * 1e9) == regime


def test_repeats_are_attempts_at_one_experiment_and_the_rewrite_is_another_version(tmp_path: Path) -> None:
    rows = read(tmp_path, ROW | {"job_id": 20}, ROW | {"job_id": 10}, ROW | {"job_id": 5, "after_pp_fix": False})
    assert [row["attempt_number"] for row in rows] == [2, 1, 1]
    assert rows[0]["experiment_id"] == rows[1]["experiment_id"] != rows[2]["experiment_id"]
    assert {row["engine_version"] for row in rows} == {reference.BEFORE, reference.AFTER}
    assert len({row["attempt_id"] for row in rows}) == 3


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"status": "Maybe"}, "row 1: status='Maybe'; it may be one of Success, OOM, Other"),
        ({"mfu": ""}, "row 1: column mfu is empty"),
        ({"dp": ""}, "row 1: column dp is empty"),
        ({"batch_accum": "1.5"}, "row 1: column batch_accum is 1.5, not a whole number"),
        ({"dp": 4}, "row 1: dp=4 * tp=1 * pp=1 is not 8 devices on each of 1 nodes"),
        ({"mbs": "two"}, "cannot be read as the study's table"),
    ],
)
def test_a_bad_cell_is_one_line(tmp_path: Path, cells: dict[str, Any], told: str) -> None:
    path = write(tmp_path / "t.csv", ROW | cells)
    with pytest.raises(InvalidResults) as caught:
        reference.read(path)
    assert told in str(caught.value)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\x00\xff\xfe\n", b"job_id,name\n1,x\n"])
def test_a_file_that_is_not_the_table_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidResults, match="is not the study's table: it has no column") as caught:
        reference.read(path)
    assert "nanotron/ultrascale-playbook-data" in str(caught.value)


def test_no_file_and_no_row(tmp_path: Path) -> None:
    with pytest.raises(InvalidResults, match="cannot be read"):
        reference.read(tmp_path / "none.csv")
    (tmp_path / "t.csv").write_text(",".join(ROW) + "\n")
    with pytest.raises(InvalidResults, match="has no rows"):
        reference.read(tmp_path / "t.csv")


def test_another_file_than_the_published_one_is_said(tmp_path: Path) -> None:
    [problem] = reference.read(write(tmp_path / "t.csv", ROW)).problems
    assert "published 2b20c1ec…" in problem


@pytest.fixture(scope="module")
def study() -> pa.Table:
    if not TABLE.exists():
        pytest.skip(f"the study's raw table is not at {TABLE}")
    found = reference.read(TABLE)
    assert found.problems == ()
    return found.table


@pytest.mark.slow
def test_the_whole_table(study: pa.Table) -> None:
    assert study.num_rows == 4104
    assert study.column_names[: len(ATTEMPTS)] == ATTEMPTS.names
    assert len(pc.unique(study["attempt_id"])) == 4104
    assert Counter(study["outcome"].to_pylist()) == {"ok": 1765, "oom": 1917, "unknown": 422}
    assert pc.sum(pc.not_equal(study["global_batch_size"], 256)).as_py() == 26
    assert pc.unique(study["source_sha256"]).to_pylist() == [hashlib.sha256(TABLE.read_bytes()).hexdigest()]


@pytest.mark.slow
def test_other_models_under_one_label(study: pa.Table) -> None:
    ok = study.filter(pc.equal(study["outcome"], "ok"))
    counts = Counter(ok["model"].to_pylist())
    assert counts["80B"] == 122
    assert counts["80B (8 kv heads)"] == 14
    assert counts["80B (vocabulary 49,152)"] == 2
    assert sum(counts.values()) == 1765
    named = [name.endswith("_gqa8") for name in ok["run_name"].to_pylist()]
    assert named == [kv == 8 for kv in ok["num_kv_heads"].to_pylist()]  # so the name tells it of failed runs too


@pytest.mark.slow
def test_regimes_and_the_rewrite(study: pa.Table) -> None:
    rows = [row for row in study.to_pylist() if row["network_regime"]]
    found = Counter((row["node_count"], row["pp"] == 1, row["network_regime"]) for row in rows)
    assert {key: found[key] for key in [(16, True, "fast"), (32, True, "fast"), (64, True, "fast")]} == {
        (16, True, "fast"): 111,
        (32, True, "fast"): 85,
        (64, True, "fast"): 35,
    }
    assert (found[16, False, "fast"], found[16, False, "slow"]) == (11, 289)
    assert (found[32, False, "fast"], found[64, False, "fast"]) == (0, 0)
    after = [row["after_pp_fix"] == (row["job_id"] >= 14097150) for row in study.to_pylist()]
    assert all(after)
