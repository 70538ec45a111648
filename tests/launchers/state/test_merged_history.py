"""The merged file gives readers many records at once, and is never more than a copy of the records' own files."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launchers.state import history, merged_history
from launchers.state.history import AttemptRecord, HistoryReader, write_record
from launchers.state.merged_history import merged_path
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import StatusReader, sweep_status
from sweep.inspecting.status import print_status
from tests.launchers.scripted import attempt_record
from workloads.contract import protocol

FULL = attempt_record(
    3,
    "ok",
    method="rehearsed",
    gap_s=0.1,
    step_time_s=1 / 3,
    tokens_per_s_per_gpu=5e3,
    peak_allocated_bytes=2**40,
    nodes=("n1", "n2"),
    failed_node="n2",
    kind="llama",
    backend="cuda",
)
BARE = attempt_record(4, "ok", phase=None, phase_step=None, failed_rank=None, evidence=None)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three records are many."""
    monkeypatch.setattr(merged_history, "LEAST", 2)
    monkeypatch.setattr(history, "LEAST", 2)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Numbers of the attempts whose records' own files are read."""
    numbers: list[str] = []
    read = history._read

    def reading(path: Path) -> AttemptRecord:
        numbers.append(path.name.partition("@a")[2].removesuffix(".json"))
        return read(path)

    monkeypatch.setattr(history, "_read", reading)
    return numbers


def write(sweep: SweepDir, *records: AttemptRecord) -> None:
    for record in records:
        write_record(sweep, f"{record.attempt_number:06d}-e", record)


def known(sweep: SweepDir) -> HistoryReader:
    reader = HistoryReader(sweep)
    reader.refresh()
    return reader


def count(sweep: SweepDir) -> int:
    """Number of records in the merged file."""
    return len(json.loads(merged_path(sweep.history).read_text())["name"])


def merged(sweep: SweepDir, *numbers: int) -> list[AttemptRecord]:
    """Write ordinary records with these numbers and two special ones, and the merged file. Returns all records."""
    write(sweep, FULL, BARE, *(attempt_record(number, "ok") for number in numbers))
    reader = known(sweep)
    reader.merge()
    return reader.all()


def test_a_reader_opens_only_the_records_that_came_later(sweep: SweepDir, opened: list[str]) -> None:
    before = merged(sweep, 1, 2)
    assert {FULL, BARE} <= set(before) and len(opened) == 4
    opened.clear()
    write(sweep, attempt_record(8), attempt_record(9))
    reader = known(sweep)
    assert reader.all()[:4] == before and opened == ["8", "9"]
    assert reader.of("000003-e") == [FULL] and reader.files_read == 6
    assert {"name", *(field.name for field in dataclasses.fields(FULL))} == json.loads(
        merged_path(sweep.history).read_text()
    ).keys()
    assert [type(value) for value in dataclasses.astuple(reader.all()[2])] == [*map(type, dataclasses.astuple(FULL))]


def test_a_record_without_a_file_of_its_own_is_not_known(sweep: SweepDir) -> None:
    merged(sweep, 1, 2)
    (sweep.history / "000001-e@a1.json").unlink()
    assert {record.attempt_number for record in known(sweep).all()} == {2, 3, 4}


@pytest.mark.parametrize("content", [None, "", '{"name": [', "[]", '{"name": [1, 2]}', "link", "folder"])
def test_a_lost_or_damaged_merged_file_costs_only_time(
    sweep: SweepDir, tmp_path: Path, opened: list[str], content: Any
) -> None:
    before = merged(sweep, 1, 2)
    path = merged_path(sweep.history)
    whole = path.read_text()
    path.unlink()
    if content == "link":
        (tmp_path / "theirs").write_text(whole)
        path.symlink_to(tmp_path / "theirs")
    elif content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    opened.clear()
    reader = known(sweep)
    assert reader.all() == before and len(opened) == 4
    if content != "folder":
        reader.merge()
        assert not path.is_symlink() and count(sweep) == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"world_size": 0},
        {"ended_at": float("inf")},
        {"started_at": 1e18},
        {"pilot_id": "../p"},
        {"outcome": None},
        {"method": "guessed"},
        {"nodes": "n1"},
        {"nodes": [1]},
        {"evidence": "\ud800"},
        {"phase_step": True},
        {"gap_s": 10**400},
    ],
)
def test_a_merged_record_with_odd_fields_is_read_from_its_own_file(
    sweep: SweepDir, opened: list[str], changed: dict[str, Any]
) -> None:
    before = merged(sweep, 1, 2)
    path = merged_path(sweep.history)
    columns = json.loads(path.read_text())
    for name, value in changed.items():
        columns[name][0] = value
    path.write_text(json.dumps(columns))
    opened.clear()
    assert known(sweep).all() == before and opened == ["1"]


def test_failures_of_the_infrastructure_are_not_copied_because_they_may_be_replaced(
    sweep: SweepDir, opened: list[str]
) -> None:
    write(sweep, attempt_record(5, "node_failure", infrastructure=True))
    merged(sweep, 1, 2)
    opened.clear()
    write(sweep, late := attempt_record(5, "ok"))
    assert late in known(sweep).all() and opened == ["5"]


def test_of_two_writers_the_last_one_wins_and_writes_again_only_what_is_missing(
    sweep: SweepDir, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(sweep, *(attempt_record(number, "ok") for number in range(5)))
    first, second, third = known(sweep), known(sweep), known(sweep)
    write_json = protocol.write_json

    def meanwhile(path: Path, columns: Any) -> None:
        monkeypatch.setattr(merged_history, "write_json", write_json)
        write(sweep, attempt_record(7, "ok"))
        second.merge()
        assert count(sweep) == 6
        write_json(path, columns)

    monkeypatch.setattr(merged_history, "write_json", meanwhile)
    first.merge()
    path = merged_path(sweep.history)
    stamp = path.stat().st_ino
    third.merge()
    assert path.stat().st_ino == stamp and [entry.name for entry in sweep.todo.parent.glob("*.*")] == [path.name]
    opened.clear()
    assert len(known(sweep).all()) == 6 and opened == ["7"]


def test_a_command_merges_what_it_has_read(sweep: SweepDir, opened: list[str]) -> None:
    write(sweep, *(attempt_record(number, "ok") for number in range(4)))
    reader = StatusReader(sweep)
    before = reader.read()
    reader.merge_records()
    opened.clear()
    assert sweep_status(sweep) == before and opened == []


def test_status_merges_the_records_of_a_sweep_of_an_older_version(sweep: SweepDir, opened: list[str]) -> None:
    write(sweep, *(attempt_record(number, "ok") for number in range(4)))
    console = Console(file=io.StringIO())
    print_status(sweep.path, console)
    opened.clear()
    print_status(sweep.path, console)
    assert opened == []


def test_a_few_records_need_no_merged_file(sweep: SweepDir) -> None:
    write(sweep, FULL, BARE)
    known(sweep).merge()
    assert not merged_path(sweep.history).exists()
