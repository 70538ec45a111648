"""Why published rows stay off after a calibration: factors, pairs and what a calibration knows, by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from docs.tools.accuracy_limits_of_public import known_of, oracle, pairs
from docs.tools.accuracy_of_public import SAID, as_published
from workloads.predict.table import COLUMNS


def rows(left: list[float], model: str, gpu: str) -> pd.DataFrame:
    """A row for each letter of ``model`` and ``gpu``."""
    return pd.DataFrame({"left": left, "model": list(model), "gpu": list(gpu)}).assign(
        precision="bf16", routing="balanced"
    )


def test_an_oracle_of_models_and_devices_misses_what_they_do_not_share() -> None:
    """Models differ by 0.2, devices by 0.1; one row is 0.3 off by itself."""
    exact = rows([0.0, 0.1, 0.2, 0.3], "aabb", "xyxy")
    in_sight, held_out, count, factors = oracle(exact, ["model", "gpu"])
    assert (in_sight, held_out) == pytest.approx((0.0, 0.0), abs=1e-12) and (count, factors) == (4, 3)
    odd = rows([0.0, 0.1, 0.2, 0.6], "aabb", "xyxy")
    in_sight, held_out, _, _ = oracle(odd, ["model", "gpu"])
    assert (in_sight, held_out) == pytest.approx((0.3 / 4, 0.3))
    assert oracle(exact, [])[0] == pytest.approx(0.1), "around their mean, 0.15"


def test_a_row_whose_model_no_other_has_is_not_held_out() -> None:
    _, held_out, count, _ = oracle(rows([0.0, 0.1, 5.0], "aab", "xxx"), ["model"])
    assert held_out == pytest.approx(0.1) and count == 2
    assert np.isnan(oracle(rows([0.0, 0.1], "ab", "xx"), ["model"])[1])


def test_pairs_differ_in_one_column_alone() -> None:
    found = pairs(rows([0.0, 0.1, 0.3, 0.35], "aabb", "xyyy")).to_dict("records")
    assert [(one["column"], round(one["apart"], 6)) for one in found] == [
        ("device", 0.1), ("model", 0.2), ("model", 0.25), ("size of the job", 0.05),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [("c", "x", "no row of its model"), ("a", "y", "its model otherwise"), ("a", "x", "its model on its device")],
)
def test_what_a_calibration_knows_of_a_row(model: str, gpu: str, said: str) -> None:
    asked = {"model": model, "gpu": gpu, "precision": "bf16", "routing": "balanced"}
    assert known_of(asked, rows([0.0, 0.0], "ab", "xy")).startswith(said)


def test_what_a_source_says_beside_its_columns_is_told() -> None:
    """Of every source of which something is said one row, and one whose note says nothing."""
    named = [(source, model.partition(" in ")[0]) for source, model, _ in SAID]
    published = pd.DataFrame([*named, ("Megatron-LM", "another")], columns=["source", "model"]).assign(
        precision="bf16", note="", recompute="full", ep="1"
    )
    published.loc[published["model"] == "gpt3_7b", "note"] = "deterministic mode, no sequence parallel"
    found = as_published(published).set_index("model")
    columns = ["deterministic", "sequence_parallel", "gated_mlp", "gradient_accumulation_fusion"]
    assert found.loc["gpt3_7b", columns].tolist() == ["true", "false", "false", "false"]
    assert found.loc["another", columns].tolist() == ["", "", "", ""]
    assert set(columns) <= set(COLUMNS)
