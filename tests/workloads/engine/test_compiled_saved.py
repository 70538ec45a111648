"""What blocks that inductor compiles keep for their backward, beside those that it does not."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from tests.pool import Pool
from tests.workloads.engine.parity import compiled_by, experiment, train_rank
from workloads.spec.experiment import Experiment

TOKENS, HIDDEN, QKV, FFN = 16, 32, 48, 80
"""A rank has 8 of the tokens between tensor-parallel regions; QKV and FFN (gate and up) are of both ranks together."""


def saved_shapes(rank: int, case: Experiment, backend: str) -> Counter[tuple[int, ...]]:
    """Shapes of what a step saves for backward, each storage once, without parameters."""
    found: dict[int, tuple[int, ...]] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)
        return tensor

    with compiled_by(backend), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train_rank(rank, case, 1, "cpu")
    return Counter(found.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "backend", ["aot_eager_decomp_partition", pytest.param("inductor", marks=pytest.mark.exhaustive(seconds=18))]
)
def test_compiled_blocks_keep_the_inputs_that_they_have_gathered(gloo_pool: Pool, backend: str) -> None:
    """With what divides a block between forward and backward as inductor does, and with inductor itself.

    Of each block both normed inputs as gathered, where an eager block keeps this rank's part of them."""
    apart = {"gradient_accumulation_fusion": False}  # which compiled blocks have
    case = experiment(tp=2, micro_batch_size=4, rounds=1, **apart).replace(precision="bf16")
    model = dataclasses.replace(case.model, ffn_hidden_size=FFN, num_kv_heads=4)
    assert (case.micro_batch_size * case.seq_len, model.hidden_size) == (TOKENS, HIDDEN)
    counts = {}
    for kind in ("none", "block"):
        case = case.replace(model=model, compile=kind)
        counts[kind] = gloo_pool.run(saved_shapes, 2, case, backend, timeout_s=360)[0]
    part = (TOKENS // 2, HIDDEN)
    assert counts["none"][part] - counts["block"][part] == 2 * model.num_layers
    # Eager blocks keep rotated queries and keys in one tensor, which is as wide as the hidden size here.
    gathered = counts["block"][TOKENS, HIDDEN] - (counts["none"][TOKENS, HIDDEN] - model.num_layers)
    assert gathered == 2 * model.num_layers
