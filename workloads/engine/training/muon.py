"""Muon over sharded matrices, and AdamW over everything else ("Distributed Muon", arXiv:2502.16982, section 2.3).

For the matrices of the layers, with clipped gradients G, momentum M and shape [N, M]:

    M = mu M + (1 - mu) G           U = newton_schulz((1 - mu) G + mu M)          (Nesterov)
    W = W (1 - lr decay) - lr 0.2 sqrt(max(N, M)) U

The factor gives updates the root mean square of AdamW's, so that both share a learning rate (`torch.optim.Muon` with
``match_rms_adamw``). Every rank keeps the momentum of its rows only. Newton-Schulz needs whole matrices: the ranks of a
stage send the parts of each direction to the matrix's owner and get the results back
(`workloads.costs.shape.matrix_parts.rounds_of`), one matrix of every rank at a time, in bf16 (float64 where that is the
dtype of the weights). With replicas, each copy sends to owners of its own, and the results go to all copies. The
only rank of a stage orthogonalises small matrices of one shape together
(`workloads.costs.shape.matrix_parts.batches_of`), in fewer and larger products.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workloads.costs.shape.matrix_parts import (
    Batch,
    Owned,
    Part,
    Run,
    batches_of,
    is_hidden_matrix,
    matrices_of,
    rounds_of,
    waves,
)
from workloads.engine.collectives.communication import exchange_async, wait
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import NamedParameter
from workloads.engine.update_ops.adamw import AdamW
from workloads.engine.update_ops.newton_schulz import newton_schulz

MOMENTUM = 0.95
"""Keller Jordan's Muon and arXiv:2502.16982."""
RMS_OF_ADAMW = 0.2
"""Root mean square of AdamW's updates (arXiv:2502.16982, section 2.2)."""


