"""Operations of routed experts against plain torch in fp64: on the CPU and on a GPU; forced choices and dispatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tests.workloads.engine.kind_op_checks import row_groups
from tests.workloads.engine.op_checks import compare, randn
from workloads.engine.collectives.communication import Axis
from workloads.engine.collectives.dispatch import Dispatch, capacity_of, orders_with
from workloads.engine.layers.routing import forced_choice
from workloads.engine.ops import backend
from workloads.engine.ops.grouped_linear import add_weight_gradients, grouped_linear, weight_gradients
from workloads.engine.ops.permute import collect_rows, reorder_rows, spread_rows
from workloads.spec.model_spec import MoESpec

ALONE = Axis("ep", 1, 0, None)


def moe(experts: int = 8, per_token: int = 2) -> MoESpec:
    return MoESpec(num_experts=experts, experts_per_token=per_token, expert_hidden_size=4)


def random_dispatch(
    tokens: int, experts: int, copies: int, device: str = "cpu", capacity: int | None = None
) -> Dispatch:
    generator = torch.Generator().manual_seed(tokens)
    choice = torch.stack([torch.randperm(experts, generator=generator)[:copies] for _ in range(tokens)])
    return Dispatch.of_choice(choice.to(device), experts, ALONE, capacity)[0]


def check_permutations(tokens: int, size: int, copies: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    found = random_dispatch(tokens, 8, copies, device)
    order, place = found.order_N, found.place_Tk
    x = randn(tokens, size, dtype=dtype, device=device)
    rows = randn(tokens * copies, size, dtype=dtype, device=device)
    compare(lambda x: spread_rows(x, order, place), lambda x: x[order // copies], [x], tolerance)
    compare(lambda y: collect_rows(y, order, place), lambda y: y[place].sum(1), [rows], tolerance)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    compare(lambda y: reorder_rows(y, order, inverse), lambda y: y[order], [rows], tolerance)


def check_grouped(sizes: list[int], into: int, out: int, dtype: torch.dtype, device: str, tolerance: float) -> None:
    which = row_groups(sizes, device)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        parts = zip(x.split(sizes), weight.view(len(sizes), out, into), strict=True)
        return torch.cat([rows @ own.t() for rows, own in parts])

    inputs = [
        randn(sum(sizes), into, dtype=dtype, device=device),
        randn(len(sizes) * out, into, dtype=dtype, device=device),
    ]
    compare(lambda x, w: grouped_linear(x, w, which), plain, inputs, tolerance)


def check_sums(
    sizes: list[int], into: int, out: int, dtype: torch.dtype, device: str, total_dtype: torch.dtype
) -> float:
    """Relative error of the sum of two micro-batches' weight gradients, which begins with no number. Rows that belong
    to no group follow, as with a capacity; they have no number either."""
    total = torch.full((len(sizes) * out, into), torch.nan, dtype=total_dtype, device=device)
    exact = torch.zeros(len(sizes), out, into, dtype=torch.float64, device=device)
    for first, of_this in ((True, sizes), (False, sizes[::-1])):
        grad, x = (randn(sum(sizes), size, dtype=dtype, device=device) for size in (out, into))
        more = torch.full((8, max(out, into)), torch.nan, dtype=dtype, device=device)
        add_weight_gradients(
            total,
            torch.cat([grad, more[:, :out]])[: None if device == "cuda" else len(grad)],
            torch.cat([x, more[:, :into]])[: None if device == "cuda" else len(x)],
            row_groups(of_this, device),
            first=first,
        )
        exact += weight_gradients(grad.double(), x.double(), row_groups(of_this, device))
    return ((total.view_as(exact).double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("elements", [1 << 20, 40], ids=["one block", "many blocks"])
class TestFloat64:
    @pytest.fixture(autouse=True)
    def _blocks(self, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "BLOCK_ELEMENTS", elements)

    def test_permutations(self) -> None:
        check_permutations(7, 13, 3, torch.float64, "cpu", 1e-14)

    @pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 4], [8]])
    def test_grouped_products(self, sizes: list[int]) -> None:
        check_grouped(sizes, 6, 4, torch.float64, "cpu", 1e-14)

    @pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 4], [8], [0, 0]])
    def test_sums_of_weight_gradients(self, sizes: list[int]) -> None:
        assert not check_sums(sizes, 6, 4, torch.float64, "cpu", torch.float64) > 1e-14


@pytest.mark.gpu
class TestOnGPU:
    @pytest.mark.parametrize(("tokens", "size", "copies"), [(4096, 2048, 8), (1000, 7168, 6), (77, 4100, 2)])
    def test_permutations(self, tokens: int, size: int, copies: int) -> None:
        check_permutations(tokens, size, copies, torch.bfloat16, "cuda", 2**-8)
        check_permutations(tokens, size, copies, torch.float32, "cuda", 2e-6)

    @pytest.mark.parametrize("sizes", [[512] * 64, [0, 1000, 3, 0, 77], [8192]])
    def test_grouped_products(self, sizes: list[int]) -> None:
        check_grouped(sizes, 2048, 1536, torch.bfloat16, "cuda", 2**-7)

    @pytest.mark.parametrize("sizes", [[512] * 64, [0, 1000, 3, 0, 77], [8192]])
    @pytest.mark.parametrize(("into", "out"), [(2048, 1536), (2880, 1000)])
    def test_sums_of_weight_gradients(self, sizes: list[int], into: int, out: int) -> None:
        """A sum in fp32 is as exact as its products, and one in bf16 is rounded once a micro-batch."""
        assert check_sums(sizes, into, out, torch.bfloat16, "cuda", torch.float32) < 1e-5
        assert check_sums(sizes, into, out, torch.bfloat16, "cuda", torch.bfloat16) < 4e-3

    def test_forced_routing_never_waits_for_the_device(self) -> None:
        """A forced dispatch, its products and its way back launch without a synchronisation."""
        choice = forced_choice(torch.arange(4096), moe(64, 8), None)
        found = Dispatch.forced([choice], 64, ALONE, torch.device("cuda"))
        x = randn(4096, 256, dtype=torch.bfloat16, device="cuda").requires_grad_()
        weight = randn(64 * 128, 256, dtype=torch.bfloat16, device="cuda").requires_grad_()
        step = _routed_product(found, x, weight)  # loads the kernels
        assert x.grad is not None and weight.grad is not None
        first = x.grad.clone(), weight.grad.clone()
        assert all(gradient.count_nonzero() > 0.9 * gradient.numel() for gradient in first)
        some = torch.ones((), device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                some.item()  # waits, and is found to
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # The same again, and added: doubling is exact.
        assert torch.equal(x.grad, 2 * first[0]) and torch.equal(weight.grad, 2 * first[1])


def _routed_product(found: Dispatch, x: Tensor, weight: Tensor) -> Callable[[], None]:
    def step() -> None:
        rows = found.arrive(found.send(x))
        out = found.bring_back(grouped_linear(rows, weight, found.groups))
        out.backward(torch.ones_like(out))

    step()
    return step


# Choices


@pytest.mark.parametrize(("experts", "copies"), [(8, 2), (64, 6), (128, 8), (4, 4), (5, 1)])
@pytest.mark.parametrize("imbalance", [None, 1.5, 4.0])
def test_forced_choices_are_distinct_and_as_uneven_as_stated(
    experts: int, copies: int, imbalance: float | None
) -> None:
    if imbalance is not None and imbalance > experts / copies:
        return
    choice = forced_choice(torch.arange(4096), moe(experts, copies), imbalance)
    assert all(len(set(row)) == copies for row in choice.tolist())
    loads = torch.bincount(choice.flatten(), minlength=experts).double()
    assert (loads.max() / loads.mean()).item() == pytest.approx(imbalance or 1.0, rel=0.02)
    if imbalance is not None:
        assert all(later <= earlier * 1.05 + 2 for earlier, later in pairwise(loads.tolist()))


def test_every_copy_is_sent_once_and_comes_home() -> None:
    choices = [forced_choice(torch.arange(start, start + 12), moe(), None) for start in (0, 12)]
    ways = [Dispatch.forced(choices, 8, Axis("ep", 2, rank, None), torch.device("cpu")) for rank in range(2)]
    for rank, way in enumerate(ways):
        assert sum(way.sent) == 24 and way.sent[1 - rank] == ways[1 - rank].received[rank]
        flat = choices[rank].flatten()[way.order_N]
        assert flat.tolist() == sorted(flat.tolist())
        assert way.groups.ends_G[-1] == sum(way.received)
        assert way.by_expert_M is not None and sorted(way.by_expert_M.tolist()) == list(range(sum(way.received)))


def test_a_capacity_fixes_the_orders_of_arrival_of_every_layer_and_step() -> None:
    two = dataclasses.replace(ALONE, size=2)
    first, second = (torch.tensor([[0, 1], [0, 2], [0, 3]]), torch.tensor([[3, 1], [2, 0], [1, 3]]))
    orders = orders_with(2, 4, two, torch.device("cpu"))
    assert orders[0] is not None and orders[0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    for choice in (first, second):
        way, other = (Dispatch.of_choice(choice, 4, two, 2, given)[0] for given in (orders, None))
        assert way.by_expert_M is orders[0] and way.by_arrival_M is orders[1]
        for name in ("by_expert_M", "by_arrival_M", "order_N", "place_Tk"):
            assert torch.equal(getattr(way, name), getattr(other, name))


@pytest.mark.parametrize("factor", [0.5, 1.0, 3.0])
def test_a_capacity_drops_what_comes_too_late_and_nothing_else(factor: float) -> None:
    tokens, experts, copies = 64, 8, 2
    generator = torch.Generator().manual_seed(1)
    choice = torch.stack([torch.randperm(4, generator=generator)[:copies] for _ in range(tokens)])  # half are idle
    capacity = capacity_of(factor, tokens, copies, experts)
    way, counts, dropped = Dispatch.of_choice(choice, experts, ALONE, capacity)
    assert len(way.order_N) == experts * capacity and sum(way.sent) == experts * capacity
    kept = (way.place_Tk >= 0).sum().item()
    assert kept == counts.clamp(max=capacity).sum().item()
    assert dropped is not None and dropped.item() == tokens * copies - kept
    for token, places in enumerate(way.place_Tk.tolist()):
        for copy, place in enumerate(places):
            assert place < 0 or way.order_N[place] == token * copies + copy
            assert place < 0 or place // capacity == choice[token, copy]
    rows = spread_rows(randn(tokens, 4), way.order_N, way.place_Tk)
    assert torch.equal(rows[way.order_N < 0], torch.zeros_like(rows[way.order_N < 0]))
