"""What an optimizer cannot be combined with is refused by name, with what would work; all else is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.engine.parity import experiment, experts
from workloads.rules.layout_rules import lacking, layout_violations

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "muon", "precision": "fp16"}, "optimizer=muon with precision=fp16"),
    ({"optimizer": "sgd", "precision": "fp16"}, "bf16 works"),
    (
        {"optimizer": "adafactor", "precision": "bf16", "master_weights": "bf16"},
        "with optimizer=adafactor (fp32 works)",
    ),
    ({"optimizer": "muon", "optimizer_offload": 0.5}, "with optimizer=muon (those of adamw can be on the host"),
    ({"optimizer": "muon", "layers": "mamba"}, "with the recurrent layers of parity_mamba"),
    ({"optimizer": "adafactor", "layers": "mamba"}, "adamw and sgd work"),
]


@pytest.mark.parametrize(("fields", "said"), REFUSED, ids=str)
def test_what_is_not_built_is_refused_by_name(fields: dict[str, Any], said: str) -> None:
    e = experiment(micro_batch_size=2, **fields)
    assert not layout_violations(e)
    assert any(said in message for message in lacking(e)), lacking(e)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "muon", "tp": 4, "num_kv_heads": 4},
        {"optimizer": "muon", "latent": 16, "tp": 4},
        {"optimizer": "muon", "precision": "bf16", "dp": 2, "ep": 2, "zero_stage": 3, "moe": experts()},
        {"optimizer": "muon", "cuda_graph": "step"},
        {"optimizer": "sgd", "layers": "mamba"},
        {"optimizer": "adamw", "precision": "fp16"},
    ],
    ids=str,
)
def test_other_layouts_are_allowed(fields: dict[str, Any]) -> None:
    e = experiment(micro_batch_size=2, **fields)
    assert not layout_violations(e) and not lacking(e)
