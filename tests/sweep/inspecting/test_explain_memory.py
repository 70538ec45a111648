"""``explain --memory``: the events of a peak as a table that adds up."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from results.errors import UltrasweepError
from sweep.cli.point_commands import EXPLAIN
from sweep.inspecting.explain_memory import print_memory
from sweep.inspecting.lookup import Record
from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment

LAYOUT = Experiment.canonical(
    model=LLAMA_8B, dp=8, zero_stage=2, pp=2, seq_len=4096, micro_batch_size=2, global_batch_size=64
)


def told(experiment: Experiment) -> str:
    file = io.StringIO()
    print_memory(Record(id="a-layout", experiment=experiment, ledger=(), attempts=()), Console(file=file, width=120))
    return file.getvalue()


def test_the_table_adds_up_to_the_peak_and_names_every_tensor() -> None:
    text = told(LAYOUT)
    rows = re.findall(r"  ([+-][\d,]+) +([\d,]+)( +< peak)?", text)
    total, peaks = 0, []
    for change, after, mark in rows:
        total += int(change.replace(",", ""))
        assert total == int(after.replace(",", ""))
        peaks += [total] if mark else []
    assert peaks == [estimate_memory(LAYOUT).peak_bytes]
    assert "saved by other micro-batches" in text and "training/pipeline.py _Step.held" in text
    assert "bytes on stage 0, first backward" in text or "bytes on stage 0, second backward" in text


def test_a_layout_of_another_engine_or_against_the_rules_is_refused_in_one_line() -> None:
    with pytest.raises(UltrasweepError, match="engine=torchtitan"):
        told(LAYOUT.replace(engine="torchtitan"))
    with pytest.raises(UltrasweepError, match="layouts that can run"):
        told(LAYOUT.replace(pp=64))


def test_the_option_is_off_unless_given() -> None:
    from results.text.command_line import Parser

    parser = Parser(prog="explain")
    EXPLAIN.arguments(parser)
    assert not parser.parse_args(["an-id"]).memory
    assert parser.parse_args(["an-id", "--memory"]).memory
