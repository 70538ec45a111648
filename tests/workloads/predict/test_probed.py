"""What the figures of a probe say of a machine: its host, its links and its matrix products."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.predict.test_layouts import H200, of
from workloads.predict import layouts
from workloads.predict.parameters import TIME
from workloads.predict.probed import IN_A_PROBE, LAUNCH_S, probed


def figure(kind: str, name: str, value: float, **fields: Any) -> dict[str, Any]:
    known = ("tp", "zero_stage", "recompute", "rows", "columns", "inner", "hidden_size", "bytes", "group_size")
    return {
        **dict.fromkeys((*known, "placement")),
        "backend": "cuda",
        "kind": kind,
        "name": name,
        "value": value,
    } | fields


def host(seconds: float, **fields: Any) -> list[dict[str, Any]]:
    where = {"tp": 1, "zero_stage": 0, "recompute": "none", **fields}
    return [
        figure("host", "layer_forward", seconds / 3, **where),
        figure("host", "layer_backward", 2 * seconds / 3, **where),
    ]


def test_a_probe_says_what_the_host_and_the_links_take() -> None:
    host_s, more_s = TIME["host"].value, TIME["host_tp"].value
    rows = [
        *host(1.5 * host_s),
        *host(1.5 * host_s + 2.5 * more_s, tp=2),
        *host(9.0, tp=2, recompute="full"),  # no case of the model
        # 2 (n - 1) / n = 1.75 times 800 MB in 4 ms, and a smaller call that does not count.
        figure("collective", "all_reduce", 4e-3, bytes=800e6, group_size=8, placement="inside_node"),
        figure("collective", "all_reduce", 4e-3, bytes=8e6, group_size=8, placement="inside_node"),
    ]
    found = probed(rows, H200)
    pace = IN_A_PROBE * (3 * host_s + 2.5 * more_s) / (2 * host_s + more_s)
    assert found == pytest.approx({"pace": pace, "intra_measured": 350e9})


def test_a_probes_launches_say_more_of_its_host_than_its_layers() -> None:
    launches = [figure("host", "launch", seconds * LAUNCH_S) for seconds in (1.0, 1.2, 1.1)]
    assert probed([*host(9e-3), *launches], H200) == pytest.approx({"launch": 1.2}), "of the slowest rank, as in rows"
    wrong = figure("host", "launch", 3.0 * LAUNCH_S)  # nine times as long to issue a layer
    assert not probed([*host(9e-3), wrong], H200)
    slow, usual = (layouts.points_of([of(dp=8)], H200, told) for told in ({"launch": 1.2}, None))
    assert slow.launch.tolist() == [1.2] and usual.launch.tolist() == [1.0]


def test_a_probe_says_what_share_of_peak_products_reach() -> None:
    peak = H200.device.peak_of("bf16")
    assert peak is not None
    said = 0.8 * peak / (1 + 250 / 8192) / (1 + 80 / 4096)
    row = figure("matmul", "down.forward", said, tp=1, rows=8192, columns=4096, inner=14336, hidden_size=4096)
    assert probed([row], H200) == pytest.approx({"matmul": 0.8 / TIME["matmul"].value})


def test_figures_of_processes_or_far_off_say_nothing() -> None:
    cpu = [{**row, "backend": "cpu"} for row in host(3e-3)]
    assert probed(cpu, H200) == probed([], H200)
    assert not probed(host(3.0), H200)  # three seconds to issue a layer: the test went wrong
