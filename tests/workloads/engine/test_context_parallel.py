"""Context-parallel attention: every rank's part of the output and gradients is that of attention on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.pool import Pool
from tests.workloads.engine.attention_checks import inputs, relative_error, textbook_gradients
from workloads.engine.collectives import context_parallel
from workloads.engine.collectives.communication import Axis
from workloads.engine.collectives.context_parallel import context_attention, local_positions
from workloads.spec.experiment_values import ContextKind

pytestmark = pytest.mark.slow

KINDS: tuple[ContextKind, ...] = ("ring", "allgather", "ulysses")
HALF, SIZE = 5, 8
"""Tokens in one of the 2 cp parts of a sequence, and in a head."""
CASES = [(kind, cp, heads, kv) for kind in KINDS for cp in (2, 3, 4) for heads, kv in ((cp, cp), (3 * cp, cp))]
CASES += [(kind, cp, 4, 1) for kind in ("ring", "allgather") for cp in (2, 3, 4)]


# Positions


def test_positions_by_hand() -> None:
    of = lambda kind, cp, rank: local_positions(12, cp, rank, kind).tolist()  # noqa: E731
    for kind in ("ring", "allgather"):
        assert of(kind, 2, 0) == [0, 1, 2, 9, 10, 11]
        assert of(kind, 2, 1) == [3, 4, 5, 6, 7, 8]
        assert of(kind, 3, 1) == [2, 3, 8, 9]
    assert of("ulysses", 2, 0) == [0, 1, 2, 3, 4, 5]
    assert of("ulysses", 3, 2) == [8, 9, 10, 11]


@pytest.mark.parametrize("kind", KINDS)
def test_every_position_is_held_once_and_work_is_balanced(kind: ContextKind) -> None:
    for cp in (1, 2, 3, 5, 8):
        ranks = [local_positions(16 * cp, cp, rank, kind) for rank in range(cp)]
        assert sorted(torch.cat(ranks).tolist()) == list(range(16 * cp))
        scores = {int((positions + 1).sum()) for positions in ranks}
        assert kind == "ulysses" or len(scores) == 1, "a query at position i has i + 1 scores"


# Values


def world_axis(rank: int) -> Axis:
    return Axis("cp", dist.get_world_size(), rank, dist.group.WORLD)


def run_rank(
    rank: int,
    kind: ContextKind,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    run: Callable[..., Tensor] = context_attention,
    axis: Axis | None = None,
) -> dict[str, float]:
    """Relative errors of one rank's output and gradients; ``shape`` is (B, N, K, whole sequence, H)."""
    cp = axis or world_axis(rank)
    whole = inputs(shape, dtype, device)
    expected = textbook_gradients(*whole, causal=True)
    positions = local_positions(shape[3], cp.size, cp.rank, kind)
    # As the model has them: tokens outermost, heads inside.
    own = [x.transpose(1, 2)[:, positions].contiguous().transpose(1, 2) for x in whole]
    q, k, v = (x.detach().requires_grad_() for x in own[:3])
    o = run(q, k, v, cp, kind)
    gradients = torch.autograd.grad(o, (q, k, v), own[3])
    actual = {"o": o.detach(), "dq": gradients[0], "dk": gradients[1], "dv": gradients[2]}
    wanted = dict(zip(("o", "dq", "dk", "dv"), (expected[0], *expected[2:]), strict=True))
    assert all(x.dtype == dtype for x in actual.values())
    return {name: relative_error(x, wanted[name][:, :, positions]) for name, x in actual.items()}


def check(errors: list[dict[str, float]], tolerance: float = 1e-12) -> None:
    assert max(max(of_rank.values()) for of_rank in errors) <= tolerance, errors


def run_cases(rank: int, cases: list[tuple[ContextKind, int, int]], only_math: bool) -> list[dict[str, float]]:
    """Several cases, one after the other in one group: (kind, heads, key heads)."""
    tokens = 2 * HALF * dist.get_world_size()
    switches = [SDPBackend.MATH] if only_math else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(switches):
        return [
            run_rank(rank, kind, (2, heads, kv, tokens, SIZE, of_value))
            for kind, heads, kv in cases
            for of_value in (SIZE, SIZE - 3)
        ]


@pytest.mark.parametrize("only_math", [False, True], ids=["kernel", "math"])
@pytest.mark.parametrize("cp", [2, *(pytest.param(cp, marks=pytest.mark.slow) for cp in (3, 4))])
def test_attention_of_one_process(gloo_pool: Pool, cp: int, only_math: bool) -> None:
    cases = [(kind, heads, kv) for kind, of_cp, heads, kv in CASES if of_cp == cp]
    ranks = gloo_pool.run(run_cases, cp, cases, only_math)
    sizes = [(*case, of_value) for case in cases for of_value in ("equal", "smaller")]
    for case, errors in zip(sizes, zip(*ranks, strict=True), strict=True):
        assert max(max(of_rank.values()) for of_rank in errors) <= 1e-12, (case, errors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_near(gloo_pool: Pool, kind: ContextKind) -> None:
    """As near as one kernel in bf16: outputs of blocks and gradients are added in fp32."""
    check(gloo_pool.run(run_rank, 4, kind, (1, 8, 4, 256, 16), torch.bfloat16), 3e-2)


def with_sums_in(rank: int, kind: ContextKind, dtypes: list[torch.dtype]) -> bool:
    """Whether output and gradients in bf16 have the same bits whatever sums are kept in."""
    cp, right, results = world_axis(rank), context_parallel._sum_dtype, []
    for dtype in dtypes:
        context_parallel._sum_dtype = lambda _, cp, dtype=dtype: dtype  # type: ignore[misc]
        own = [x[:, :, local_positions(96, cp.size, rank, kind)] for x in inputs((1, 4, 2, 96, 16), torch.bfloat16)]
        q, k, v = (x.requires_grad_() for x in own[:3])
        o = context_attention(q, k, v, cp, kind)
        results.append([o, *torch.autograd.grad(o, (q, k, v), own[3])])
    context_parallel._sum_dtype = right
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "allgather"])
def test_sums_of_two_terms_are_rounded_once(gloo_pool: Pool, kind: ContextKind) -> None:
    """And so need no fp32; sums of three do."""
    dtypes = [torch.bfloat16, torch.float32]
    assert gloo_pool.run(with_sums_in, 2, kind, dtypes) == [True, True]
    assert gloo_pool.run(with_sums_in, 3, kind, dtypes) != [True, True, True]
    assert [context_parallel._sum_dtype(torch.bfloat16, Axis("cp", cp, 0, None)) for cp in (2, 3)] == dtypes


