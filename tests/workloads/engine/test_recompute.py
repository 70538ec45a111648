"""Recomputation: what is made again is equal, what is expensive does not run twice, and memory falls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import partitioners
from torch._functorch.aot_autograd import make_boxed_func
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from tests.sampling import sampled
from tests.workloads.engine.parity import experiment, experts, mla
from workloads.costs.shape.flops import hardware_flops_per_token
from workloads.costs.shape.params import counted_tokens
from workloads.engine.collectives.communication import Axis
from workloads.engine.collectives.groups import make_groups
from workloads.engine.collectives.parameters import initialise
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.layers import experts as expert_layers
from workloads.engine.layers import latent_attention
from workloads.engine.layers.block import Block
from workloads.engine.layers.experts import Experts
from workloads.engine.layers.recompute import (
    CheckpointedBlock,
    FullBlock,
    RecomputeRegistry,
    SelectiveBlock,
    apply_recompute,
)
from workloads.engine.observing.memory import StorageTracker
from workloads.engine.ops.attention import attention_backward, attention_forward
from workloads.engine.ops.grouped_linear import RowGroups, grouped_product
from workloads.engine.training.build import build, shape_chunks
from workloads.measuring.step import _batches, run_step
from workloads.spec import weights
from workloads.spec.model_layers import layers_of
from workloads.spec.model_spec import ModelSpec
from workloads.spec.recomputation import Recompute, operations_of

pytestmark = pytest.mark.slow

MODEL = ModelSpec(
    name="block",
    num_layers=1,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden_size=64,
    vocab_size=64,
)
SINGLE = TensorParallel(Axis("tp", 1, 0, None), sequence_parallel=True)


class _TwoSizes(torch.autograd.Function):
    """Saves what kernels of GPUs save, which take values of their own size; those of a CPU save them padded."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.MATH]):
            o, lse, ctx.saved = attention_forward(q, k, v, causal=True)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attention_backward(grad, *ctx.saved_tensors, ctx.saved, causal=True)


