"""Training curves on a short version: a tiny model, 30 steps, every layout of the documented runs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from results.curve_bands import LAST_STEPS, distances
from results.curves import read_curves
from sweep.conffiles import ConfFolders
from tests.pool import Pool
from tests.workloads.engine.parity import train_rank
from workloads.curves.__main__ import chosen, main
from workloads.curves.runs import DENSE, LAYOUTS, REFERENCE, Run, all_runs, run_of
from workloads.curves.train import train_curve
from workloads.experiment import Precision
from workloads.recipe import Recipe
from workloads.rules import lacking, layout_violations

TINY = dataclasses.replace(
    DENSE, name="tiny bytes", hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_hidden_size=96
)
BATCH = {"global_batch_size": 16, "micro_batch_size": 4, "seq_len": 32}
SHORT = Recipe(steps=30, learning_rate=1e-2, warmup_steps=10)
OTHERS = [layout for layout in LAYOUTS if layout != REFERENCE]

_curves: dict[str, list[dict[str, Any]]] = {}


def curve(pool: Pool, precision: Precision, layout: str) -> list[dict[str, Any]]:
    """The rows of a short run, trained once."""
    run = run_of(TINY, precision, layout, BATCH)
    if run.name not in _curves:
        answers = pool.run(train_curve, run.experiment.world_size, run.experiment, SHORT, "cpu")
        assert all(answer == answers[0] for answer in answers), "ranks of one run have different curves"
        _curves[run.name] = [{**_named(run), **point} for point in answers[0]]
    return _curves[run.name]


def _named(run: Run) -> dict[str, Any]:
    e = run.experiment
    return {"run": run.name, "model": e.model.name, "precision": e.precision, "layout": run.layout}


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_layout_stays_in_its_band(gloo_pool: Pool, precision: Precision, layout: str) -> None:
    rows = [*curve(gloo_pool, precision, REFERENCE), *curve(gloo_pool, precision, layout)]
    (found,) = distances(rows)
    assert found.is_inside, found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16"])
def test_a_precision_stays_in_its_band(gloo_pool: Pool, precision: Precision) -> None:
    rows = [*curve(gloo_pool, "fp32", REFERENCE), *curve(gloo_pool, precision, REFERENCE)]
    (found,) = distances(rows)
    assert found.is_inside, found


@pytest.mark.slow
def test_it_learns_the_text_and_not_only_by_heart(gloo_pool: Pool) -> None:
    rows = curve(gloo_pool, "fp32", REFERENCE)
    assert [row["step"] for row in rows] == list(range(SHORT.steps))
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.1)  # knows nothing
    last = sum(row["loss"] for row in rows[-5:]) / 5
    assert last < 3.0
    assert rows[-1]["held_out_loss"] == pytest.approx(last, abs=0.3)
    assert all(row["held_out_loss"] is None for row in rows[:-1])


@pytest.mark.slow
def test_a_recipe_with_a_sweeps_rate_and_tokens_is_a_sweeps_run(gloo_pool: Pool) -> None:
    e = run_of(TINY, "fp64", REFERENCE, BATCH).experiment
    recipe = Recipe(data="synthetic", learning_rate=3e-5, warmup_steps=0, steps=2)
    (points,) = gloo_pool.run(train_curve, 1, e, recipe, "cpu")
    (trace,) = gloo_pool.run(train_rank, 1, e, 2)
    assert [point["loss"] for point in points] == trace.losses
    (faster,) = gloo_pool.run(train_curve, 1, e, dataclasses.replace(recipe, learning_rate=3e-3), "cpu")
    assert faster[1]["loss"] != trace.losses[1]
    assert points[-1]["held_out_loss"] is None  # there is no text


def test_every_documented_run_can_be_built() -> None:
    runs = all_runs()
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        assert layout_violations(run.experiment) == [] and lacking(run.experiment) == []
        assert run.experiment.world_size <= 2
    assert len(OTHERS) == 8
    assert SHORT.steps > LAST_STEPS


def test_the_model_is_the_shipped_file() -> None:
    assert ConfFolders().model("bytes") == DENSE


def test_runs_are_chosen_by_parts_of_their_names() -> None:
    assert len(chosen(None)) == len(all_runs())
    assert [run.layout for run in chosen(["pp 2"])] == ["pp 2 1F1B", "pp 2 ZB-V"]


def test_mistakes_are_one_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "curves.parquet")]
    for words, message in (
        ([*out, "--only", "ep 3"], "error: --only 'ep 3': no run is called so; there are bytes fp32 one rank;"),
        ([*out, "--steps", "0"], "error: recipe: steps=0 must be a whole number of at least 1"),
        ([*out, "--jobs", "0"], "error: --jobs=0 must be a whole number of at least 1"),
        ([], "error: the following arguments are required: --out"),
    ):
        assert main(words) == 2
        told = capsys.readouterr().err
        assert told.startswith(message) and told.count("\n") == 1


@pytest.mark.slow
def test_the_command_writes_the_table(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "curves.parquet"
    assert main(["--out", str(path), "--only", "bytes fp32", "--steps", "1"]) == 0
    (row,) = read_curves(path)
    assert row["run"] == "bytes fp32 one rank" and row["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert row["held_out_loss"] is not None and row["torch_version"]
    assert "bytes fp32 one rank: loss 5." in capsys.readouterr().out