def test_one_rank_is_plain_attention() -> None:
    axis = Axis("cp", 1, 0, None)
    for kind in KINDS:
        check([run_rank(0, kind, (2, 4, 2, 12, SIZE), axis=axis)])


def in_subgroups(rank: int, kind: ContextKind) -> dict[str, float]:
    """Ranks 0 and 2 are one group, 1 and 3 another."""
    groups = [dist.new_group(members) for members in ([0, 2], [1, 3])]
    return run_rank(rank, kind, (1, 4, 2, 20, SIZE), axis=Axis("cp", 2, rank // 2, groups[rank % 2]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_groups_beside_each_other(gloo_pool: Pool, kind: ContextKind) -> None:
    check(gloo_pool.run(in_subgroups, 4, kind))


def checkpointed(q: Tensor, k: Tensor, v: Tensor, cp: Axis, kind: ContextKind) -> Tensor:
    return checkpoint(partial(context_attention, cp=cp, kind=kind), q, k, v, use_reentrant=False)


def two_layers(
    q: Tensor, k: Tensor, v: Tensor, cp: Axis, kind: ContextKind, *, attend: Callable[..., Tensor]
) -> Tensor:
    """The second layer's queries are the first one's output, and its gradient goes back through both."""
    return attend(attend(q, k, v, cp, kind), k, v, cp, kind)


def recomputed(rank: int, kind: ContextKind) -> bool:
    cp = world_axis(rank)
    results = []
    for attend in (context_attention, checkpointed):
        own = [x[:, :, local_positions(18, 3, rank, kind)] for x in inputs((2, 6, 3, 18, SIZE))]
        q, k, v = (x.requires_grad_() for x in own[:3])
        o = two_layers(q, k, v, cp, kind, attend=attend)
        results.append([o, *torch.autograd.grad(o, (q, k, v), own[3])])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_gradients_are_the_same(gloo_pool: Pool, kind: ContextKind) -> None:
    assert gloo_pool.run(recomputed, 3, kind) == [True] * 3


def test_ulysses_needs_heads_for_every_rank() -> None:
    """The rules of the layout refuse it before, with the numbers."""
    q, k, v, _ = inputs((1, 4, 3, 20, SIZE))
    with pytest.raises(AssertionError, match="heads over 2 ranks"):
        context_attention(q, k, v, Axis("cp", 2, 0, None), "ulysses")


def scaled(q: Tensor, k: Tensor, v: Tensor, cp: Axis, kind: ContextKind) -> Tensor:
    return 3 * context_attention(2 * q, 2 * k, v, cp, kind)


def scaled_and_checkpointed(q: Tensor, k: Tensor, v: Tensor, cp: Axis, kind: ContextKind) -> Tensor:
    return checkpoint(partial(scaled, cp=cp, kind=kind), q, k, v, use_reentrant=False, preserve_rng_state=False)


def compiled(rank: int, kind: ContextKind) -> list[float]:
    """Largest differences between compiled and eager, of output and gradients, without and with recomputation."""
    cp = world_axis(rank)
    differences = []
    for plain in (scaled, scaled_and_checkpointed):
        torch._dynamo.reset()
        results = []
        for run in (plain, torch.compile(plain, backend="aot_eager", fullgraph=kind == "ulysses")):
            own = [x[:, :, local_positions(20, 2, rank, kind)] for x in inputs((2, 4, 2, 20, SIZE))]
            q, k, v = (x.requires_grad_() for x in own[:3])
            o = run(q, k, v, cp, kind)
            results.append([o, *torch.autograd.grad(o, (q, k, v), own[3])])
        differences += [relative_error(a, b) for a, b in zip(*results, strict=True)]
    return differences


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled(gloo_pool: Pool, kind: ContextKind) -> None:
    """Ulysses in one graph; the others, which choose kernels by what they are given, with a break in it."""
    for differences in gloo_pool.run(compiled, 2, kind):
        assert max(differences) <= 1e-13


# GPU


def on_gpus(rank: int, kind: ContextKind, backend: int, dtype: torch.dtype) -> dict[str, float]:
    with sdpa_kernel(SDPBackend(backend)):
        return run_rank(rank, kind, (1, 8, 4, 1024, 64), dtype, "cuda")


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], ids=lambda b: b.name)
def test_two_gpus(nccl_pool: Pool, kind: ContextKind, backend: Any) -> None:
    check(nccl_pool.run(on_gpus, 2, kind, backend.value, torch.bfloat16), 3e-2)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_two_gpus_in_fp64(nccl_pool: Pool, kind: ContextKind) -> None:
    check(nccl_pool.run(on_gpus, 2, kind, SDPBackend.MATH.value, torch.float64))
