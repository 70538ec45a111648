"""Modules of multi-token prediction in files of models: what they become, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.engine.kind_models import DENSE, attention, layer
from workloads.costs.shape.params import num_params
from workloads.costs.shape.partition import stage_layers
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.layer_list import MTP_LOSS_WEIGHT
from workloads.spec.model_layers import layers_of, with_modules
from workloads.spec.model_spec import ModelSpec, model_from_dict, model_to_dict

FIELDS: dict[str, Any] = {
    "name": "own",
    "num_layers": 6,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 96,
}
LIST: dict[str, Any] = {"name": "own", "hidden_size": 32, "vocab_size": 96}


def _model(**changes: Any) -> ModelSpec:
    return model_from_dict({**FIELDS, **changes})


def test_modules_are_the_last_layers_and_survive_a_file() -> None:
    model = _model(mtp_modules=2, mtp_loss_weight=0.3)
    assert (model.num_layers, model.mtp_modules, model.mtp_loss_weight) == (8, 2, 0.3)
    assert [layers_of(model).kinds[at].ahead for at in layers_of(model).order] == [False] * 6 + [True] * 2
    assert model_from_dict(model_to_dict(model)) == model
    assert layers_of(model).without_modules() == layers_of(_model())
    assert with_modules(_model(), 2, 0.3) == model


def test_without_modules_nothing_changes() -> None:
    assert _model(mtp_modules=0) == _model()
    assert "layers" not in model_to_dict(_model(mtp_modules=0))
    assert (_model().mtp_modules, _model().mtp_loss_weight) == (0, 0.0)


def test_the_usual_weight_is_in_no_id() -> None:
    model = _model(mtp_modules=1)
    assert model.mtp_loss_weight == MTP_LOSS_WEIGHT
    assert "mtp_loss_weight" not in model_to_dict(model)["layers"]


def test_a_module_is_a_layer_with_a_projection_and_three_norms() -> None:
    of_layer = num_params(_model(num_layers=7)) - num_params(_model())
    assert num_params(_model(mtp_modules=1)) - num_params(_model()) == of_layer + 2 * 32 * 32 + 3 * 32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**FIELDS, "mtp_loss_weight": 0.3}, "mtp_loss_weight=0.3 without mtp_modules has no effect"),
        ({**FIELDS, "mtp_modules": 1, "mtp_loss_weight": 0}, "mtp_loss_weight"),
        ({**FIELDS, "mtp_modules": -1}, "mtp_modules"),
        (
            {**LIST, "layers": {"kinds": [{**layer(attention()), "ahead": True}, layer(attention())], "order": [0, 1]}},
            "a layer after a module of multi-token prediction",
        ),
        (
            {**LIST, "layers": {"kinds": [{**layer(attention(), DENSE), "ahead": True}], "order": [0]}},
            "modules of multi-token prediction (ahead) alone",
        ),
        (
            {
                **LIST,
                "layers": {"kinds": [layer(attention()), {**layer(attention()), "ahead": True}], "order": [0, 1]},
                "mtp_modules": 1,
            },
            "leave one of them out",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidExperiment) as refused:
        model_from_dict(fields)
    assert message in str(refused.value)


@pytest.mark.parametrize("split", ["even", "ends_count", "balanced"])
@pytest.mark.parametrize(("stages", "modules"), [(2, 1), (4, 1), (4, 3), (6, 2), (7, 1)])
def test_all_modules_are_in_the_last_stage(split: Any, stages: int, modules: int) -> None:
    held = stage_layers(_model(mtp_modules=modules), "1f1b", stages, 1, split, 128)
    assert [layer for of_stage in held for layer in of_stage] == list(range(6 + modules))
    assert len(held[-1]) >= modules and all(held)