class Muon:
    """Muon over the ``locals_`` of ``parameters`` that are matrices of layers, AdamW over the others. It has the
    methods of `workloads.engine.update_ops.adamw.AdamW`."""

    def __init__(
        self, parameters: Sequence[NamedParameter], locals_: Sequence[nn.Parameter], groups: Groups, **rates: Any
    ) -> None:
        """``rates``: those of `AdamW`; learning rate and weight decay are Muon's too."""
        self._axis = groups.stage
        self._own = self._axis.rank if self._axis is not None else 0
        taken = [is_hidden_matrix(named.spec.parts[0]) for named in parameters]
        self._matrices = [local for local, of_muon in zip(locals_, taken, strict=True) if of_muon]
        specs = [named.spec.parts for named, of_muon in zip(parameters, taken, strict=True) if of_muon]
        rest = [local for local, of_muon in zip(locals_, taken, strict=True) if not of_muon]
        self._rest = AdamW(rest, **rates)
        self.param_groups: list[dict[str, Any]] = self._rest.param_groups
        self._momenta: list[Tensor] = []
        matrices = matrices_of(groups.experiment, specs)
        self._rounds = rounds_of(groups.experiment, matrices) if self._axis is not None else []
        self._batches = batches_of(matrices) if self._axis is None else []

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Tensors kept between two updates, by local parameter."""
        momenta = zip(self._matrices, self._momenta, strict=False)
        rest: Any = self._rest.state
        return {**rest, **{local: {"momentum": momentum} for local, momentum in momenta}}

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the state, which otherwise happens in the first update."""
        self._rest.allocate()
        if not self._momenta:
            self._momenta = [torch.zeros_like(local) for local in self._matrices]

    @torch.no_grad()
    def update(self, factor: Tensor, skip: Tensor | None) -> None:
        """Update once with gradients times ``factor`` (0-dim). Invalidates the gradients."""
        assert skip is None, "refused by the rules"
        self._rest.update(factor, None)
        if not self._momenta:
            self._momenta = [torch.zeros_like(local) for local in self._matrices]
        directions = self._directions(factor)
        for batch in self._batches:
            self._update_alone(batch, directions)
        for one in self._rounds:
            self._update_round(one, directions)

    def _directions(self, factor: Tensor) -> list[Tensor]:
        """Update the momenta. Returns Nesterov's directions, in the memory of the gradients."""
        pairs = [(at, local.grad) for at, local in enumerate(self._matrices) if local.grad is not None]
        gradients, momenta = [gradient for _, gradient in pairs], [self._momenta[at] for at, _ in pairs]
        if pairs:
            torch._foreach_mul_(gradients, factor)
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            torch._foreach_lerp_(gradients, momenta, MOMENTUM)
        of_all: list[Tensor] = [local.detach() for local in self._matrices]  # a rank without rows sends none of them
        for at, gradient in pairs:
            of_all[at] = gradient
        return of_all

    def _update_round(self, one: Sequence[Owned], directions: Sequence[Tensor]) -> None:
        """Orthogonalise the directions of one round's matrices, on their owners, and update this rank's parts."""
        owned = next((each for each in one if each.owner == self._own), None)
        gathered = [self._gathered(one, owned, directions)]
        result = newton_schulz(gathered.pop()) if owned is not None else None
        for wave in range(waves(one)):
            self._scatter(one, owned, result, wave)

    def _update_alone(self, batch: Batch, directions: Sequence[Tensor]) -> None:
        """The same for equal matrices of a stage of one rank, which sends nothing."""
        result = newton_schulz(_stacked(batch, directions).squeeze(0)).expand(batch.number, -1, -1)
        for run, values in zip(batch.runs, result.split([run.number for run in batch.runs]), strict=True):
            weights = _of_run(self._matrices[run.parameter].detach(), run, batch.rows)
            self._apply(weights, values, (batch.rows, batch.columns))

    def _gathered(self, one: Sequence[Owned], owned: Owned | None, directions: Sequence[Tensor]) -> Tensor:
        """The whole direction of this rank's matrix of a round; empty if it has none."""
        assert self._axis is not None
        send: list[tuple[int, Tensor]] = []
        for each in one:
            part = self._part(each)
            if part is not None and part.copy == each.copy:
                send.append((each.owner, _rows(directions[each.matrix.parameter], part)))
        receive = [part for part in owned.matrix.parts if part.copy == owned.copy] if owned is not None else []
        flat = self._exchanged(send, [(part.member, part.numel) for part in receive], directions[0])
        if owned is None:
            return flat.view(0, 1)
        whole = flat.new_empty(owned.matrix.rows, owned.matrix.columns)
        for part, values in zip(receive, flat.split([part.numel for part in receive]), strict=True):
            _block(whole, part).copy_(values.view(part.rows, part.columns))
        return whole

    def _scatter(self, one: Sequence[Owned], owned: Owned | None, result: Tensor | None, wave: int) -> None:
        """Send the result of this rank's matrix to one copy of it, and update with what arrives."""
        send = []
        if owned is not None and wave < owned.matrix.copies:
            assert result is not None
            to = (owned.copy + wave) % owned.matrix.copies
            send = [(part.member, _block(result, part)) for part in owned.matrix.parts if part.copy == to]
        arrives = []
        for each in one:
            part = self._part(each)
            copies = each.matrix.copies
            if part is not None and wave < copies and part.copy == (each.copy + wave) % copies:
                arrives.append((each, part))
        arrives.sort(key=lambda pair: pair[0].owner)
        flat = self._exchanged(send, [(each.owner, part.numel) for each, part in arrives], self._matrices[0])
        for (each, part), values in zip(arrives, flat.split([part.numel for _, part in arrives]), strict=True):
            weight = _rows(self._matrices[each.matrix.parameter].detach(), part)
            self._apply(weight, values.view(part.rows, part.columns), (each.matrix.rows, each.matrix.columns))

    def _apply(self, weight: Tensor, result: Tensor, whole: tuple[int, int]) -> None:
        """Update this rank's part of a matrix, or equal matrices; ``whole``: rows and columns of a whole one."""
        (group,) = self.param_groups
        scale = RMS_OF_ADAMW * math.sqrt(max(whole))
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(result, alpha=-group["lr"] * scale)

    def _part(self, each: Owned) -> Part | None:
        """This rank's part of a matrix; None if it holds none of it."""
        return next((part for part in each.matrix.parts if part.member == self._own), None)

    def _exchanged(self, send: list[tuple[int, Tensor]], receive: list[tuple[int, int]], like: Tensor) -> Tensor:
        """Send values to members and receive numbers of them, both with the members in order of rank; flat."""
        assert self._axis is not None
        to, origin = defaultdict[int, int](int), defaultdict[int, int](int)
        for member, values in send:
            to[member] += values.numel()
        for member, count in receive:
            origin[member] += count
        ordered = sorted(send, key=lambda pair: pair[0])
        flat = like.new_empty(sum(to.values()), dtype=_dtype(like))
        for (_, values), place in zip(ordered, flat.split([v.numel() for _, v in ordered]), strict=True):
            place.view(values.shape).copy_(values)
        members = range(self._axis.size)
        counts = [origin[member] for member in members], [to[member] for member in members]
        return wait(exchange_async(flat, *counts, self._axis))


def _dtype(values: Tensor) -> torch.dtype:
    """Dtype of directions while they are sent and orthogonalised."""
    return torch.float64 if values.dtype == torch.float64 else torch.bfloat16


def _rows(shard: Tensor, part: Part) -> Tensor:
    """A part of a matrix in a rank's shard of the parameter."""
    return shard[part.local_row : part.local_row + part.rows]


def _of_run(parameter: Tensor, run: Run, rows: int) -> Tensor:
    """The matrices of a run, which have so many rows each, of shape [number, rows, columns]."""
    return parameter[run.row : run.row + run.number * rows].unflatten(0, (run.number, rows))


def _stacked(batch: Batch, directions: Sequence[Tensor]) -> Tensor:
    """Copies of the directions of a batch's matrices, of shape [number, rows, columns]."""
    like = directions[batch.runs[0].parameter]
    whole = like.new_empty(batch.number, batch.rows, batch.columns, dtype=_dtype(like))
    for run, place in zip(batch.runs, whole.split([run.number for run in batch.runs]), strict=True):
        place.copy_(_of_run(directions[run.parameter], run, batch.rows))
    return whole


def _block(whole: Tensor, part: Part) -> Tensor:
    """A part of a matrix in the whole one."""
    return whole[part.row : part.row + part.rows, part.column : part.column + part.columns]
