"""Packed documents: every layout computes what each document computes alone, padded, in float64.

The reference (`tests.workloads.engine.reference`) has a row for each document and the model of whole sequences; only
the documents' own tokens count. It knows nothing of masks, of positions that begin again, or of who has which sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.sampling import sampled
from tests.workloads.engine.parity import check, experiment, experts, train_compiled_rank, train_rank
from workloads.engine.ops.backend import Backend
from workloads.parity.training import RankTrace
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.slow

DOCUMENTS = "lognormal mean=5 sigma=0.9 seed=3"
GREEDY: dict[str, Any] = {"documents": DOCUMENTS, "document_balance": "greedy"}
IN_ORDER: dict[str, Any] = {"documents": DOCUMENTS}
GATHER: dict[str, Any] = {"cp": 2, "cp_kind": "allgather"}

CASES = [
    experiment(**IN_ORDER),
    experiment(**IN_ORDER, micro_batch_size=4, tie=True),
    experiment(**IN_ORDER, qk_norm=True, num_kv_heads=4),
    *(experiment(**GREEDY, dp=2, zero_stage=zero) for zero in range(4)),
    experiment(**GREEDY, dp_replicate=2, dp_shard=2, zero_stage=3, micro_batch_size=1),
    experiment(**IN_ORDER, dp=4, zero_stage=1, micro_batch_size=1),
    experiment(**GREEDY, tp=2),
    experiment(**GREEDY, tp=2, sequence_parallel=False, recompute="full"),
    *(
        experiment(**GREEDY, recompute=kind, micro_batch_size=2)
        for kind in ("norm", "rope", "swiglu", "selective", "full")
    ),
    experiment(**GREEDY, **GATHER),
    experiment(**GREEDY, **GATHER, zero_stage=3, recompute="selective"),
    experiment(**IN_ORDER, cp=4, cp_kind="allgather", zero_stage=1, recompute="full"),
    experiment(**GREEDY, **GATHER, dp=2, tp=2, zero_stage=2, micro_batch_size=2),
    *(experiment(**GREEDY, pp=2, pp_schedule=schedule, micro_batch_size=2) for schedule in ("gpipe", "1f1b")),
    experiment(**GREEDY, pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, micro_batch_size=1, recompute="full"),
    experiment(**GREEDY, pp=2, pp_schedule="zero_bubble_v", virtual_stages=2, micro_batch_size=1, tie=True),
    experiment(**GREEDY, pp=2, dp=2, zero_stage=1, micro_batch_size=1, recompute="selective"),
    experiment(**GREEDY, pp=2, **GATHER, micro_batch_size=2),
    experiment(**IN_ORDER, **GATHER, micro_batch_size=2),
    experiment(**GREEDY, cp=4, cp_kind="allgather", num_kv_heads=4, micro_batch_size=2, recompute="selective"),
    experiment(**GREEDY, cp=2, cp_kind="ulysses", micro_batch_size=2),
    experiment(**GREEDY, cp=4, cp_kind="ulysses", num_kv_heads=4, dp=2, zero_stage=3, recompute="full"),
    experiment(**IN_ORDER, cp=2, cp_kind="ulysses", pp=2, micro_batch_size=1),
    experiment(**GREEDY, latent=16, cp=2, cp_kind="ulysses"),
    experiment(**GREEDY, dp=2, ep=2, zero_stage=1, moe=experts()),
    experiment(**GREEDY, **GATHER, ep=2, zero_stage=2, moe=experts()),
    experiment(**GREEDY, latent=16, micro_batch_size=2),
    experiment(**GREEDY, latent=0, dp=2, zero_stage=2, recompute="selective"),
    experiment(**GREEDY, latent=16, tp=2, recompute="norm+mla_up"),
    experiment(**GREEDY, latent=16, **GATHER),
    # Modules of multi-token prediction: none predicts a token of the next document.
    *(experiment(**GREEDY, modules=modules, micro_batch_size=2) for modules in (1, 3)),
    experiment(**GREEDY, modules=2, dp=2, zero_stage=3, recompute="full", qk_norm=True),
    experiment(**GREEDY, modules=2, tp=2, recompute="selective"),
    experiment(**IN_ORDER, modules=2, pp=2, pp_schedule="interleaved_1f1b", virtual_stages=2, micro_batch_size=1),
    experiment(**GREEDY, modules=1, pp=2, pp_schedule="1f1b", tie=True, micro_batch_size=2),
    experiment(**GREEDY, modules=2, **GATHER, zero_stage=1),
    experiment(**GREEDY, modules=1, cp=2, cp_kind="ulysses", micro_batch_size=2, recompute="rope"),
    experiment(**GREEDY, modules=1, latent=16, tp=2),
    experiment(**GREEDY, modules=1, dp=2, ep=2, zero_stage=1, moe=experts()),
]


def kinds_of(case: Experiment) -> list[str]:
    return [name for name in ("dp", "tp", "pp", "cp", "ep") if getattr(case, name) > 1]


@pytest.mark.parametrize("case", sampled(CASES, 6, kinds=kinds_of), ids=lambda case: case.id)
def test_packed_documents_compute_what_each_computes_alone(case: Experiment, gloo_pool: Pool) -> None:
    """What every rank sends is that of the closed form, too."""
    check(gloo_pool, case, counts=True)


COMPILED = [
    experiment(**GREEDY, compile="block", micro_batch_size=2),
    experiment(**GREEDY, compile="block", **GATHER, dp=2, zero_stage=2, micro_batch_size=1),
    experiment(**GREEDY, compile="block", cp=2, cp_kind="ulysses", micro_batch_size=2),
    experiment(
        **GREEDY, compile="block", latent=16, tp=2, micro_batch_size=2, recompute="selective", recompute_every=2
    ),
]


@pytest.mark.parametrize("case", sampled(COMPILED, 2), ids=lambda case: case.id)
def test_compiled_blocks(case: Experiment, gloo_pool: Pool) -> None:
    """Blocks are traced and differentiated ahead of time on both sides of attention, which is compiled by itself."""
    check(gloo_pool, case, body=train_compiled_rank)


FLEX = [
    experiment(**GREEDY, micro_batch_size=2, recompute="selective"),
    experiment(**GREEDY, **GATHER, micro_batch_size=2),
    experiment(**GREEDY, **GATHER, dp=2, zero_stage=3, micro_batch_size=2, recompute="full"),
    experiment(**GREEDY, **GATHER, tp=2, micro_batch_size=2, recompute="selective"),
    experiment(**GREEDY, cp=2, cp_kind="ulysses", micro_batch_size=2, recompute="full"),
    experiment(**GREEDY, **GATHER, latent=16, micro_batch_size=2, recompute="mla_up+rope"),
    experiment(**GREEDY, **GATHER, pp=2, micro_batch_size=2, pp_schedule="zero_bubble_v", virtual_stages=2),
]


@pytest.mark.parametrize("case", sampled(FLEX, 3), ids=lambda case: case.id)
def test_through_flex_attention(case: Experiment, gloo_pool: Pool) -> None:
    """As on a GPU: with masks by block, and backwards that are given what their graph has not kept. FlexAttention is
    compiled without Inductor, which materialises all scores."""
    check(gloo_pool, case, body=train_flex_rank)


def train_flex_rank(rank: int, *args: Any) -> RankTrace:
    from torch.nn.attention import flex_attention as torchs

    from workloads.engine.kind_ops import document_attention, flex_attention

    compiled = torch.compile(torchs.flex_attention, dynamic=False, fullgraph=True, backend="aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_attention, "backend_of", lambda *tensors: Backend.TRITON)
        patch.setattr(flex_attention, "_function", lambda device: compiled)
        patch.setattr(torchs, "_validate_device", lambda *tensors: None)  # no backward on CPUs
        try:
            return train_rank(rank, *args)
        finally:
            torch._dynamo.reset()
