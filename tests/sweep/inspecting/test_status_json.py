"""``status --json``: one document, the fields of docs/json.md, and null for what is unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launchers.slurm.client import Job
from launchers.state import node_exclusions
from sweep.__main__ import main
from tests.sweep.documented_json import documented
from tests.sweep.inspecting.test_status import Study, slurm_says, study

__all__ = ["slurm_says", "study"]


def printed(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_a_running_sweep_is_told_with_the_documented_fields(
    study: Study, slurm_says: Callable[[list[Job] | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_says([study.job(5, "RUNNING"), study.job(7, "RUNNING")])
    node_exclusions.exclude(study.sweep, "node017", "device memory stays taken", "p")
    document = printed(study.sweep.path, capsys)
    assert (document["schema"], document["schema_version"]) == ("ultrasweep.status/1", 1)
    assert document["unread"] == []
    (sweep,) = document["sweeps"]
    assert sweep["outcomes"] == {"hang": 1, "ok": 2, "oom": 1}
    assert (sweep["ended"], sweep["running"], sweep["slurm_answers"]) == (4, 2, True)
    assert sweep["points"] == sweep["ended"] + sweep["running"] + sweep["waiting"]
    begun, starting = sweep["pilots"]
    assert (begun["job"], begun["slurm_state"], len(begun["running"])) == ("1234_5", "RUNNING", 2)
    assert starting["job"] == "1234_7" and starting["pilot_id"] is None
    assert begun.keys() == starting.keys()
    assert [one["node"] for one in sweep["excluded_nodes"]] == ["node017"]
    assert {one["outcome"] for one in sweep["failures"]} == {"hang", "oom"}
    assert documented("status") == set(sweep)


def test_what_slurm_does_not_say_is_null(
    study: Study, slurm_says: Callable[[list[Job] | None], None], capsys: pytest.CaptureFixture[str]
) -> None:
    slurm_says(None)
    (sweep,) = printed(study.sweep.path, capsys)["sweeps"]
    assert sweep["slurm_answers"] is False
    assert [pilot["slurm_state"] for pilot in sweep["pilots"]] == [None]


def test_an_error_leaves_standard_output_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path), "--json"]) != 0
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1
