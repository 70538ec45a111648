"""What `diff` holds against each other: rows obtained in the same way, under the ids that they were stored with."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
from rich.console import Console

from results.tables.schema import METHODS
from sweep.composing.conffiles import ConfFolders
from sweep.inspecting.difference import print_difference
from sweep.inspecting.explain import print_explanation
from sweep.inspecting.lookup import Record
from sweep.inspecting.measured_values import MEASURED
from tests.workloads.costs.shapes import DEEPSEEK_V3, LLAMA_8B, MIXTRAL
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

MODEL = ModelSpec(
    name="tiny",
    num_layers=4,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden_size=128,
    vocab_size=256,
)
EXPERIMENT = Experiment.canonical(model=MODEL, seq_len=64, global_batch_size=8)
OTHER = dataclasses.replace(EXPERIMENT, seed=EXPERIMENT.seed + 1)


def attempt(method: str, rate: float | None, outcome: str = "ok") -> dict[str, Any]:
    absent = dict.fromkeys(column for _, column, *_ in MEASURED if column)
    return {**absent, "method": method, "outcome": outcome, "tokens_per_s_per_gpu": rate, "backend": "cuda"}


def record(name: str, *attempts: dict[str, Any]) -> Record:
    experiment = EXPERIMENT if name == "left" else OTHER
    return Record(id=name, experiment=experiment, ledger=(), attempts=attempts)


def told(left: Record, right: Record) -> list[list[str]]:
    file = io.StringIO()
    print_difference(left, right, Console(file=file, width=200))
    return [line.split() for line in file.getvalue().splitlines()]


def test_a_measured_row_is_held_against_a_measured_one_though_a_rehearsal_is_newer() -> None:
    left = record("left", attempt("measured", 100), attempt("rehearsed", 300))
    lines = told(left, record("right", attempt("measured", 200)))
    assert ["left", "right"] in lines
    assert ["tokens/s/GPU", "100", "200"] in lines
    assert not [line for line in lines if line[:1] == ["method"]]


def test_two_methods_are_said_where_no_method_has_both() -> None:
    lines = told(record("left", attempt("rehearsed", 300)), record("right", attempt("measured", 200)))
    assert ["method", "rehearsed", "measured"] in lines
    assert ["tokens/s/GPU", "300", "200"] in lines


@pytest.mark.parametrize("method", METHODS)
def test_a_failure_is_shown_where_nothing_of_that_method_finished(method: str) -> None:
    lines = told(record("left", attempt(method, None, "oom")), record("right", attempt(method, 200)))
    assert ["outcome", "oom", "ok"] in lines


def test_the_newest_finished_row_of_a_method_is_taken() -> None:
    left = record("left", attempt("measured", 100), attempt("measured", 110), attempt("measured", None, "crash"))
    lines = told(left, record("right", attempt("measured", 200)))
    assert ["tokens/s/GPU", "110", "200"] in lines


def test_what_only_one_has_is_shown_alone() -> None:
    lines = told(record("left", attempt("measured", 100)), record("right"))
    assert ["tokens/s/GPU", "100"] in lines


def explained(experiment: Experiment, tmp_path: Any) -> str:
    file = io.StringIO()
    print_explanation(
        Record(id="point", experiment=experiment, ledger=(), attempts=()), tmp_path, ConfFolders(), Console(file=file)
    )
    return " ".join(file.getvalue().split())


def test_explain_says_the_layers_of_each_stage(tmp_path: Any) -> None:
    case = Experiment.canonical(model=LLAMA_8B, pp=2, pp_split="even", global_batch_size=8)
    assert "layers by pipeline rank: rank 0 0-15 (16); rank 1 16-31 (16)" in explained(case, tmp_path)
    vee = Experiment.canonical(
        model=DEEPSEEK_V3, pp=2, pp_schedule="zero_bubble_v", global_batch_size=8, pp_split="even"
    )
    assert "rank 0 0-15 and 46-60 (31, 3 dense); rank 1 16-30 and 31-45 (30)" in explained(vee, tmp_path)
    assert "by pipeline rank" not in explained(EXPERIMENT, tmp_path)


def test_explain_says_the_active_parameters_with_and_without_the_embedding(tmp_path: Any) -> None:
    mixture = explained(Experiment.canonical(model=MIXTRAL, global_batch_size=8), tmp_path)
    assert "active for a token: 12,879.9 M, 12,748.9 M without the input embedding" in mixture
    assert "active for a token" not in explained(EXPERIMENT, tmp_path)


def test_explain_says_why_an_attempt_has_no_mfu(tmp_path: Any) -> None:
    of_attempt = {
        **attempt("measured", 100.0),
        "attempt_id": "a1",
        "started_at": None,
        "phase": None,
        "phase_step": None,
        "failed_rank": None,
        "will_retry": False,
        "evidence": None,
        "log_dir": None,
        "cluster": None,
        "peak_flops_source": "none: the file of cluster x has no peak_flops for fp64; it has bf16",
    }
    file = io.StringIO()
    print_explanation(record("left", of_attempt), tmp_path, ConfFolders(), Console(file=file, width=200))
    assert "100, no MFU: the file of cluster x has no peak_flops for fp64; it has bf16" in file.getvalue()


def test_explain_says_the_stored_id(tmp_path: Any) -> None:
    """That of an earlier engine version is not the hash of today's fields."""
    file = io.StringIO()
    print_explanation(record("left"), tmp_path, ConfFolders(), Console(file=file, width=200))
    assert file.getvalue().splitlines()[0] == "left"
