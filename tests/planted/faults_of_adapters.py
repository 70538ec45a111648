"""Faults of adapters: our weights in another engine's parameters, and what balances its experts."""

from __future__ import annotations

from tests.planted.faults import faults_of
from tests.planted.plant import Fault

_WEIGHTS, _BALANCE = (
    "workloads.adapters.published_weights:",
    "workloads.adapters.mixtures.transformers_balance:Balance.",
)

ADAPTERS: list[Fault] = [
    *faults_of(
        "adapters",
        (
            "latent_rows_in_halves",
            "rotated rows of a latent projection stay in halves",
            _WEIGHTS + "last_in_pairs",
            ".transpose(1, 2)",
            "",
            {},
        ),
        (
            "latent_rows_of_one_head",
            "rows of queries are rotated as those of one head",
            _WEIGHTS + "_joined",
            'heads = 1 if short == "self_attn.kv_a_proj_with_mqa.weight" else m.num_heads',
            "heads = 1",
            {},
        ),
        check="published_latents",
    ),
    *faults_of(
        "adapters",
        (
            "torchtitan_rows_of_one_head",
            "rows of queries are rotated as those of one head",
            "workloads.adapters.mixtures.torchtitan_weights:value_of",
            'heads = 1 if short == "attention.wkv_a.weight" else mixer.heads',
            "heads = 1",
            {},
        ),
        (
            "torchtitan_weights_unscaled",
            "weights of experts have no factor",
            "workloads.adapters.mixtures.torchtitan03_experts:_experts",
            "route_scale=moe.weight_scale",
            "route_scale=1.0",
            {},
        ),
        check="torchtitan_latents",
    ),
    *faults_of(
        "adapters",
        (
            "biases_towards_the_load",
            "biases of the choice of experts move towards the load",
            _BALANCE + "finish_step",
            "(loads.mean(1, keepdim=True) - loads)",
            "(loads - loads.mean(1, keepdim=True))",
            {},
        ),
        (
            "biases_of_own_tokens",
            "biases move by a rank's own tokens",
            _BALANCE + "finish_step",
            "dist.all_reduce(loads)",
            "pass",
            {},
        ),
        check="balanced_routers",
    ),
]
