"""What a run says at its end of the fastest layouts and of what to try next, from rows made by hand."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launchers.state.sweep_dir import SweepDir
from results.tables.store import read_attempts, write_ledger
from sweep.inspecting.findings import best_layouts, older, untried_points
from sweep.running import run_end
from tests.sweep.helpers import plan_of
from tests.sweep.inspecting.finished_rows import ended, layouts, ledger_row, planned, store
from workloads.spec.experiment import Experiment

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "results" / "s", {})


def cells_of(sweep: SweepDir) -> list[Any]:
    return best_layouts(read_attempts(sweep.path).to_pylist())


def test_a_clear_winner_is_named(sweep: SweepDir) -> None:
    fast, slow, _ = layouts(3)
    store(sweep, slow, 9000.0)
    store(sweep, fast, 10000.0)
    [cell] = cells_of(sweep)
    assert (cell.key.model, cell.key.world_size, cell.key.tp) == (fast.model.name, 8, None)
    assert [layout.rate for layout in cell.layouts] == [10000.0, 9000.0]
    assert cell.tied == 1


def test_what_noise_explains_is_a_tie(sweep: SweepDir) -> None:
    """Steps from 0.96 to 1.04 s: the range of five normal values is 2 z(4.625 / 5.25) = 2.36 standard deviations, so
    one is ln(1.04 / 0.96) / 2.36 = 3.4 %, and 1.645 x 3.4 % x sqrt(2) = 7.9 % cannot be told apart."""
    spread = {"step_time_min_s": 0.96, "step_time_max_s": 1.04}
    first, second, third = layouts(3)
    store(sweep, first, 10000.0, **spread)
    store(sweep, second, 9600.0, **spread)
    assert cells_of(sweep)[0].tied == 2
    store(sweep, third, 7000.0, **spread)
    assert cells_of(sweep)[0].tied == 2


def test_one_timed_step_says_nothing_of_the_noise(sweep: SweepDir) -> None:
    for number, experiment in enumerate(layouts(3)):
        store(sweep, experiment, 10000.0 - number, timed_steps=1, step_time_min_s=1.0, step_time_max_s=1.0)
    assert cells_of(sweep)[0].tied is None


def test_repeats_come_before_timed_steps(sweep: SweepDir) -> None:
    """Steps agree to 0.1 %, but runs of one layout with other seeds differ by 4 %: the layouts are a tie."""
    first, second, _ = layouts(3)
    for number, factor in enumerate((0.96, 1.0, 1.04, 0.97, 1.03)):
        store(sweep, first.replace(seed=number), 10000.0 * factor)
        store(sweep, second.replace(seed=number), 9800.0 * factor)
    [cell] = cells_of(sweep)
    assert [layout.runs for layout in cell.layouts] == [5, 5]
    assert cell.layouts[0].rate == pytest.approx(10000.0)
    assert cell.tied == 2


def test_wrong_losses_and_second_runs_of_a_point_do_not_rank(sweep: SweepDir) -> None:
    first, second, third = layouts(3)
    store(sweep, first, 20000.0, loss_agrees=False)
    store(sweep, second, 10000.0)
    store(sweep, third, 30000.0, repeat_of="another")
    [cell] = cells_of(sweep)
    assert [layout.rate for layout in cell.layouts] == [10000.0]


@pytest.mark.parametrize("odd", ["nope", "[1]", "[" * 5000, '{"model": 3}'])
def test_a_row_whose_configuration_cannot_be_read_does_not_rank(sweep: SweepDir, odd: str) -> None:
    good, other = layouts(2)
    store(sweep, good, 9_000)
    store(sweep, other, 10_000, config_json=odd)
    [cell] = cells_of(sweep)
    assert [layout.experiment for layout in cell.layouts] == [good]


def test_rows_of_older_engines_and_measurements_do_not_rank(sweep: SweepDir) -> None:
    """Version 10 is newer than 9, and a measurement counts before an engine."""
    first, second, third = layouts(3)
    store(sweep, first, 30000.0, engine_version="9")
    store(sweep, second, 10000.0, engine_version="10")
    store(sweep, third, 20000.0, engine_version="11", measurement_version=1)
    [cell] = cells_of(sweep)
    assert [(layout.experiment, layout.rate) for layout in cell.layouts] == [(second, 10000.0)]
    assert older(read_attempts(sweep.path).to_pylist()) == 2
    assert "2 finished runs with an older version of the engine or the measurement not ranked here" in ended(sweep, 200)


def test_engines_have_winners_of_their_own(sweep: SweepDir) -> None:
    """A version of one engine is neither newer nor older than one of another."""
    first, second, _ = layouts(3)
    store(sweep, first, 30000.0)
    store(sweep, second, 10000.0, engine="torchtitan", engine_version="0.2.2+2")
    winners = {cell.key.engine: cell.layouts[0].rate for cell in cells_of(sweep)}
    assert winners == {"ultrasweep": 30000.0, "torchtitan": 10000.0}
    assert older(read_attempts(sweep.path).to_pylist()) == 0
    assert "torchtitan" in ended(sweep, 200)


def test_rehearsals_that_took_over_their_stages_are_one_run(sweep: SweepDir) -> None:
    first, second, _ = layouts(3)
    steps = {"method": "rehearsed", "step_time_min_s": None, "step_time_max_s": None}
    for seed in range(6):
        store(sweep, first.replace(seed=seed), 10000.0, **steps)
    store(sweep, second, 9990.0, **steps)
    [cell] = cells_of(sweep)
    assert [layout.runs for layout in cell.layouts] == [1, 1]
    assert cell.tied is None


def test_rehearsed_layouts_are_ranked_within_one_tp(sweep: SweepDir) -> None:
    one = next(experiment for experiment in planned() if experiment.tp == 1)
    two = next(experiment for experiment in planned() if experiment.tp == 2)
    store(sweep, one, 9000.0, method="rehearsed")
    store(sweep, two, 12000.0, method="rehearsed")
    cells = cells_of(sweep)
    assert [(cell.key.tp, cell.layouts[0].rate) for cell in cells] == [(1, 9000.0), (2, 12000.0)]
    text = ended(sweep, width=80)
    assert (
        "fastest rehearsed" in text
        and "llama8b on 8 GPUs, tp 2" in text
        and "cannot rank different tp against each other" in text
    )


@cache
def routed() -> tuple[Experiment, Experiment, Experiment, Experiment]:
    """One layout of a model with experts: routing balanced, skewed and learned, then with a capacity."""
    points = plan_of(["+grid=moe_2gpu", "grid.axes.model=mixtral_8x7b_5_layers", "grid.axes.ep=2"]).points
    balanced = next(p.experiment for p in points if p.experiment.dp == 2 and p.experiment.routing == "balanced")
    learned = balanced.replace(routing="learned")
    skewed = balanced.replace(routing="skewed", routing_imbalance=2.0)
    return balanced, skewed, learned, learned.replace(capacity_factor=1.25)


def test_each_routing_is_ranked_for_itself(sweep: SweepDir) -> None:
    """Routing changes the work: a layout that is faster because its routing is forced to be even is not the better."""
    for number, experiment in enumerate(routed()):
        store(sweep, experiment, 10000.0 - 100 * number)
        store(sweep, experiment.replace(recompute="full"), 9000.0 - 100 * number)
    cells = cells_of(sweep)
    names = ["", "learned routing", "learned routing, capacity 1.25", "skewed 2×"]
    assert [cell.key.routing for cell in cells] == names
    assert [[layout.rate for layout in cell.layouts] for cell in cells] == [
        [10000.0, 9000.0],
        [9800.0, 8800.0],
        [9700.0, 8700.0],
        [9900.0, 8900.0],
    ]
    lines = [line.split("  ")[0] for line in ended(sweep, 120).splitlines() if " on 2 GPUs" in line]
    assert lines == [f"mixtral_8x7b_5_layers{f', {name}' if name else ''} on 2 GPUs" for name in names]


def test_the_imbalance_assumed_of_learned_routing_makes_no_cell(sweep: SweepDir) -> None:
    _, _, learned, _ = routed()
    store(sweep, learned, 10000.0)
    store(sweep, learned.replace(routing_imbalance=2.0, recompute="full"), 9000.0)
    [cell] = cells_of(sweep)
    assert len(cell.layouts) == 2


def test_what_to_try_next_is_told_from_runs_of_its_routing(sweep: SweepDir) -> None:
    """Balanced runs reach half of their predictions, learned ones a quarter."""
    balanced, _, learned, _ = routed()
    store(sweep, balanced, 10000.0)
    store(sweep, learned, 5000.0)
    untried = [experiment.replace(recompute="full") for experiment in (balanced, learned)]
    ledger = [
        *(ledger_row(number, experiment, "cached", 20000.0) for number, experiment in enumerate((balanced, learned))),
        *(ledger_row(number, experiment, "run", 22000.0) for number, experiment in enumerate(untried, 2)),
    ]
    write_ledger(sweep.path, ledger)
    rows = read_attempts(sweep.path).to_pylist()
    found = untried_points(ledger, rows, best_layouts(rows), "measured")
    assert [(point.experiment, point.rate, point.gain) for point in found] == [
        (untried[0], pytest.approx(11000.0), pytest.approx(0.1)),
        (untried[1], pytest.approx(5500.0), pytest.approx(0.1)),
    ]
    assert "mixtral_8x7b_5_layers, learned routing on 2, about 5,500 tokens/s each" in ended(sweep, 120)


def test_predictions_are_scaled_by_what_runs_reached(sweep: SweepDir) -> None:
    """Predicted 20,000 and measured 10,000: another one predicted at 22,000 should reach 11,000."""
    done, promising, hopeless = layouts(3)
    store(sweep, done, 10000.0)
    ledger = [
        ledger_row(0, done, "cached", 20000.0),
        ledger_row(1, hopeless, "over_budget", 15000.0),
        ledger_row(2, promising, "over_budget", 22000.0),
        ledger_row(3, promising.replace(zero_stage=3), "invalid", 90000.0),
    ]
    rows = read_attempts(sweep.path).to_pylist()
    [point] = untried_points(ledger, rows, best_layouts(rows), "measured")
    assert point.experiment == promising
    assert point.rate == pytest.approx(11000.0)
    assert point.gain == pytest.approx(0.1)
    elsewhere = ledger_row(4, promising.replace(seq_len=8192), "run", 8000.0)
    found = untried_points([*ledger, elsewhere], rows, best_layouts(rows), "measured")
    assert [one.gain for one in found] == [None, pytest.approx(0.1)]
    assert math.isclose(found[0].rate, 4000.0)


def test_a_run_ends_with_how_many_waited_for_the_host(sweep: SweepDir) -> None:
    for experiment, lead in zip(layouts(3), (0.0, 0.3, None), strict=True):
        store(sweep, experiment, 10000.0, step_time_s=1.0, host_lead_s=lead)
    assert "1 of 2 runs were host-bound (host_lead_s near 0)" in ended(sweep, 200)


def test_a_run_ends_with_how_many_used_sockets_between_nodes(sweep: SweepDir) -> None:
    seen = ((["a", "b"], ["NET/Socket", "P2P/CUMEM"]), (["a", "b"], ["NET/IB"]), (["a"], ["NET/Socket"]))
    for experiment, (nodes, transports) in zip(layouts(3), seen, strict=True):
        store(sweep, experiment, 10000.0, nodes=nodes, nccl_transports=transports)
    assert "in 1 of 2 runs over several nodes NCCL used sockets between them" in ended(sweep, 200)


def test_a_run_ends_with_how_many_stopped_to_free_memory(sweep: SweepDir) -> None:
    for experiment, retries in zip(layouts(3), (0, 12, None), strict=True):
        store(
            sweep, experiment, 10000.0, step_time_s=1.0, allocator_retries=retries, host_lead_s=0.0 if retries else 0.5
        )
    text = ended(sweep, 200)
    assert "in 1 of 2 runs memory was so full that the allocator had to free its cache" in text
    assert "waited for the host" not in text, "a device that is idle because the allocator stopped it"


@pytest.mark.parametrize("width", [80, 200])
def test_a_run_ends_with_the_fastest_and_what_to_try_next(sweep: SweepDir, width: int) -> None:
    done, second, promising = layouts(3)
    store(sweep, done, 10000.0)
    store(sweep, second, 9100.0)
    ledger = [ledger_row(0, done, "run", 20000.0), ledger_row(1, promising, "over_budget", 22000.0)]
    write_ledger(sweep.path, ledger)
    text = ended(sweep, width)
    lines = text.splitlines()
    for part in ("fastest measured", "GPUs", "tokens/s/GPU", "10,000", "60.0 GiB", "50.0 %", "9.0 %"):
        assert part in text, part
    assert "about 11,000 tokens/s each (+10% to the best)" in text
    assert "repeat the command with a budget of at least 0.5 device-hours: python -m sweep run +grid=g" in text
    assert lines[-1] == f"report: python -m analysis.report {sweep.path}"
    table = lines[[line.startswith("fastest") for line in lines].index(True) :][:4]
    assert all(len(line) <= width for line in table)
    assert len(lines) < 16


def test_a_tie_is_said_and_an_unknown_noise_too(sweep: SweepDir) -> None:
    first, second, third = layouts(3)
    spread = {"step_time_min_s": 0.96, "step_time_max_s": 1.04}
    store(sweep, first, 10000.0, **spread)
    store(sweep, second, 9900.0, **spread)
    text = ended(sweep, 120)
    assert "tie of 2" in text and "9,900" in text
    other = SweepDir.create(sweep.path.parent / "t", {})
    store(other, first, 10000.0, timed_steps=1)
    store(other, third, 9900.0, timed_steps=1)
    text = ended(other, 120)
    assert "1.0 % ?" in text and "?: run-to-run variation is unknown" in text


def test_a_sweep_that_uses_the_rows_of_another_says_where_they_are(sweep: SweepDir) -> None:
    done, second, _ = layouts(3)
    store(sweep, done, 10000.0)
    store(sweep, second, 9000.0)
    rows = {row["experiment_id"]: row["attempt_id"] for row in read_attempts(sweep.path).to_pylist()}
    again = SweepDir.create(sweep.path.parent / "again", {})
    cached = [
        {**ledger_row(number, one, "cached", 1.0), "cached_attempt": rows[one.id], "cached_sweep": "s"}
        for number, one in enumerate((done, second))
    ]
    write_ledger(again.path, cached)
    text = ended(again, 120, outcomes={}, attempts=0)
    assert f"the rows of 2 points are in {sweep.path}" in text
    assert "10,000" in text
    assert text.splitlines()[-1] == f"report: python -m analysis.report {again.path}"


def test_processes_are_not_gpus(sweep: SweepDir) -> None:
    store(sweep, layouts(1)[0], 900.0, backend="cpu", mfu_palm=None)
    text = ended(sweep, 80)
    assert "processes" in text and "tokens/s/process" in text and "GPU" not in text and "MFU" not in text


def test_rows_that_cannot_be_read_do_not_fail_the_run(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path) -> Any:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(run_end, "read_runs", broken)
    lines = ended(sweep, 120).splitlines()
    assert "cannot summarize the rows: " in lines[1] and "Input/output error" in lines[1]
    assert lines[-1] == f"report: python -m analysis.report {sweep.path}"
