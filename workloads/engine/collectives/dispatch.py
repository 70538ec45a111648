"""Sends copies of tokens to the experts that they visit, and brings the experts' outputs back.

Shapes: T tokens that this rank sends from, k copies of each, N copies sent, M copies received, D columns; E experts, of
which each of ep ranks holds L = E / ep.

    tokens [T, D] ─ sorted by expert [N, D] ─ all-to-all ─ by sender and expert [M, D] ─ by expert [M, D]

A `Dispatch` says which row goes where. With forced routing the host knows it before the first step. With learned
routing the message sizes are known only after the router has run, so the host waits for the device once per layer and
forward (`Dispatch.of_choice`). With a capacity, or without other ranks, the sizes are known without a wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from workloads.engine.collectives.communication import Axis, exchange_async, wait
from workloads.engine.ops.grouped_linear import RowGroups
from workloads.engine.ops.permute import collect_rows, reorder_rows, spread_rows

Sent = tuple[Tensor, list[Tensor]]
"""(placeholder tensor for autograd, list holding the pending all-to-all result). The list is empty when ep = 1."""
Orders = tuple[Tensor | None, Tensor | None]
"""`Dispatch.by_expert_M` and `Dispatch.by_arrival_M`."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Route of every copy. ``order_N`` and ``place_Tk`` are defined in `workloads.engine.ops.permute`."""

    axis: Axis
    """The ranks that hold different experts."""
    order_N: Tensor
    place_Tk: Tensor
    sent: list[int]
    """Rows to each rank; they add up to N."""
    received: list[int]
    """Rows from each rank; they add up to M."""
    by_expert_M: Tensor | None
    """Permutation that sorts received rows by local expert (indices into arrival order). None if arrival order is
    already sorted."""
    by_arrival_M: Tensor | None
    """Inverse of ``by_expert_M``."""
    groups: RowGroups
    """Received rows grouped by this rank's experts."""
    host_waits: int = 0
    """Number of times the host waited for the device to learn the sizes."""

    @classmethod
    def forced(cls, choices: list[Tensor], num_experts: int, axis: Axis, device: torch.device) -> Dispatch:
        """Dispatch for choices [T, k] that are known on the host, one tensor for each rank of ``axis``."""
        flat = choices[axis.rank].flatten()
        order, place = _sorted(flat, choices[axis.rank].shape[1])
        counts = torch.stack([torch.bincount(choice.flatten(), minlength=num_experts) for choice in choices])
        arriving = counts.view(axis.size, axis.size, -1)[:, axis.rank]  # [senders, L]
        sent = counts[axis.rank].view(axis.size, -1).sum(1).tolist()
        sizes = arriving.sum(0)
        fixed = sizes.tolist()
        return cls(
            axis,
            order.to(device),
            place.to(device),
            sent,
            arriving.sum(1).tolist(),
            *_orders_of_arrival(arriving, device),
            groups=RowGroups(sizes.cumsum(0).to(device, torch.int32), lambda: fixed),
        )

    @classmethod
    def of_choice(
        cls, choice_Tk: Tensor, num_experts: int, axis: Axis, capacity: int | None, orders: Orders | None = None
    ) -> tuple[Dispatch, Tensor, Tensor | None]:
        """Dispatch for the router's choice. Returns (dispatch, copies chosen for each expert [E], number of dropped
        copies).

        ``capacity``: copies that each expert takes from each rank; more are dropped, and missing ones are rows of
        zeros. None: nothing is dropped. ``orders``: `orders_with` this capacity, if the caller has them.
        """
        flat = choice_Tk.flatten()
        order, place = _sorted(flat, choice_Tk.shape[1])
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        if capacity is not None:
            order, place, dropped = _cut(order, flat, counts, capacity, place.shape)
            local = num_experts // axis.size
            rows = [capacity * local] * axis.size
            sizes = [capacity * axis.size] * local
            ends = torch.arange(1, local + 1, dtype=torch.int32, device=flat.device) * (capacity * axis.size)
            groups = RowGroups(ends, lambda: sizes)
            orders = orders_with(capacity, num_experts, axis, flat.device) if orders is None else orders
            return cls(axis, order, place, rows, rows, *orders, groups), counts, dropped
        if axis.size == 1:
            groups = RowGroups(counts.cumsum(0).to(torch.int32), cache(counts.tolist))
            return cls(axis, order, place, [len(flat)], [len(flat)], None, None, groups), counts, None
        local = num_experts // axis.size
        arriving = wait(exchange_async(counts, [local] * axis.size, [local] * axis.size, axis)).view(axis.size, -1)
        total = arriving.sum(0)
        # The only time the host waits for the device.
        counted = torch.cat([counts.view(axis.size, -1).sum(1), arriving.sum(1), total]).tolist()
        sent, received, sizes = counted[: axis.size], counted[axis.size : 2 * axis.size], counted[2 * axis.size :]
        owner = torch.arange(local, device=flat.device).repeat(axis.size)
        experts = torch.repeat_interleave(owner, arriving.flatten(), output_size=sum(received))
        by_expert = experts.argsort(stable=True)
        groups = RowGroups(total.cumsum(0).to(torch.int32), lambda: sizes)
        dispatch = cls(axis, order, place, sent, received, by_expert, _inverse(by_expert), groups, host_waits=1)
        return dispatch, counts, None

    def send(self, tokens_TD: Tensor) -> Sent:
        """Start sending every copy; pass the result to `arrive`."""
        rows = spread_rows(tokens_TD, self.order_N, self.place_Tk)
        if self.axis.size == 1:
            return rows, []
        pending: list[Tensor] = []
        return _Start.apply(rows, self.received, self.sent, self.axis, pending), pending

    def arrive(self, sent_rows: Sent) -> Tensor:
        """Received rows sorted by expert: [M, D]."""
        rows, pending = sent_rows
        if self.axis.size == 1:
            return rows
        rows = _Finish.apply(rows, self.sent, self.received, self.axis, pending)
        if self.by_expert_M is None or self.by_arrival_M is None:
            return rows
        return reorder_rows(rows, self.by_expert_M, self.by_arrival_M)

    def arrive_weights(self, weights_Tk: Tensor) -> Tensor:
        """Weight of each received row, sorted by expert: [M]; 0 for rows of zeros."""
        weights = _gather_values(weights_Tk.flatten(), self.order_N, self.place_Tk.flatten())
        if self.axis.size == 1:
            return weights
        weights = _exchange(weights, self.received, self.sent, self.axis)
        if self.by_expert_M is None or self.by_arrival_M is None:
            return weights
        return _gather_values(weights, self.by_expert_M, self.by_arrival_M)

    def bring_back(self, rows_MD: Tensor) -> Tensor:
        """Return the experts' outputs to the ranks of their tokens. Returns the sum of each token's rows: [T, D]."""
        if self.axis.size > 1:
            if self.by_expert_M is not None and self.by_arrival_M is not None:
                rows_MD = reorder_rows(rows_MD, self.by_arrival_M, self.by_expert_M)
            rows_MD = _exchange(rows_MD, self.sent, self.received, self.axis)
        return collect_rows(rows_MD, self.order_N, self.place_Tk)


