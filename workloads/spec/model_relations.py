"""Relations between the fields of a model: when a user's model breaks them, and the sentence that says so. No torch
here.

A relation is data in the language of `workloads.spec.expressions`, over the fields of the model and of its parts by
their names. `workloads.spec.model_spec` checks the relations without which no `ModelSpec` exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workloads.spec.expressions import Expression, Template, parse, parse_template


@dataclass(frozen=True, slots=True)
class Relation:
    """One relation between fields of a model."""

    broken: Expression
    message: Template


def _relation(broken: str, message: str) -> Relation:
    return Relation(parse(broken, "model"), parse_template(message, "model"))


RELATIONS = (
    _relation(
        "not has_mla and head_dim % 2 and not (has_layers and head_dim == 1)",  # 1: no layer has attention
        "head_dim={head_dim} must be even, because the rotary embedding turns pairs of numbers; {head_dim + 1} would "
        "be",
    ),
    _relation(
        "has_mla and qk_rope_head_dim % 2",
        "mla: qk_rope_head_dim={qk_rope_head_dim} must be even, because the rotary embedding turns pairs of numbers; "
        "{qk_rope_head_dim + 1} would be",
    ),
    _relation(
        "has_moe and num_dense_layers >= num_layers",
        "moe: num_dense_layers={num_dense_layers} must be less than num_layers={num_layers}, or no layer has experts; "
        "use num_dense_layers of at most {num_layers - 1}, num_layers of at least {num_dense_layers + 1}, or leave moe "
        "out",
    ),
    _relation(
        "has_moe and balance != 'none' and balance_coefficient == 0",
        "moe: balance={balance} with balance_coefficient=0 balances nothing; use balance_coefficient=0.001, or "
        "balance=none",
    ),
    _relation(
        "has_moe and weight_scale == 0",
        "moe: weight_scale=0 takes every effect from the experts; it must be above 0, and 1.0 changes nothing",
    ),
)
"""The relations, each in the order in which its message is shown."""


def broken(names: Mapping[str, Any]) -> list[str]:
    """Sentences of the relations that a model breaks; empty if its fields fit together. ``names``: its fields and those
    of its parts by name, ``has_moe``, ``has_mla`` and ``has_layers``. Fields of an absent part are missing, and no
    relation reads them."""
    return [relation.message.fill(names) for relation in RELATIONS if relation.broken.evaluate(names)]
