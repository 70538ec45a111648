"""Probes on disk: the newest of a cluster counts, and only of today's tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from results.errors import InvalidResults
from results.tables import probes

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def figure(at: datetime = NOON, **fields: Any) -> dict[str, Any]:
    return {
        "probe_id": "p",
        "probe_version": probes.PROBE_VERSION,
        "measured_at": at,
        "cluster": "lab",
        "kind": "matmul",
        "name": "down.forward",
        "value": 6e14,
        "unit": "FLOP/s",
        **fields,
    }


def test_the_newest_of_a_cluster_counts(tmp_path: Path) -> None:
    assert probes.load_probe("lab", tmp_path) is None
    probes.write_probe(tmp_path, "lab", "z_old", [figure(value=1.0)])
    newest = probes.write_probe(tmp_path, "lab", "a_new", [figure(NOON + timedelta(days=1), value=2.0, tp=4)])
    probes.write_probe(tmp_path, "other", "x", [figure(NOON + timedelta(days=9))])
    found = probes.load_probe("lab", tmp_path)
    assert found is not None
    assert found.path == newest
    assert [row["value"] for row in found.select("matmul", tp=4)] == [2.0]
    assert not found.select("matmul", tp=2)
    assert not found.select("copy")
    assert str(newest) in found.describe()


def test_other_versions_and_damaged_files_do_not_count(tmp_path: Path) -> None:
    probes.write_probe(tmp_path, "lab", "later", [figure(NOON + timedelta(days=1), probe_version=99)])
    (probes.probe_dir(tmp_path, "lab") / "broken.parquet").write_bytes(b"PAR1")
    assert probes.load_probe("lab", tmp_path) is None
    probes.write_probe(tmp_path, "lab", "good", [figure()])
    found = probes.load_probe("lab", tmp_path)
    assert found is not None
    assert found.path.name == "good.parquet"


def test_a_figure_without_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidResults, match="value"):
        probes.write_probe(tmp_path, "lab", "p", [figure(value=None)])


def test_every_field_of_a_figure_is_a_column() -> None:
    import dataclasses

    from workloads.contract.probe_figures import Figure

    assert {field.name for field in dataclasses.fields(Figure)} <= set(probes.PROBE.names)
