"""How ``plan`` and ``explain`` name a pipeline schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sweep.composing.conffiles import ConfFolders
from sweep.inspecting import explain
from sweep.inspecting.lookup import Record
from sweep.inspecting.planned_cluster import find_cluster
from sweep.planning import summary
from tests.workloads.costs.shapes import LLAMA_8B
from workloads.spec.experiment import Experiment


def pipeline(**fields: Any) -> Experiment:
    return Experiment.canonical(model=LLAMA_8B, global_batch_size=8, **{"pp": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({}, "dp 1, pp 4, mbs"),
        ({"pp_schedule": "gpipe"}, "dp 1, pp 4, gpipe, mbs"),
        ({"pp_schedule": "interleaved_1f1b", "virtual_stages": 4}, "dp 1, pp 4, interleaved 1f1b v4, mbs"),
        ({"pp_schedule": "interleaved_zero_bubble"}, "dp 1, pp 4, interleaved zero bubble v1, mbs"),
        ({"pp_schedule": "zero_bubble_v", "virtual_stages": 2}, "dp 1, pp 4, zero bubble v, mbs"),
    ],
)
def test_layouts_that_differ_in_their_chunks_differ_in_their_name(fields: dict[str, Any], name: str) -> None:
    assert summary.layout(pipeline(**fields)).startswith(name)


def test_explain_says_how_the_model_is_cut_and_what_equal_ranks_would_idle() -> None:
    # m = 8, p = 4: (p - 1) / (m + p - 1) = 3 / 11; interleaved 3 / 2 of 8 + 3 / 2; see the table in pipeline.py
    for fields, text in (
        ({}, "ZeRO 0; 1f1b, 27.3 % idle if all ranks took equally long"),
        (
            {"pp_schedule": "interleaved_1f1b", "virtual_stages": 2},
            "; interleaved_1f1b, 2 chunks of the model on each of 4 pipeline ranks, 15.8 % idle if",
        ),
        ({"pp_schedule": "zero_bubble_v", "virtual_stages": 2}, " 5.9 % idle if all ranks took equally long"),
        # What breaks a rule has no list of actions.
        ({"pp_schedule": "interleaved_1f1b"}, "ZeRO 0; interleaved_1f1b\n"),
    ):
        assert text in explain._configuration(pipeline(**fields))


@pytest.mark.slow
def test_explain_says_what_every_pipeline_rank_is_predicted_to_wait() -> None:
    experiment = pipeline(pp_split="even")
    known = Record(id=experiment.id, experiment=experiment, ledger=({"grid": "playbook"},), attempts=())
    text = idle_text(known)
    assert text.startswith("predicted waiting for other stages, share of a step on h100_efa: ")
    # 8, 8, 8 and 8 layers; the last rank has the head besides, so it waits least.
    assert [part.split(" %")[0].rpartition(" ")[0] for part in text.partition("; ")[2].split(", ")][-1] == "rank 3"
    waits = [float(part.split()[-2]) for part in text.partition("; ")[2].split(", ")]
    assert waits[-1] == min(waits) > 0
    on_h200 = dataclasses.replace(known, ledger=(), attempts=({"cluster": "h200"},))
    assert "on h200: " in idle_text(on_h200)
    assert "on b200: " in idle_text(dataclasses.replace(on_h200, command=("run", "cluster=b200")))
    for cluster in ("cpu", "of another folder"):
        assert idle_text(dataclasses.replace(on_h200, attempts=({"cluster": cluster},))) == "None"
    assert idle_text(dataclasses.replace(known, ledger=({"grid": "gone"},))) == "None"


def idle_text(record: Record) -> str:
    return str(explain._idle_text(record.experiment, find_cluster(record, ConfFolders()).cluster))


def test_neighbours_that_wait_alike_share_a_text() -> None:
    assert explain._by_rank([0.5, 0.25, 0.2501, 0.1]) == "rank 0 50.0 %, ranks 1-2 25.0 %, rank 3 10.0 %"