def two_sizes(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    assert causal
    return _TwoSizes.apply(q, k, v)


LATENT = replace(MODEL, num_kv_heads=4, mla=mla(16))
KINDS = [kind for kind in get_args(Recompute) if not {"mla_up", "experts"} & {*kind.split("+")}]


def run(recompute: str, model: ModelSpec = MODEL) -> tuple[list[Tensor], int, int]:
    """(gradients, matmul FLOPs, bytes alive between forward and backward) of one block."""
    block = Block(0, model, 2, SINGLE).double()
    initialise(block, 0, {}, lambda spec: (1, 0))
    wrapped = apply_recompute(block, recompute, compiled=False)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.rand(2, 16, model.rope_dim // 2, generator=generator, dtype=torch.float64)
    tracker = StorageTracker()
    for there in (x, cos, sin, *block.parameters()):
        tracker.add(there.detach())
    before = tracker.current
    with FlopCounterMode(display=False) as flops, tracker:
        y = wrapped(x, cos, sin)
        held = tracker.current - before
        y.square().sum().backward()
    assert x.grad is not None
    gradients = [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]
    return gradients, flops.get_total_flops(), held


@pytest.mark.slow
@pytest.mark.parametrize("recompute", KINDS[1:])
def test_gradients_are_the_same_to_the_last_bit(recompute: str) -> None:
    plain, again = run("none")[0], run(recompute)[0]
    assert len(plain) == 7
    for expected, got in zip(plain, again, strict=True):
        assert torch.equal(expected, got)


@pytest.mark.slow
def test_selective_repeats_no_matmul_and_full_repeats_the_forward() -> None:
    none, selective, named, full = (run(recompute)[1] for recompute in ("none", "selective", "norm+rope", "full"))
    assert selective == named == none
    forward, down = none // 3, 2 * 32 * 64 * 32
    assert full == none + forward - down, "all but the last matmul, whose output nothing in backward needs"


@pytest.mark.slow
def test_each_step_of_recomputation_holds_less() -> None:
    none, selective, full = (run(recompute)[2] for recompute in ("none", "selective", "full"))
    tokens, width = 32, 8
    made_again = tokens * (2 * 32 + (4 + 2) * 8 + 64) * width  # two norms' outputs, rotated q and k, the product
    assert none - selective == made_again
    assert full == tokens * 32 * width, "nothing but the block's output"
    of = {"norm": tokens * 2 * 32 * width, "rope": tokens * (4 + 2) * 8 * width, "swiglu": tokens * 64 * width}
    for named in KINDS[1:-2]:
        assert none - run(named)[2] == sum(of[name] for name in named.split("+")), named


@pytest.mark.slow
@pytest.mark.parametrize("q_lora_rank", [16, 0])
def test_latent_attention_makes_heads_again_of_their_latents(q_lora_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "attention", two_sizes)
    model = replace(LATENT, mla=mla(q_lora_rank))
    shape, tokens, heads, width = mla(q_lora_rank), 32, 4, 8
    (plain, flops, held), full = run("none", model), run("full", model)
    q, k, v = heads * shape.qk_head_dim, heads * shape.qk_head_dim, heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    latents = q_lora_rank + shape.kv_lora_rank
    of = {
        "norm": 2 * 32 + latents,
        "rope": k - shape.qk_rope_head_dim,  # of the keys; the shared one stays
        "swiglu": 64,
        "mla_up": (q if q_lora_rank else 0) + v,
    }
    up = 2 * tokens * ((q_lora_rank * q if q_lora_rank else 0) + shape.kv_lora_rank * v)
    for kind in [kind for kind in get_args(Recompute)[1:-1] if "experts" not in kind]:
        gradients, total, kept = run(kind, model)
        assert all(torch.equal(expected, got) for expected, got in zip(plain, gradients, strict=True)), kind
        assert held - kept == tokens * width * sum(of[name] for name in operations_of(kind)), kind
        assert total - flops == (up if "mla_up" in kind else 0), kind
    assert all(torch.equal(expected, got) for expected, got in zip(plain, full[0], strict=True))


def run_experts(recompute: str) -> tuple[list[Tensor], int]:
    """(gradients, bytes alive between forward and backward) of routed experts; some of them get no row."""
    sizes = [5, 0, 11, 3, 0, 2, 7, 4]
    groups = RowGroups(torch.tensor(sizes).cumsum(0).int(), lambda: sizes)
    own = Experts(weights.experts(replace(MODEL, moe=experts()), "layers.0.experts"), {}).double()
    initialise(own, 0, {}, lambda spec: (1, 0))
    wrapped = SelectiveBlock(own, operations_of(recompute))
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(32, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    shares = torch.rand(32, generator=generator, dtype=torch.float64, requires_grad=True)
    tracker = StorageTracker()
    for there in (rows, shares, groups.ends_G, *own.parameters()):
        tracker.add(there.detach())
    before = tracker.current
    with tracker:
        y = wrapped(rows, shares, groups)
        held = tracker.current - before
        y.square().sum().backward()
    assert not wrapped.recomputations._by_storage
    gradients = [tensor.grad for tensor in (rows, shares, *own.parameters())]
    return [gradient for gradient in gradients if gradient is not None], held


def test_experts_make_again_what_lies_between_dispatch_and_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept are the received rows and their weights, which are there in any case: here nothing but the output."""
    products: list[int] = []

    def counted(x: Tensor, *args: Any) -> Tensor:
        products.append(len(x))
        return grouped_product(x, *args)

    monkeypatch.setattr(expert_layers, "grouped_product", counted)
    plain, held = run_experts("none")
    assert len(plain) == 4 and not products
    both, product, output = (32 * columns * 8 for columns in (2 * 24, 24, 32))
    assert held == output + both + product
    for kind, kept in (("swiglu", both), ("experts", 0), ("swiglu+experts", 0), ("selective+mla_up+experts", 0)):
        products.clear()
        gradients, left = run_experts(kind)
        assert all(torch.equal(expected, got) for expected, got in zip(plain, gradients, strict=True)), kind
        assert left == output + kept, kind
        assert products == ([32] if kept == 0 else []), f"{kind}: the first product, once"


def test_a_recipe_ends_with_its_tensor() -> None:
    """The next tensor may live at the same address; it must not be taken for the one that is gone."""
    recipes = RecomputeRegistry()
    source = torch.arange(6.0)
    made = source * 2
    recipes.register((made,), lambda: (source * 2,))
    view = made.view(2, 3).t()
    packed = recipes.pack(view)
    assert not isinstance(packed, Tensor)
    assert torch.equal(recipes.unpack(packed), view)
    assert torch.equal(recipes.unpack(packed), view)
    del made, view
    assert recipes._by_storage == {}
    other = torch.ones(6)
    assert recipes.pack(other) is other


@pytest.mark.parametrize("shares", [True, False])
def test_a_tensor_that_several_have_saved_is_made_once_if_they_keep_it(shares: bool) -> None:
    recipes = RecomputeRegistry(shares=shares)
    source, calls = torch.arange(6.0), list[int]()

    def again() -> tuple[Tensor, ...]:
        calls.append(1)
        return source * 2, source * 3

    made, other = source * 2, source * 3
    recipes.register((made, other), again)
    packed = [recipes.pack(made), recipes.pack(made.view(2, 3)), recipes.pack(other)]
    first, second, third = (recipes.unpack(one) for one in packed)
    assert (first.data_ptr() == second.data_ptr()) == shares
    assert torch.equal(first, made) and torch.equal(second, made.view(2, 3)) and torch.equal(third, other)
    assert len(calls) == (1 if shares else 2)
    (recomputation,) = {
        id(one.recomputation): one.recomputation for one in packed if not isinstance(one, Tensor)
    }.values()
    assert recomputation.outputs == {}, "nobody else will ask for them"


def test_a_compiled_block_is_recomputed_by_torch() -> None:
    block = Block(0, MODEL, 2, SINGLE)
    assert isinstance(apply_recompute(block, "selective", compiled=False), SelectiveBlock)
    assert not isinstance(apply_recompute(Block(0, MODEL, 2, SINGLE), "selective", compiled=True), SelectiveBlock)


@pytest.mark.parametrize(
    ("recompute", "again", "tp"),
    sampled(
        [(*of, tp) for of in (("none", 0), ("selective", 0), ("full", 3)) for tp in (1, 2)],
        3,
        kinds=lambda case: (case[0], case[2]),
    ),
)
def test_a_compiled_block_computes_its_products_again(tp: int, recompute: str, again: int) -> None:
    """Full recomputation makes all but the last of a block's four products again, on tensor-parallel ranks as well."""
    case = experiment(tp=tp, micro_batch_size=2, recompute=recompute).replace(precision="fp32")
    products: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        products.append(sum(node.target is torch.ops.aten.mm.default for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=count, bw_compiler=count, partition_fn=partitioners.min_cut_rematerialization_partition
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        groups = make_groups(case, 0, torch.device("cpu"))
        block = Block(0, case.model, 2, TensorParallel(groups.axes["tp"], sequence_parallel=tp > 1)).float()
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter)
        x = torch.randn(2 * case.seq_len // tp, case.model.hidden_size, requires_grad=True)
        cos, sin = torch.ones(2, case.seq_len, case.model.head_dim // 2)
        wrapped = apply_recompute(block, recompute, compiled=True)
        torch.compile(wrapped, backend=backend, fullgraph=True)(x, cos, sin).sum().backward()
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()
    assert products == [4, 8 + again]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        {"moe": experts(num_dense_layers=3, num_shared_experts=0), "recompute": "full", "recompute_every": 2},
        {"moe": experts(num_dense_layers=0), "recompute": "full"},
        {"moe": experts(num_dense_layers=2), "latent": 16, "recompute": "full"},
        {"moe": experts(num_dense_layers=2), "latent": 16, "recompute": "mla_up+experts"},
        {"recompute": "full", "recompute_every": 3},
    ],
    ids=str,
)
def test_hardware_flops_are_those_of_the_products_that_the_engine_computes(
    layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one token in the first step. Attention is left out on both sides, since its kernels count scores in their own
    ways."""
    monkeypatch.setattr(latent_attention, "attention", two_sizes)
    case = experiment(seq_len=4, global_batch_size=2, precision="fp32", gradient_accumulation_fusion=False, **layout)
    model = case.model
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        engine = build(case, make_groups(case, 0, torch.device("cpu")))
        with FlopCounterMode(display=False) as counter:
            run_step(engine, 0, _batches(engine, 0), is_warmup=False)
    finally:
        dist.destroy_process_group()
    by_operation = counter.get_flop_counts()["Global"]
    counted = sum(by_operation[op] for op in (torch.ops.aten.mm, torch.ops.aten.addmm) if op in by_operation)
    repeated = -(-model.num_layers // case.recompute_every) if case.recompute == "full" else 0
    scores = layers_of(model).kinds[0].mixing(counted_tokens(model, case.seq_len)).forward
    of_attention = (3 * model.num_layers + repeated) * scores
    assert counted / case.tokens_per_step == hardware_flops_per_token(case) - of_attention


@pytest.mark.parametrize(
    ("layout", "compiled"),
    [
        ({}, [True] * 5),
        ({"cp": 2, "cp_kind": "ulysses"}, [True] * 5),
        ({"cp": 2, "cp_kind": "ring"}, [False, True] * 2 + [False]),
        ({"cp": 2, "cp_kind": "allgather"}, [False, True] * 2 + [False]),
        ({"moe": experts()}, [True, True, False, True, False]),  # the first layer is dense
    ],
    ids=str,
)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_recomputes_and_breaks_the_graph_is_not_compiled(
    recompute: str, layout: dict[str, Any], compiled: list[bool]
) -> None:
    """Torch would compile nothing of it. Where it used what it had compiled of the other layers, the second forward
    could save another number of tensors than the first, and the run crashed (on CUDA, in the step that is counted)."""
    case = experiment(recompute=recompute, recompute_every=2, compile="block", **layout)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.world_size)
    try:
        (chunk,) = shape_chunks(case, make_groups(case, 0, torch.device("cpu")))
    finally:
        dist.destroy_process_group()
    assert [block._compiled_call_impl is not None for block in chunk.blocks] == compiled
    eager = FullBlock if recompute == "full" else SelectiveBlock
    for block, is_compiled in zip(list(chunk.blocks)[::2], compiled[::2], strict=True):
        assert isinstance(block, CheckpointedBlock if is_compiled else eager)


def test_every_third_layer_of_the_model_is_wrapped_on_whichever_stage_it_is() -> None:
    case = experiment(pp=2, pp_split="even", recompute="full", recompute_every=3)
    found = []
    for rank in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        try:
            (chunk,) = shape_chunks(case, make_groups(case, rank, torch.device("cpu")))
        finally:
            dist.destroy_process_group()
        found += [isinstance(block, FullBlock) for block in chunk.blocks]
    assert found == [layer % 3 == 0 for layer in range(case.model.num_layers)]
