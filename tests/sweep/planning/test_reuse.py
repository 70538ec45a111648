"""Sweeps begun under ids that a new run would not get: the recorded ones of Mixtral, whose feed-forward size has no
effect, were stored with another one than new runs have."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from analysis.rows.canonical import with_canonical_models
from launchers.state.damaged import point_from_ledger
from launchers.state.sweep_dir import entry_names, key_of
from results.tables.store import read_attempts, read_ledger
from sweep.cards.card import read_cards, to_yaml
from sweep.cards.judge import judge
from sweep.cards.make import make_card
from sweep.composing.config import compose_sweep
from sweep.composing.machine import Machine
from sweep.inspecting.lookup import Results
from sweep.planning.assemble import plan_sweep
from sweep.planning.plan import Plan
from sweep.running.launch import launch_settings
from sweep.running.run import Prepared, Queued, enqueue
from workloads.spec.experiment import canonical_id, from_json, to_dict

RECORDED = Path(__file__).parents[3] / "results" / "recorded" / "h200x2_experts"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A results folder with the recorded sweep, as one of the user."""
    shutil.copytree(RECORDED, tmp_path / "begun")
    return tmp_path


def planned(results: Path, *overrides: str) -> Plan:
    eager = "+grid.axes.cuda_graph=none"  # as all steps were when these rows were recorded
    config = compose_sweep(["+grid=moe_2gpu", "launcher=local", eager, f"results_dir={results}", *overrides])
    return plan_sweep(config, "measured", None, 2)


def enqueued(plan: Plan) -> Queued:
    settings = launch_settings(plan.config, Machine(gpu_name="NVIDIA H200", num_gpus=2))
    return enqueue(Prepared(plan=plan, settings=settings, slurm=None, dry=False, notes=()))


def ids_of(results: Path) -> list[str]:
    return sorted(read_attempts(results / "begun")["experiment_id"].to_pylist())


def old_and_new(results: Path) -> dict[str, str]:
    """The ids that rows of Mixtral were recorded under, each with the one that a new run gets."""
    stored = map(from_json, set(read_attempts(results / "begun")["config_json"].to_pylist()))
    return {one.id: canonical_id(one) for one in stored if canonical_id(one) != one.id}


@pytest.mark.slow
def test_recorded_rows_count_under_old_and_new_ids(results: Path) -> None:
    renamed = old_and_new(results)
    assert len(renamed) == 3
    assert all(old.startswith("mixtral8x7b5layers-") for old in renamed)
    begun = planned(results, "name=begun")
    assert begun.counts == {"cached": 13}
    assert sorted(point.experiment.id for point in begun.points) == ids_of(results)
    fresh = planned(results, "name=fresh", "plan.reuse=true")
    assert fresh.counts == {"cached": 13}
    assert {renamed.get(id, id) for id in ids_of(results)} == {point.experiment.id for point in fresh.points}


@pytest.mark.slow
def test_a_half_finished_sweep_goes_on_under_the_ids_in_its_queue(results: Path) -> None:
    old = next(iter(old_and_new(results)))
    rows = pq.read_table(results / "begun" / "attempts.parquet")
    pq.write_table(rows.filter(pc.not_equal(rows["experiment_id"], old)), results / "begun" / "attempts.parquet")
    first = enqueued(planned(results, "name=begun"))
    assert (first.added, first.removed, first.foreign) == (1, 0, 0)
    (waiting,) = entry_names(first.sweep.todo)
    assert key_of(waiting) == old
    again = enqueued(planned(results, "name=begun"))
    assert (again.added, again.removed, again.foreign) == (0, 0, 0)
    assert entry_names(first.sweep.todo) == [waiting]
    assert sorted(read_ledger(first.sweep.path)["experiment_id"].to_pylist()) == sorted({old, *ids_of(results)})
    restored = point_from_ledger(first.sweep, waiting)
    assert restored is not None
    assert restored.key == old


def test_a_record_is_found_and_its_card_judged_under_both_ids(results: Path) -> None:
    old, new = next(iter(old_and_new(results).items()))
    record = Results(results).find(new)
    assert record.id == old == Results(results).find(old).id
    (results / "card.yaml").write_text(to_yaml([make_card(record)]))
    (card,) = read_cards(results / "card.yaml")
    assert card.experiment.id == card.id == old
    assert canonical_id(card.experiment) == new
    rows = with_canonical_models(read_attempts(results / "begun").to_pandas())
    (again,) = rows[rows["experiment_id"] == new].to_dict("records")
    assert json.loads(again["config_json"]) == to_dict(from_json(again["config_json"]))
    assert from_json(again["config_json"]).id == new
    assert not [reason for reason in judge(card, again).reasons if "configuration" in reason]
