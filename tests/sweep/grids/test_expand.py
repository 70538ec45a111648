"""Grid expansion: combinations, derived values, filters, subsampling, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.grids import walk
from sweep.grids.axes import FRACTIONAL
from sweep.grids.expand import Expansion, expand, expand_all
from sweep.grids.grid import grid_from_dict
from tests.fixed_task import fixed_tasks
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

MODELS = {
    name: ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=256,
        num_heads=8,
        num_kv_heads=8,
        head_dim=32,
        ffn_hidden_size=512,
        vocab_size=1024,
    )
    for name, layers in (("small", 4), ("deep", 32))
}


def grid(name: str = "g", **sections: Any) -> Expansion:
    fields = {**sections, "axes": {"model": "small", "global_batch_size": 64, **sections.get("axes", {})}}
    return expand(grid_from_dict(name, fields), MODELS.__getitem__)


def layouts(expansion: Expansion, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(point.experiment, name) for name in names) for point in expansion.points]


def test_axes_are_combined_in_their_order() -> None:
    expansion = grid(axes={"tp": [1, 2], "micro_batch_size": [1, 4]})
    assert layouts(expansion, "tp", "micro_batch_size") == [(1, 1), (1, 4), (2, 1), (2, 4)]


def test_a_message_repeats_only_the_beginning_of_what_was_written() -> None:
    rows = [{"tp": 1, "pp": 1}] * 40
    with pytest.raises(InvalidSweep, match="lists of one length, not ") as told:
        grid_from_dict("long", {"axes": {"model": "llama8b"}, "zip": {"rows": rows}})
    assert len(str(told.value)) < 200


def test_zipped_axes_move_together() -> None:
    expansion = grid(axes={"tp": [1, 2]}, zip={"speed": {"precision": ["bf16", "fp32"], "compile": ["block", "none"]}})
    told = layouts(expansion, "tp", "precision", "compile")
    assert told == [(1, "bf16", "block"), (1, "fp32", "none"), (2, "bf16", "block"), (2, "fp32", "none")]


def test_every_layout_multiplies_to_its_world_size() -> None:
    sections: dict[str, Any] = {
        "axes": {"nodes": [1, 2, 6], "tp": [1, 2, 3, 4], "pp": [1, 2, 3], "cp": [1, 2], "global_batch_size": 144},
        "derive": {"world_size": "8 * nodes", "dp": "world_size / (tp * pp * cp)"},
    }
    expansion = grid(**sections)
    by_size = {8: 0, 16: 0, 48: 0}
    for point in expansion.points:
        by_size[point.experiment.world_size] += 1
    # 8: tp in {1,2,4} x pp in {1,2} x cp in {1,2} = 12, but 4*2*2 is too many. 16: those 12. 48 = 16*3: all 24 but
    # tp=3 with pp=3 (twice, for cp).
    assert by_size == {8: 11, 16: 12, 48: 22}


def test_derived_values_must_be_whole_and_positive() -> None:
    expansion = grid(
        axes={"tp": [1, 2, 3, 4, 8, 16], "world_size": 8, "micro_batch_size": [1, 16]},
        derive={"dp": "world_size / tp", "num_microbatches": "global_batch_size / (dp * micro_batch_size)"},
    )
    # tp 3 and 16 leave fractions; tp 1 with micro-batch 16 needs 128 sequences of the 64.
    assert layouts(expansion, "dp", "tp", "micro_batch_size") == [
        (8, 1, 1),
        (4, 2, 1),
        (4, 2, 16),
        (2, 4, 1),
        (2, 4, 16),
        (1, 8, 1),
        (1, 8, 16),
    ]


def test_derived_shares_and_ratios_may_be_fractions() -> None:
    expansion = grid(axes={"micro_batch_size": [1, 2, 4]}, derive={"optimizer_offload": "1 / micro_batch_size"})
    assert layouts(expansion, "micro_batch_size", "optimizer_offload") == [(1, 1.0), (2, 0.5), (4, 0.25)]
    assert not sum(expansion.dropped.values())
    assert {"optimizer_offload", "capacity_factor", "routing_imbalance", "memory_budget"} == FRACTIONAL


def test_derived_values_are_found_in_any_order() -> None:
    expansion = grid(axes={"tp": 2, "nodes": 1}, derive={"dp": "world_size / tp", "world_size": "8 * nodes"})
    assert layouts(expansion, "dp", "tp") == [(4, 2)]
    with pytest.raises(InvalidSweep, match="dp, tp cannot be derived, because each depends on another"):
        grid(axes={"pp": 1}, derive={"dp": "8 / tp", "tp": "8 / dp"})


def test_filters_see_the_models_shape() -> None:
    expansion = grid(axes={"model": ["small", "deep"], "pp": [1, 4, 8]}, where={"layers": "pp <= num_layers"})
    told = [(point.experiment.model.name, point.experiment.pp) for point in expansion.points]
    assert told == [("small", 1), ("small", 4), ("deep", 1), ("deep", 4), ("deep", 8)]


def test_spellings_of_one_run_are_one_point() -> None:
    expansion = grid(axes={"zero_stage": [0, 1, 2, 3], "dp": [1, 2], "pp_schedule": ["gpipe", "1f1b"]})
    # dp=1: four ZeRO stages and two schedules are one run; dp=2, pp=1: the schedule has no effect.
    assert len(expansion.points) == 1 + 4
    assert expansion.duplicates == 16 - 5
    assert len({point.experiment.id for point in expansion.points}) == 5


def test_replicas_and_shards_may_be_derived_from_dp() -> None:
    expansion = grid(
        axes={"zero_stage": [0, 3], "world_size": 8, "replicas": [1, 2]},
        derive={
            "dp": "world_size",
            "dp_replicate": "dp if zero_stage == 0 else replicas",
            "dp_shard": "dp / dp_replicate",
        },
    )
    assert layouts(expansion, "zero_stage", "dp_replicate", "dp_shard") == [(0, 8, 1), (3, 1, 8), (3, 2, 4)]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"axes": {"dp_replicate": 1, "dp_shard": 1, "dp": 8}},
            r"dp=8, but dp_replicate=1 and dp_shard=1 make 1; give dp_replicate=8 \(ZeRO 0\) or dp_shard=8",
        ),
        ({"axes": {"dp_shard": 2}, "derive": {"dp": "4"}}, "dp=4, but dp_replicate=1 and dp_shard=2 make 2"),
        ({"axes": {"dp_shard": 2, "world_size": 4}}, "world_size=4, but .* has 2; derive the other degrees"),
    ],
)
def test_a_field_beside_others_that_contradict_it_is_not_dropped(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSweep, match=message):
        grid(**sections)


def test_an_axis_without_effect_in_any_point_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    grid(axes={"pp": 1, "pp_schedule": "gpipe", "zero_stage": [0, 3], "cp_kind": ["ring", "ulysses"], "tp": [1, 2]})
    assert [record.getMessage() for record in caplog.records] == [
        "grid g: pp_schedule=gpipe has no effect in any point; the points have pp_schedule=none"
    ]


def test_null_is_as_usual_and_has_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    expansion = grid(axes={"gradient_accumulation_fusion": None, "micro_batch_size": 1, "global_batch_size": 4})
    assert [point.experiment.gradient_accumulation_fusion for point in expansion.points] == [True]
    assert not caplog.records


def test_another_spelling_of_written_stages_has_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    grid(axes={"pp": [1, 2], "pp_stages": "E(t)*8|ttL"})
    assert caplog.records == []


def test_a_subsample_is_seeded_and_a_part_of_the_whole() -> None:
    axes = {"tp": [1, 2, 4, 8], "micro_batch_size": list(range(1, 51))}
    whole = grid(axes=axes)
    first, again = (grid(axes=axes, subsample={"count": 30, "seed": 7}) for _ in range(2))
    other = grid(axes=axes, subsample={"count": 30, "seed": 8})
    assert first.points == again.points
    assert first.points != other.points
    assert len(first.points) == 30
    assert first.not_sampled == 170
    positions = [whole.points.index(point) for point in first.points]
    assert positions == sorted(positions)


def test_a_subsample_counts_runs_not_spellings() -> None:
    expansion = grid(axes={"zero_stage": [0, 1, 2, 3], "dp": 1, "tp": [1, 2, 4]}, subsample={"count": 3})
    assert len({point.experiment for point in expansion.points}) == 3


def test_grids_share_no_run() -> None:
    grids = [
        grid_from_dict(name, {"axes": {"model": "small", "global_batch_size": 8, "tp": tps}})
        for name, tps in (("a", [1, 2]), ("b", [2, 4]))
    ]
    expansion = expand_all(grids, MODELS.__getitem__)
    assert [(point.grid, point.experiment.tp) for point in expansion.points] == [("a", 1), ("a", 2), ("b", 4)]
    assert expansion.duplicates == 1


def test_a_world_size_without_a_layout_is_an_error_with_what_works() -> None:
    sections: dict[str, Any] = {"axes": {"tp": [4, 6], "world_size": [8, 7]}, "derive": {"dp": "world_size / tp"}}
    with pytest.raises(
        InvalidSweep, match=r"no layout divides world_size=7: dp = world_size / tp .*tp in \[4, 6\]"
    ) as error:
        grid(**sections)
    assert "world_size=6 or 8 works" in str(error.value)


def test_a_world_size_that_only_filters_leave_out_is_no_error() -> None:
    expansion = grid(
        axes={"tp": [1, 2], "world_size": [2, 3]},
        derive={"dp": "world_size / tp"},
        where={"even": "world_size % 2 == 0"},
    )
    assert {point.experiment.world_size for point in expansion.points} == {2}


@pytest.mark.slow(seconds=3)
def test_a_hundred_thousand_points_in_a_few_seconds() -> None:
    def expanded() -> None:
        expansion = grid(
            axes={
                "tp": [1, 2, 4, 8],
                "pp": [1, 2, 4, 8],
                "micro_batch_size": list(range(1, 51)),
                "seed": list(range(125)),
                "world_size": 512,
                "global_batch_size": 512 * 50,
            },
            derive={"dp": "world_size / (tp * pp)"},
            where={"small": "tp * pp <= 64"},
        )
        assert len(expansion.points) == 100_000
        assert isinstance(expansion.points[0].experiment, Experiment)

    assert fixed_tasks(expanded, times=1) < 90  # 27 on idle cores


def test_every_combination_is_accounted_for() -> None:
    expansion = grid(
        axes={"tp": [1, 2, 3, 4, 8, 16], "world_size": 8, "micro_batch_size": [1, 16], "zero_stage": [0, 1]},
        derive={"dp": "world_size / tp", "num_microbatches": "global_batch_size / (dp * micro_batch_size)"},
        where={"small": "tp <= 4"},
    )
    assert expansion.combinations == 6 * 2 * 2
    # tp 8 and 16 are filtered and tp 3 leaves a fraction, for 4 combinations each; tp 1 with micro-batches of 16 leaves
    # a fraction for both ZeRO stages.
    assert expansion.dropped == {"derive.dp": 4, "where.small": 8, "derive.num_microbatches": 2}
    assert len(expansion.points) + expansion.duplicates + sum(expansion.dropped.values()) == expansion.combinations


def test_a_derived_value_that_is_no_count_may_be_0() -> None:
    expansion = grid(
        axes={"dp": [1, 2, 4], "micro_batch_size": 1},
        derive={"zero_stage": "0 if dp < 4 else 3", "left": "dp % 2"},
        where={"even_or_one": "left == 0 or dp == 1"},
    )
    assert layouts(expansion, "dp", "zero_stage") == [(1, 0), (2, 0), (4, 3)]
    assert sum(expansion.dropped.values()) == 0


def test_conditions_see_fields_that_are_no_axes() -> None:
    expansion = grid(axes={"dp": [1, 2, 4]}, where={"many": "num_microbatches >= 32 and seq_len == 4096"})
    assert layouts(expansion, "dp") == [(1,), (2,)]
    assert expansion.dropped["where.many"] == 1


def test_a_subsample_is_drawn_from_what_the_conditions_leave() -> None:
    expansion = grid(
        axes={"micro_batch_size": [1, 2, 4, 8, 16, 32]}, where={"many": "num_microbatches >= 8"}, subsample={"count": 3}
    )
    assert len(expansion.points) == 3
    assert all(point.experiment.num_microbatches >= 8 for point in expansion.points)


def test_one_more_condition_is_named_as_it_was_typed() -> None:
    fields = {"axes": {"model": "small", "global_batch_size": 8, "tp": [1, 2]}}
    with pytest.raises(InvalidSweep, match=r"combinations; ruled out by --where 'tp > 2': 2$") as told:
        expand(grid_from_dict("g", fields, ["tp > 2"]), MODELS.__getitem__)
    assert "where.--where" not in str(told.value)


def test_a_text_that_yaml_reads_as_a_number_is_a_name() -> None:
    fields = {"axes": {"model": 8, "global_batch_size": 8, "engine_version": 7}}
    expansion = expand(grid_from_dict("g", fields), {"8": MODELS["small"]}.__getitem__)
    assert expansion.points[0].experiment.engine_version == "7"


def test_the_message_of_an_impossible_size_names_every_derived_value_that_rules_it_out() -> None:
    sections: dict[str, Any] = {
        "axes": {"tp": [2, 3], "world_size": [8], "micro_batch_size": 48},
        "derive": {"dp": "world_size / tp", "num_microbatches": "global_batch_size / (dp * micro_batch_size)"},
    }
    with pytest.raises(InvalidSweep) as told:
        grid(**sections)
    message = str(told.value)
    assert "no point has world_size=8: " in message
    assert "dp = world_size / tp is no whole number in 1 combination" in message
    assert (
        "num_microbatches = global_batch_size / (dp * micro_batch_size) is no whole number in 1 combination" in message
    )


def test_a_long_search_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "_PROGRESS_EVERY_S", 0.0)
    told: list[tuple[str, int, int]] = []
    axes = {"model": "small", "global_batch_size": 64, "tp": [1, 2], "pp": [1, 2], "seed": list(range(3000))}
    spec = grid_from_dict("g", {"axes": axes, "where": {"few": "seed < 2"}})
    expand(spec, MODELS.__getitem__, lambda what, done, total: told.append((what, done, total)))
    assert ("combinations", 3000, 12_000) in told
    assert {what for what, _, _ in told} == {"combinations", "points checked"}
    assert all(done <= total for _, done, total in told)


def test_a_grid_may_have_more_axes_than_python_nests_loops() -> None:
    names = [f"x{n}" for n in range(40)]
    expansion = grid(
        axes={**{name: [0, 1] for name in names}, "tp": [1, 2]},
        derive={"all": " + ".join(names)},
        where={**{name: f"{name} == {n % 2}" for n, name in enumerate(names)}, "half": "all == 20"},
    )
    assert layouts(expansion, "tp") == [(1,), (2,)]
    assert expansion.combinations == 2**41 == 2 + sum(expansion.dropped.values())


def test_combinations_are_cheap() -> None:
    """Of a million combinations that are all dropped at the last axis, each costs less than a microsecond or two."""
    axes = {"seed": list(range(1000)), "x": list(range(1000))}

    def dropped() -> None:
        with pytest.raises(InvalidSweep, match=r"of 1,000,000 combinations; ruled out by where\.none: 1,000,000"):
            grid(axes=axes, where={"none": "x + seed < 0"})

    assert fixed_tasks(dropped, times=2) < 5  # 1.0 on idle cores; 9 when each expression was a tree of calls
