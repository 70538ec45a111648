"""Tables of predictions in docs/fields have the numbers of the plan whose command stands above them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from sweep.__main__ import main
from tests.docs.pages import DOCS, commands

pytestmark = pytest.mark.slow(seconds=3)
FIELDS = DOCS / "fields"
AVAILABLE_GIB = 135.8
"""What training can have of an H200, as the pages say."""


def planned(words: Sequence[str]) -> list[dict[str, str]]:
    """The points of a plan that break no rule, as the columns of its file."""
    assert main([*words, "--out", "plan.csv"]) == 0
    with Path("plan.csv").open() as file:
        return [point for point in csv.DictReader(file) if point["verdict"] != "invalid"]


def command_of(page: str, word: str) -> list[str]:
    """The words of the only plan on a page that has this word."""
    (words,) = (words for words in commands((FIELDS / page).read_text(), "sweep") if word in " ".join(words))
    return words


def rows_below(page: str, head: str) -> list[list[str]]:
    """The cells of the table whose head begins so, without backquotes."""
    lines = (FIELDS / page).read_text().partition(f"\n| {head}")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines]


def gib(point: dict[str, str], column: str) -> str:
    return f"{float(point[column]) / 2**30:,.1f}" if float(point[column]) else "–"


def cells(point: dict[str, str]) -> tuple[str, str, str]:
    """Memory of a device with what it means, memory of the host, and time of a step."""
    device = gib(point, "predicted_peak_bytes")
    if point["verdict"] == "predicted_oom":
        device += ", does not fit"
    elif float(device) > AVAILABLE_GIB:
        device += ", may not fit"
    return device, gib(point, "predicted_host_memory_bytes"), f"{float(point['predicted_step_time_s']):.2f}"


def test_recomputation_and_activations_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    points = planned(command_of("activations.md", "recompute=[none,selective,full]"))
    expected = [[point["recompute"], point["activation_offload"], *cells(point)] for point in points]
    assert sorted(rows_below("activations.md", "`recompute` | `activation_offload`")) == sorted(expected)


def test_what_the_planner_chooses_under_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = command_of("activations.md", "memory_budget=")
    budgets = [f"{number} GiB" for number in re.findall(r"\d+", words[-1])]
    alone = planned([word for word in words if "activation_offload" not in word])
    both = {point["recompute"] + ", " + point["activation_offload"]: cells(point)[1:] for point in planned(words)}
    fits = {point["recompute"]: cells(point)[2] for point in alone if point["verdict"] == "run"}
    rows = rows_below("activations.md", "budget |")
    assert [row[0] for row in rows] == budgets
    assert {row[1]: row[2] for row in rows if row[2] != "–"} == fits
    assert {row[3]: (row[5], row[4]) for row in rows} == both


def test_optimizer_states_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    points = planned(command_of("optimizers.md", "optimizer_offload="))
    expected = []
    for point in points:
        device, *rest = cells(point)
        share = f"{float(point['optimizer_offload']):g}"
        expected.append([share, device.replace(", does not fit", f" of {AVAILABLE_GIB}"), *rest])
    assert sorted(rows_below("optimizers.md", "Llama 8B on one H200")) == sorted(expected)
