"""Slurm's short form of node names."""

from __future__ import annotations

import pytest

from launchers.slurm.host_list import MOST_NODES, hostnames


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node1,gpu-2.site.org", ["node1", "gpu-2.site.org"]),
        ("node[08-10,17],x3", ["node08", "node09", "node10", "node17", "x3"]),
        ("r[1-2]n[01-02]-ib", ["r1n01-ib", "r1n02-ib", "r2n01-ib", "r2n02-ib"]),
        ("node[1-3", []),
        ("node[a-b]", []),
        (f"node[1-{2 * MOST_NODES}]", []),
        (f"a[1-{MOST_NODES}]b[1-9]", []),
    ],
)
def test_a_list_is_expanded_without_slurm(text: str, names: list[str]) -> None:
    assert hostnames(text) == names
