"""Checks of what adapters give other engines: weights, and what balances experts. As those of
`tests.planted.checks`."""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch

from tests.planted.plant import Fault, planted, with_fault
from tests.pool import Pool
from tests.workloads.adapters import test_torchtitan_experts
from tests.workloads.adapters.three_steps import run, steps
from tests.workloads.engine.test_published_modules import check_losses_and_gradients
from workloads.adapters.mixtures.transformers_balance import Balance
from workloads.measuring.processes import on_ranks
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec, model_from_dict

_STEP = 0.25


def published_latents(pool: Pool, fault: Fault | None) -> None:
    """The classes of DeepSeek-V3 and V2 in transformers, with our weights in them, compute our losses and
    gradients."""
    for kind in ("deepseek_v3", "deepseek_v2"):
        with planted(fault):
            check_losses_and_gradients(pool, kind)


def torchtitan_latents(pool: Pool, fault: Fault | None) -> None:
    """Three steps of torchtitan's DeepSeek-V3 have our losses and norms of gradients. In processes of their own: the
    package asks for its device when it is imported."""
    for package in ("torchtitan", "spmd_types"):
        pytest.importorskip(package, exc_type=ImportError)
    (own,) = run(test_torchtitan_experts.of("ultrasweep", model=test_torchtitan_experts.V3))
    theirs = partial(steps, test_torchtitan_experts.of(model=test_torchtitan_experts.V3))
    (found,) = on_ranks(partial(with_fault, fault=fault, body=theirs), 1, "cpu", timeout_s=240)
    for theirs_then, ours_then in zip(found, own, strict=True):
        assert theirs_then == pytest.approx(ours_then, rel=1e-6)


def balanced_routers(pool: Pool, fault: Fault | None) -> None:
    """Biases of a router of transformers that sends everything to the experts it begins with move away from them, by
    the loads of all ranks."""
    pytest.importorskip("transformers")
    first, second = pool.run(with_fault, 2, fault, _biases)
    assert torch.equal(first, second)
    # Ranks choose experts {0, 1} and {1, 2} for every token: loads n, 2 n, n and 0, whose mean is n.
    assert first.tolist() == [0.0, -_STEP, 0.0, _STEP], first


def _biases(rank: int) -> torch.Tensor:
    """Those of one router after a step whose tokens are all alike."""
    moe = MoESpec(
        num_experts=4,
        experts_per_token=2,
        expert_hidden_size=8,
        num_shared_experts=1,
        gate="sigmoid",
        balance="bias",
        balance_coefficient=_STEP,
    )
    sizes = {"num_layers": 1, "hidden_size": 4, "num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "vocab_size": 8}
    model = model_from_dict({"name": "router", **sizes, "moe": {n: getattr(moe, n) for n in moe.__slots__}})
    e = Experiment.canonical(model=model, seq_len=8, global_batch_size=2, dp=2, routing="learned")
    modeling = importlib.import_module("transformers.models.deepseek_v3.modeling_deepseek_v3")
    configuration = importlib.import_module("transformers").DeepseekV3Config(
        hidden_size=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1
    )
    router = modeling.DeepseekV3TopkRouter(configuration)
    with torch.no_grad():  # the expert of this rank and the next have the largest scores
        router.weight.zero_()
        router.weight[rank : rank + 2] = 1.0
    balance = Balance(e, router)
    router(torch.ones(8, 4))
    balance.finish_step()
    return router.e_score_correction_bias.detach().clone()
