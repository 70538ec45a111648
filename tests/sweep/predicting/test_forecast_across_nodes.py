"""Forecasts of layouts across two nodes, with the network that a probe measured."""

from __future__ import annotations

import dataclasses
import statistics
from datetime import timedelta
from pathlib import Path

import pytest

from results.tables import files
from results.tables.probes import load_probe
from results.tables.store import read_attempts
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.predicting.forecast import Forecast, _without_network
from sweep.predicting.known import _checked_rates, read_known
from workloads.contract.probe_figures import ON_GPU
from workloads.costs.traffic.measured_network import network_of
from workloads.predict.crossing import LEAST_TAUGHT, Crossing
from workloads.spec.experiment import from_json

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
LAB = ROOT / "tests" / "slurm" / "lab"
TWO_NODES = ["+grid=two_nodes_of_one", "cluster=lab_h200", "cluster.devices_per_node=1"]


@pytest.mark.parametrize(("folder", "count", "near"), [("recorded", 21, 15), ("recorded_undisturbed", 22, 17)])
def test_layouts_across_nodes_take_the_times_of_a_probes_network(folder: str, count: int, near: int) -> None:
    """Two nodes of one H200 joined by sockets: the closed form alone, with the link of the cluster file, is far off."""
    sweep = LAB / folder / "h200x2_slurm_two_nodes"
    cluster = compose_sweep(TWO_NODES, ConfFolders((LAB / "conf",))).cluster
    known = dataclasses.replace(read_known(cluster, LAB / folder), steps={})
    assert known.network is not None and known.network.nodes == 2
    across = [
        (from_json(row["config_json"]), row["step_time_s"])
        for row in read_attempts(sweep).to_pylist()
        if row["outcome"] == "ok" and len(row["nodes"]) == 2
    ]
    experiments = [one for one, _ in across]

    def errors(forecast: Forecast) -> list[float]:
        times = forecast.times(experiments)
        return [abs(time.step_time_s / measured - 1) for time, (_, measured) in zip(times, across, strict=True) if time]

    with_network, without = (
        errors(Forecast.of(cluster, one)) for one in (known, dataclasses.replace(known, network=None))
    )
    assert len(with_network) == len(across) == count
    assert statistics.fmean(with_network) < 0.09 < 0.4 < statistics.fmean(without)
    assert sum(error <= 0.1 for error in with_network) >= near
    times = Forecast.of(cluster, known).times(experiments)
    inside = [time.low_s <= measured <= time.high_s for time, (_, measured) in zip(times, across, strict=True) if time]
    assert sum(inside) >= 0.85 * count


def test_times_that_were_committed_before_points_ran_on_two_nodes() -> None:
    """As the sweep's note says. Every point has one row, and it is `ok`."""
    sweep = LAB / "recorded_undisturbed" / "h200x2_slurm_two_nodes"
    predicted = files.read_parquet(sweep / "predicted_before.parquet").to_pylist()
    times = {row["experiment_id"]: row for row in predicted if row["world_size"] == 2}
    rows = {row["experiment_id"]: row for row in read_attempts(sweep).to_pylist()}
    assert rows.keys() == times.keys() and {row["outcome"] for row in rows.values()} == {"ok"}
    errors = [abs(times[name]["predicted_step_time_s"] / row["step_time_s"] - 1) for name, row in rows.items()]
    assert statistics.fmean(errors) == pytest.approx(0.085, abs=0.0005)
    assert statistics.median(errors) == pytest.approx(0.055, abs=0.0005)
    assert (len(errors), sum(error <= 0.1 for error in errors)) == (22, 16)


def test_rows_whose_step_is_mostly_network_teach_nothing_about_the_rest() -> None:
    cluster = compose_sweep(TWO_NODES, ConfFolders((LAB / "conf",))).cluster
    known = read_known(cluster, LAB / "recorded")
    across = Crossing(cluster, known.network) if known.network is not None else None
    assert across is not None
    spanning = [one for one in known.steps.values() if across.covers(one.experiment)]
    learned, added = _without_network(spanning, across, known.probe), across.added([one.experiment for one in spanning])
    assert 0 < len(learned) < len(spanning) / 2
    assert all(added.during + added.after > 0)
    measured = {one.experiment.id: one.step_time_s for one in spanning}
    assert all(LEAST_TAUGHT * measured[one.experiment.id] <= one.step_time_s for one in learned)
    assert all(one.step_time_s <= measured[one.experiment.id] for one in learned)


@pytest.mark.slow(seconds=2)
def test_a_probes_network_takes_the_place_of_tiers_as_of_links() -> None:
    short = compose_sweep(TWO_NODES, ConfFolders((LAB / "conf",))).cluster
    known = read_known(short, LAB / "recorded")
    assert known.network is not None
    tiers = tuple(dataclasses.replace(tier, network=None) for tier in short.tiers_by_size)
    listed = dataclasses.replace(short, intra_node=None, inter_node=None, tiers=tiers)
    experiments = [one.experiment for one in known.steps.values()]
    one, other = (Crossing(cluster, known.network).added(experiments) for cluster in (short, listed))
    assert one.during.tolist() == other.during.tolist() and one.after.tolist() == other.after.tolist()
    assert Forecast.of(listed, known).times(experiments) == Forecast.of(short, known).times(experiments)


def test_checks_of_pilots_are_other_moments_of_the_network() -> None:
    cluster = compose_sweep(TWO_NODES, ConfFolders((LAB / "conf",))).cluster
    probe, network = load_probe("lab_h200", LAB / "recorded"), read_known(cluster, LAB / "recorded").network
    assert probe is not None and network is not None
    rates = _checked_rates(LAB / "recorded", cluster, 2, probe.measured_at)
    assert len(rates) == 5, "five pilots of both nodes"
    assert not _checked_rates(LAB / "recorded", cluster, 3, probe.measured_at)
    assert not _checked_rates(LAB / "recorded", cluster, 2, probe.measured_at + timedelta(days=1))
    alone = network_of(probe.rows, 1)
    assert alone is not None
    probed, mean = (one.seconds("all_reduce", ON_GPU.check_bytes, 2, 1) for one in (alone, network))
    assert mean == pytest.approx(statistics.fmean([probed or 0, *(ON_GPU.check_bytes / rate for rate in rates)]))
