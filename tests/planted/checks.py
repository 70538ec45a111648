"""Checks of what parity cannot see, each against something independent of the engine.

Each takes a pool of processes and a fault to plant in them (None: the engine as it is), and raises `AssertionError`
when the engine is wrong.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils._python_dispatch import TorchDispatchMode

from tests.planted.checks_of_adapters import balanced_routers as balanced_routers
from tests.planted.checks_of_adapters import published_latents as published_latents
from tests.planted.checks_of_adapters import torchtitan_latents as torchtitan_latents
from tests.planted.checks_of_budgets import budgets as budgets
from tests.planted.checks_of_budgets import hosts as hosts
from tests.planted.checks_of_budgets import stage_words as stage_words
from tests.planted.checks_of_choices import advice as advice
from tests.planted.checks_of_choices import searches as searches
from tests.planted.checks_of_documents import document_balance as document_balance
from tests.planted.checks_of_documents import document_positions as document_positions
from tests.planted.checks_of_hosts import late_activations as late_activations
from tests.planted.checks_of_hosts import late_copies as late_copies
from tests.planted.checks_of_hosts import share_of_host as share_of_host
from tests.planted.checks_of_pilots import pilots as pilots
from tests.planted.checks_of_precision import fp8_expert_gathers as fp8_expert_gathers
from tests.planted.checks_of_precision import fp8_experts as fp8_experts
from tests.planted.checks_of_precision import fp8_gathers as fp8_gathers
from tests.planted.checks_of_precision import fp8_products as fp8_products
from tests.planted.checks_of_precision import loss_scaling as loss_scaling
from tests.planted.checks_of_precision import loss_scaling_of_experts as loss_scaling_of_experts
from tests.planted.checks_of_precision import skipped_steps as skipped_steps
from tests.planted.checks_of_precision import stochastic_rounding as stochastic_rounding
from tests.planted.checks_of_queues import feeds as feeds
from tests.planted.checks_of_times import network_tiers as network_tiers
from tests.planted.checks_of_times import step_times as step_times
from tests.planted.plant import Fault, planted, with_fault
from tests.pool import Pool
from tests.workloads.engine import parity
from tests.workloads.engine.parity import experiment, experts, model
from workloads.contract.measure_spec import MeasureSpec
from workloads.engine.collectives.groups import make_groups
from workloads.engine.collectives.parameters import local_shard
from workloads.engine.layers.transformer import routers
from workloads.engine.training import data
from workloads.engine.training.balance import finish_routing
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring.step import Measurements, _batches, measure
from workloads.parity.shards import shards_of
from workloads.parity.training import RankTrace
from workloads.spec.experiment import Experiment

CPU = torch.device("cpu")
DELAY_S = 0.3


def built(rank: int, case: Experiment) -> Engine:
    choose_attention(case)
    return build(case, make_groups(case, rank, CPU))


def updates(pool: Pool, fault: Fault | None) -> None:
    """Clipped AdamW updates are those of `torch.nn.utils.clip_grad_norm_` and `torch.optim.AdamW`, also far above the
    largest norm, where an update must not depend on how far."""
    for scale in (1.0, 1000.0):
        case = experiment(dp=2, zero_stage=1, micro_batch_size=4)
        parity.check(pool, case, body=partial(_train_with_fault, fault=fault), gradient_scale=scale)


def _train_with_fault(rank: int, *args: Any, fault: Fault | None) -> RankTrace:
    with planted(fault):
        return parity.train_rank(rank, *args)


def targets(pool: Pool, fault: Fault | None) -> None:
    """Each target is the token after its own, and all ranks together see every sequence once, in order."""
    case = experiment(dp=2, micro_batch_size=2)
    right, data._sequence = data._sequence, _counted
    try:
        with planted(fault):
            ranks = [data.step_batches(case, 0, rank, CPU) for rank in range(2)]
    finally:
        data._sequence = right
    sequences = []
    for microbatch in range(case.num_microbatches):
        for rank in range(2):
            tokens, after = (part.view(2, case.seq_len) for part in ranks[rank][microbatch])
            assert torch.equal(after, tokens + 1)
            assert torch.equal(tokens[:, 1:], after[:, :-1])
            sequences += (tokens[:, 0] // 1000).tolist()
    assert sequences == list(range(case.global_batch_size))


def _counted(case: Experiment, step: int, index: int) -> Tensor:
    """Not random: sequence 3 is 3000, 3001, 3002 ..."""
    return 1000 * index + torch.arange(case.seq_len + 1)


def initial_weights(pool: Pool, fault: Fault | None) -> None:
    """Normal with 0.02, with 0.02 / sqrt(2 L) into the residual stream (GPT-2); norms are 1; nothing is drawn twice."""
    case = Experiment.canonical(
        model=model(num_layers=4, hidden_size=128, head_dim=32, ffn_hidden_size=256, vocab_size=512, qk_norm=True),
        precision="fp32",
        global_batch_size=1,
        seq_len=8,
    )
    (parts,) = pool.run(with_fault, 1, fault, _draw, case)
    assert len(parts) == 4 * 11 + 3
    for name, values in parts.items():
        kind = name.split(".")[-1]
        if "norm" in kind:
            assert values.eq(1).all(), name
            continue
        std = 0.02 / math.sqrt(2 * 4) if kind in ("o", "down") else 0.02
        assert abs(values.std().item() / std - 1) < 0.03, f"{name}: {values.std().item()} is not {std}"
        assert abs(values.mean().item()) < 0.05 * std, name
    drawn = Counter(values.flatten()[0].item() for name, values in parts.items() if "norm" not in name)
    assert max(drawn.values()) == 1, "two parameters have the same random numbers"


def _draw(rank: int, case: Experiment) -> dict[str, Tensor]:
    parts = {}
    for named in built(rank, case).optimizer.parameters:
        pieces = local_shard(named.current).split([part.shape[0] for part in named.spec.parts])
        parts |= {part.name: piece.clone() for part, piece in zip(named.spec.parts, pieces, strict=True)}
    return parts


def seeds(pool: Pool, fault: Fault | None) -> None:
    """Every drawn weight and the tokens are others with another seed, and the same with the same one. No two experts,
    steps or sequences are alike."""
    one, again, other = (pool.run(with_fault, 1, fault, _seeded, seed)[0] for seed in (1, 1, 2))
    for name, values in one.items():
        assert torch.equal(values, again[name]), f"{name} is drawn anew"
        if "norm" not in name:
            assert not torch.equal(values, other[name]), f"{name} is the same with another seed"
            assert len(values.unique(dim=0)) == len(values), f"rows of {name} are alike"


def _seeded(rank: int, seed: int) -> dict[str, Tensor]:
    engine = built(rank, experiment(moe=experts(), micro_batch_size=8, seed=seed))
    held = {named.spec.parts[0].name: local_shard(named.current).clone() for named in engine.optimizer.parameters}
    tokens = [_batches(engine, step)[0][0].view(8, -1) for step in range(2)]
    return {**held, "tokens": torch.cat(tokens)}


def marks(pool: Pool, fault: Fault | None) -> None:
    """What takes time in a step is in its time, and in the part that it belongs to."""
    parts = {"forward": "forward_backward_s", "reduction": "reduce_exposed_s", "optimizer": "optimizer_s"}
    for place, column in parts.items():
        (measured,) = pool.run(with_fault, 1, fault, _measure_slowed, place)
        for step in measured.steps:
            spent = {name: getattr(step, name) for name in parts.values()}
            assert step.step_time_s >= DELAY_S, f"{place} takes {DELAY_S} s, the step {step.step_time_s}"
            assert spent[column] >= DELAY_S, (place, spent)
            assert sum(spent.values()) <= step.step_time_s * (1 + 1e-9)
        if place == "reduction":
            assert measured.backward_s < DELAY_S, "the wait for the reduction is counted in the backward, too"


def _measure_slowed(rank: int, place: str) -> Measurements:
    engine = built(rank, experiment(micro_batch_size=8))

    def late(function: Any, *args: Any) -> Any:
        time.sleep(DELAY_S)
        return function(*args)

    finish = FSDPState._root_post_backward_final_callback
    if place == "forward":
        engine.chunks[0].between_blocks = partial(late, lambda x: x)
    elif place == "optimizer":
        engine.optimizer.step = partial(late, engine.optimizer.step)  # type: ignore[method-assign]
    else:
        FSDPState._root_post_backward_final_callback = lambda state: late(finish, state)
    try:
        return measure(engine, MeasureSpec(warmup_steps=1, timed_steps=1))
    finally:
        FSDPState._root_post_backward_final_callback = finish


def reduction_precision(pool: Pool, fault: Fault | None) -> None:
    """In bf16 runs gradients of ranks and of micro-batches are added in fp32: to the last bit, where there are two.
    With ``grad_reduce=bf16`` they are added in bf16, except shards of ZeRO 2 and 3 over micro-batches.

    Products that add to sums do not round what is wanted here; tests of their own compare them."""
    rounding = {"precision": "bf16", "global_batch_size": 2, "gradient_accumulation_fusion": False}
    case = experiment(**rounding)
    (parts,) = pool.run(_separate_gradients, 1, case)
    wanted = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    assert any(not torch.equal(total, total.bfloat16().float()) for total in wanted.values()), "bf16 would be as good"
    for layout in ({}, {"dp": 2}, {"dp": 2, "zero_stage": 1}, {"dp": 2, "zero_stage": 2}, {"dp": 2, "zero_stage": 3}):
        layout_case = experiment(**rounding, **layout)
        traces = pool.run(with_fault, layout_case.world_size, fault, parity.train_rank, layout_case, 1)
        got = parity.whole(layout_case, [trace.steps[0].gradients for trace in traces])
        assert got.keys() == wanted.keys()
        for name, gradient in got.items():
            assert torch.equal(gradient, wanted[name]), f"{layout_case.id}: {name} is rounded"
        narrow = layout_case.replace(grad_reduce="bf16")
        traces = pool.run(with_fault, narrow.world_size, fault, parity.train_rank, narrow, 1)
        for name, gradient in parity.whole(narrow, [trace.steps[0].gradients for trace in traces]).items():
            assert torch.equal(gradient, wanted[name].bfloat16().float()), f"{narrow.id}: {name} is not in bf16"


def _separate_gradients(rank: int, case: Experiment) -> list[dict[str, Tensor]]:
    """Of each micro-batch of two alone, without the other: what has to be added up."""
    gradients = []
    for own in data.step_batches(case, 0, 0, CPU):
        alone = built(rank, case.replace(global_batch_size=1))
        head = alone.chunks[0].head
        assert head is not None
        head.scales = [scale / 2 for scale in head.scales]  # the mean is over both
        alone.pipeline.run([own])
        gradients.append(parity.whole(case, [shards_of(alone, lambda named: named.gradient)]))
    return gradients


def loads(pool: Pool, fault: Fault | None) -> None:
    """Each layer counts every copy once, and the balance term once, whatever a backward computes again."""
    moe = experts(balance="aux_loss", balance_coefficient=0.5)
    terms = {}
    for kind, compiled in (("none", "none"), ("experts", "none"), ("full", "none"), ("selective", "block")):
        case = experiment(moe=moe, dp=2, ep=2, routing="learned", micro_batch_size=2, recompute=kind, compile=compiled)
        counted = pool.run(with_fault, 2, fault, _count_loads, case)
        copies = case.tokens_per_step // case.dp * moe.experts_per_token
        assert [copied for copied, _ in counted] == [[copies] * (case.model.num_layers - 1)] * 2, kind
        terms[kind] = [term for _, term in counted]
    assert terms["none"] == terms["experts"] == terms["full"] and min(map(min, terms["none"])) > 0
    for found, compiled_too in zip(terms["none"], terms["selective"], strict=True):
        assert all(map(math.isclose, found, compiled_too))


def _count_loads(rank: int, case: Experiment) -> tuple[list[int], list[float]]:
    """Of a step and of each layer with routed experts: (copies, balance term)."""
    with parity.compiled_by("aot_eager_decomp_partition"):
        engine = built(rank, case)
        engine.pipeline.run(_batches(engine, 0))
    finish_routing(engine.chunks, engine.groups)
    found = [router for chunk in engine.chunks for router in routers(chunk)]
    return [int(router.total.sum()) for router in found], [router.balance_loss.item() for router in found]


def traffic(pool: Pool, fault: Fault | None) -> None:
    """How often each block's weights are gathered and its gradients reduced in a step, by ZeRO stage: the table on top
    of `workloads.engine.training.data_parallel`."""
    layers, rounds = experiment().model.num_layers, 4
    wanted = {
        (0, True): {"allreduce_coalesced_": layers},
        (1, True): {"_allgather_base_": layers, "reduce_scatter_tensor_coalesced_": layers},
        (1, False): {"_allgather_base_": layers, "_reduce_scatter_base_": layers},
        (2, False): {"_allgather_base_": layers, "_reduce_scatter_base_": layers * rounds},
        (3, False): {"_allgather_base_": 2 * layers * rounds, "_reduce_scatter_base_": layers * rounds},
    }
    for (zero_stage, fused), expected in wanted.items():
        case = experiment(dp=2, zero_stage=zero_stage, micro_batch_size=1, gradient_accumulation_fusion=fused)
        assert case.num_microbatches == rounds
        counted = pool.run(with_fault, 2, fault, _count_messages, case)
        assert counted == [expected, expected], f"ZeRO {zero_stage}: {counted}"


def _count_messages(rank: int, case: Experiment) -> dict[str, int]:
    """Collectives of one step whose message is one block, by name."""
    engine = built(rank, case)
    engine.pipeline.run(_batches(engine, 0))
    engine.optimizer.step(torch.ones(()))
    block = sum(_elements(p) for p in engine.optimizer.parameters if _layer(p) == "0")
    with Traffic(block) as seen:
        engine.pipeline.run(_batches(engine, 1))
    return dict(seen.count)


def _layer(named: Any) -> str | None:
    words = named.spec.parts[0].name.split(".")
    return words[1] if words[0] == "layers" else None


def _elements(named: Any) -> int:
    return sum(math.prod(part.shape) for part in named.spec.parts)


class Traffic(TorchDispatchMode):
    """Counts collectives whose larger side has ``elements`` elements."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sides = (torch.utils._pytree.tree_leaves(arg) for arg in args)
            if max(sum(leaf.numel() for leaf in side if isinstance(leaf, Tensor)) for side in sides) == self.elements:
                self.count[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))
