"""Partitions of layers over pipeline stages."""

from __future__ import annotations

import pytest

from workloads.predict.stages import RULES, _alike, split, with_ends


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize(("layers", "pp"), [(16, 1), (16, 2), (28, 8), (32, 16), (126, 64), (7, 7)])
@pytest.mark.parametrize("head", [0.0, 0.7, 4.0])
def test_every_layer_is_on_one_stage(rule: str, layers: int, pp: int, head: float) -> None:
    held = split(rule, layers, pp, head)
    assert len(held) == pp
    assert sum(held) == layers
    assert min(held) >= (0 if rule == "greedy" else 1)


def test_greedy_stages_overshoot() -> None:
    """16 layers and a head of four: half of 20 is 10, at which the stage is full; an eighth is 2.5, which needs 3."""
    assert split("greedy", 16, 2, 4.0) == (10, 6)
    assert split("greedy", 16, 4, 4.0) == (5, 5, 5, 1)
    assert split("greedy", 16, 8, 4.0) == (3, 2, 3, 2, 3, 2, 1, 0)
    assert split("greedy", 32, 4, 2.5) == (9, 9, 8, 6)
    assert split("equal", 16, 2, 4.0) == (8, 8)
    assert split("balanced", 16, 2, 4.0) == (10, 6)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_stages_that_hold_as_much_are_one_column(rule: str) -> None:
    held = split(rule, 126, 64, 2.5)
    columns = _alike(held)
    assert len(columns) <= 5 and columns[0][2] and [last for _, last, *_ in columns].count(True) == 1
    assert sum(count for *_, count, _ in columns) == 64
    assert sum(layers * count for layers, _, _, count, _ in columns) == 126
    assert all(held[stage] == layers for layers, *_, stage in columns)


def test_ends_count_as_layers() -> None:
    """126 layers, an embedding and a loss are 128 chunks of one, or 16 stages of eight."""
    assert with_ends(126, 16, 8) == with_ends(126, 16, 1) == (7, *[8] * 14, 7)
    assert with_ends(126, 127, 1) == (1,) * 126 + (0,)
    assert sum(with_ends(61, 16, 2)) == 61
