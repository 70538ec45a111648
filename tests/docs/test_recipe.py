"""What training curves are trained with."""

from __future__ import annotations

from typing import Any

import pytest

from docs.tools.curves.recipe import FINAL_SHARE, TrainingRecipe
from workloads.spec.errors import InvalidExperiment


def test_the_rate_rises_in_a_line_and_falls_in_half_a_cosine() -> None:
    recipe = TrainingRecipe(learning_rate=1e-2, warmup_steps=10, steps=111)
    assert [recipe.rate(step) for step in (0, 4, 9)] == pytest.approx([1e-3, 5e-3, 1e-2])
    assert recipe.rate(10) == pytest.approx(1e-2)
    assert recipe.rate(60) == pytest.approx(0.55e-2)  # half way between all and a tenth
    assert recipe.rate(110) == recipe.rate(500) == pytest.approx(FINAL_SHARE * 1e-2)
    rates = [recipe.rate(step) for step in range(111)]
    assert rates[:10] == sorted(rates[:10]) and rates[10:] == sorted(rates[10:], reverse=True)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (2, 1), (3, 3)])
def test_a_short_run_has_a_rate_at_every_step(steps: int, warmup_steps: int) -> None:
    recipe = TrainingRecipe(learning_rate=1.0, warmup_steps=warmup_steps, steps=steps)
    assert all(0 < recipe.rate(step) <= 1.0 for step in range(steps))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be a number above 0"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must be a whole number of at least 0"),
        ({"data": "texts"}, "did you mean 'text'"),
    ],
)
def test_mistakes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment, match=message):
        TrainingRecipe(**fields)