def capacity_of(capacity_factor: float, tokens: int, per_token: int, num_experts: int) -> int:
    """Copies that an expert takes from a rank: ``capacity_factor`` times the mean, rounded up."""
    return math.ceil(capacity_factor * tokens * per_token / num_experts)


def orders_with(capacity: int, num_experts: int, axis: Axis, device: torch.device) -> Orders:
    """Orders of arrival with a capacity, the same in every layer and step. They are copied from the host, which a
    captured step may not do."""
    return _orders_of_arrival(torch.full((axis.size, num_experts // axis.size), capacity), device)


def _sorted(flat: Tensor, copies: int) -> tuple[Tensor, Tensor]:
    """(order, place) of copies sorted by expert; copies of one expert stay in the order of the tokens."""
    order = flat.argsort(stable=True)
    return order, _inverse(order).view(-1, copies)


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _cut(
    order: Tensor, flat: Tensor, counts: Tensor, capacity: int, shape: torch.Size
) -> tuple[Tensor, Tensor, Tensor]:
    """(order, place, number of dropped copies) with ``capacity`` rows for every expert. Nothing here waits for the
    device."""
    expert = flat[order]
    rank = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert]
    kept = rank < capacity
    slots = len(counts) * capacity
    slot = torch.where(kept, expert * capacity + rank, slots)
    filled = torch.full((slots + 1,), -1, dtype=order.dtype, device=order.device).scatter_(0, slot, order)[:-1]
    place = torch.empty_like(order).scatter_(0, order, torch.where(kept, slot, -1))
    return filled, place.view(shape), (~kept).sum()


def _orders_of_arrival(arriving: Tensor, device: torch.device) -> Orders:
    """(by expert, by arrival): the permutations for rows that arrive as ``arriving`` [senders, L] counts, a host
    tensor."""
    senders, local = arriving.shape
    if senders == 1 or local == 1:
        return None, None
    by_expert = torch.repeat_interleave(torch.arange(local).repeat(senders), arriving.flatten()).argsort(stable=True)
    return by_expert.to(device), _inverse(by_expert).to(device)


class _Start(torch.autograd.Function):
    """Starts an exchange whose result `_Finish` takes. In backward `_Finish` starts the exchange and this waits for it,
    so work that the forward overlapped with the exchange also overlaps with it in the backward.

    The result travels through ``pending``. Autograd sees a placeholder with the shape of the sent tensor in between,
    because gradients must have the shapes of their tensors.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], axis: Axis, pending: list[Tensor]) -> Tensor:
        pending.append(exchange_async(x, received, sent, axis))
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return wait(grad), None, None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stand_in: Tensor, sent: list[int], received: list[int], axis: Axis, pending: list[Tensor]
    ) -> Tensor:
        ctx.exchange = sent, received, axis
        return wait(pending.pop())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        sent, received, axis = ctx.exchange
        return exchange_async(grad, sent, received, axis), None, None, None, None


def _exchange(x: Tensor, received: list[int], sent: list[int], axis: Axis) -> Tensor:
    pending: list[Tensor] = []
    return _Finish.apply(_Start.apply(x, received, sent, axis, pending), sent, received, axis, pending)


class _GatherValues(torch.autograd.Function):
    """Gathers values by index; each value is taken at most once, so that backward is a gather too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        ctx.target = target
        return _take(x, source)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _take(grad, ctx.target), None, None


def _take(x: Tensor, index: Tensor) -> Tensor:
    if not len(x):
        return x.new_zeros(len(index))
    return torch.where(index >= 0, x[index.clamp(min=0)], 0)


_gather_values: Callable[[Tensor, Tensor, Tensor], Tensor] = _GatherValues.apply
