"""Adafactor (arXiv:1804.04235) over sharded parameters: a second moment by rows and columns instead of by element.

`torch.optim.Adafactor` reads several numbers of every parameter on the host, cannot be captured in a CUDA graph, and
would take a rank's rows for a whole matrix. So its formulas are written here with sums over the ranks that share a
matrix. For a matrix W [N, M] with clipped gradient G, step t and b = t^-0.8:

    rows    r += b (mean over columns of G^2 - r)          columns   c += b (mean over rows of G^2 - c)
    update  U = G / sqrt(max(r c^T / mean(r), e^2))         scale     s = max(1e-3, rms(W)) min(lr, 1 / sqrt(t))
    weight  W = W (1 - lr decay) - s U / max(1, rms(U))

with e the resolution of the dtype. Vectors keep the mean of G^2 of each element. Each of q, k and v and every expert's
matrices are matrices of their own. The mean of r is kept as one number a matrix, since no rank has all of r; it follows
from the sum of G^2. Ranks send sums of columns and numbers, twice a step along every axis that divides a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workloads.costs.shape.matrix_parts import Matrix, degrees_of, matrices_of
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import NamedParameter
from workloads.engine.training.data_parallel import master_dtype

LEAST_SCALE = 1e-3
"""Smallest root mean square of a weight that scales its updates (arXiv:1804.04235, section 9)."""
DECAY = -0.8
"""Exponent of t in the weight of a new mean of squares."""


class _Run(NamedTuple):
    """Matrices one after the other with equally many rows in a shard, such as those of experts, that are updated at
    once."""

    matrices: slice
    length: int
    start: int
    rows: int
    """Of each matrix; 0 for those without rows here."""

    def of(self, values: Tensor) -> Tensor:
        """[length, rows, ...], a view."""
        return values[self.start : self.start + self.length * self.rows].view(self.length, self.rows, *values.shape[1:])


@dataclass(slots=True)
class _Held:
    """One parameter on this rank; J matrices of it, R rows and C columns of the shard."""

    local: nn.Parameter
    spans: list[tuple[int, int]]
    """First and last row (excluded) of each matrix in the shard, [J]; empty spans for those without rows here."""
    runs: list[_Run]
    """The same matrices, in order."""
    rows: Tensor
    """Means of squares by row, [R]; of a vector by element."""
    columns: Tensor | None
    """Means of squares by column, [J, C]; None for vectors."""
    mean: Tensor
    """Mean of squares of each matrix, [J]."""
    shares: Tensor | None
    """One over the number of tensor-parallel ranks that hold the same rows of each matrix, [J]; None if all are 1."""
    sizes: Tensor
    """Numbers of rows, of columns and of elements of the whole matrices, without padding, [3, J]."""
    groups: list[dist.ProcessGroup | None]
    """Ranks that share the rows, and those that tensor parallelism divides a matrix among; None if there is one."""
    is_expert: bool
    divides_columns: bool
    """Whether tensor parallelism divides the columns of a matrix, so that sums of rows are sums over ranks."""

    @property
    def largest(self) -> int:
        """Numbers of the largest matrix in the shard."""
        return max(stop - start for start, stop in self.spans) * (self.local.shape[1] if self.local.dim() > 1 else 1)


class Adafactor:
    """Adafactor over the ``locals_`` of ``parameters``, with the methods of
    `workloads.engine.update_ops.adamw.AdamW`."""

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        locals_: Sequence[nn.Parameter],
        groups: Groups,
        *,
        lr: float,
        weight_decay: float,
    ) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": list(locals_), "lr": lr, "weight_decay": weight_decay},
        ]
        self._parameters, self._locals, self._groups = list(parameters), list(locals_), groups
        self._held: list[_Held] = []
        self._step = torch.zeros((), dtype=master_dtype(groups.experiment), device=groups.device)

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Tensors kept between two updates, by local parameter."""
        return {
            one.local: {"rows": one.rows, "mean": one.mean, **({} if one.columns is None else {"columns": one.columns})}
            for one in self._held
        }

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate the state, which otherwise happens in the first update."""
        if not self._held:
            pairs = zip(self._parameters, self._locals, strict=True)
            self._held = [self._of(named, local) for named, local in pairs]
            largest = max(one.largest for one in self._held)
            for one in self._held:
                one.runs = _runs(one.spans, max(1, largest // max(1, one.largest)))

    @torch.no_grad()
    def update(self, factor: Tensor, skip: Tensor | None) -> None:
        """Update once with gradients times ``factor`` (0-dim). Invalidates the gradients."""
        assert skip is None, "refused by the rules"
        self.allocate()
        # More shards than rows: some ranks hold none, and have no gradient.
        gradients = [one.local.grad if one.local.grad is not None else one.local.detach() for one in self._held]
        torch._foreach_mul_(
            [gradient for one, gradient in zip(self._held, gradients, strict=True) if one.local.numel()], factor
        )
        self._step += 1
        weights = self._add_squares(gradients, self._step**DECAY)
        updates = [self._into_update(one, gradient) for one, gradient in zip(self._held, gradients, strict=True)]
        self._sum([(one, total, True, True) for one, total in zip(self._held, updates, strict=True)])
        (group,) = self.param_groups
        pace = torch.clamp(self._step**-0.5, max=group["lr"])
        for one, gradient, of_weight, of_update in zip(self._held, gradients, weights, updates, strict=True):
            if not one.local.numel():
                continue
            scale = (of_weight / one.sizes[2]).sqrt_().clamp_(min=LEAST_SCALE) * pace
            scale /= (of_update / one.sizes[2]).sqrt_().clamp_(min=1.0)
            for run in one.runs:
                run.of(gradient).mul_(scale[run.matrices].view(-1, *[1] * gradient.dim()))
            one.local.detach().mul_(1 - group["lr"] * group["weight_decay"]).sub_(gradient)

    def _add_squares(self, gradients: Sequence[Tensor], new: Tensor) -> list[Tensor]:
        """Update the means of squares; ``new``: weight of this step's. Returns the sums of squares of the weights, by
        parameter, [J]."""
        of_rows, of_weights = list[Tensor](), list[Tensor]()
        of_columns, totals = list[Tensor | None](), list[Tensor | None]()
        sums: list[tuple[_Held, Tensor, bool, bool]] = []
        for one, gradient in zip(self._held, gradients, strict=True):
            weight = _by_matrix(one, one.local.detach())
            rows, columns, total = gradient, None, None
            if one.columns is not None:
                rows = _squares(gradient, 1)
                columns = torch.cat([_squares(run.of(gradient), 1) for run in one.runs])
                columns = columns if one.shares is None else columns * one.shares[:, None]
                sums.append((one, columns, True, not one.divides_columns))
                if one.divides_columns:
                    total = columns.sum(1)
                    sums += [(one, rows, False, True), (one, total, True, True)]
            sums.append((one, weight, True, True))
            of_rows.append(rows)
            of_columns.append(columns)
            totals.append(total)
            of_weights.append(weight)
        self._sum(sums)
        for one, rows, columns, total in zip(self._held, of_rows, of_columns, totals, strict=True):
            if columns is None or one.columns is None:
                one.rows.lerp_(rows.square(), new)
                continue
            for run in one.runs:
                run.of(rows).div_(one.sizes[1, run.matrices, None])
            one.rows.lerp_(rows, new)
            one.columns.lerp_(columns / one.sizes[0][:, None], new)
            total = columns.sum(1) if total is None else total
            one.mean.lerp_(total / one.sizes[2], new)
        return of_weights

    def _into_update(self, one: _Held, gradient: Tensor) -> Tensor:
        """Turn a gradient into its update before scaling. Returns the sums of its squares, [J]."""
        least = torch.finfo(gradient.dtype).eps
        if one.columns is None:
            gradient.mul_(one.rows.clamp(min=least * least).rsqrt_())
            return _by_matrix(one, gradient)
        mean = one.mean.clamp(min=least)
        for run in one.runs:
            rows = run.of(one.rows) / mean[run.matrices, None]
            estimate = rows.unsqueeze(2) * one.columns[run.matrices].unsqueeze(1)
            run.of(gradient).mul_(estimate.clamp_(min=least * least).rsqrt_())
            del estimate
        return _by_matrix(one, gradient)

    def _sum(self, values: Sequence[tuple[_Held, Tensor, bool, bool]]) -> None:
        """Sum tensors over ranks in place, one message a group, and one more for experts.

        ``values``: tensors with their parameter, and whether each is summed over the ranks that share rows, and over
        those that tensor parallelism divides a matrix among.
        """
        for at in (0, 1):
            by_group: dict[tuple[str, bool], tuple[dist.ProcessGroup, list[Tensor]]] = {}
            for one, tensor, over_shards, over_parts in values:
                group = one.groups[at]
                if (over_shards, over_parts)[at] and group is not None:
                    by_group.setdefault((group.group_name, one.is_expert), (group, []))[1].append(tensor)
            for group, tensors in by_group.values():
                flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
                dist.all_reduce(flat, group=group)
                for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(total.view_as(tensor))

    def _of(self, named: NamedParameter, local: nn.Parameter) -> _Held:
        """State of one parameter before its first update."""
        e, spec = self._groups.experiment, named.spec
        of_experts = spec.placement.is_expert
        member = self._groups.rank % (e.world_size // e.pp)
        degrees = degrees_of(e, of_experts=of_experts)
        place = list(degrees.places())[member]
        each = (spec.parts[0].shape[0] if of_experts else 1) // degrees.experts
        here = [one for one in matrices_of(e, [spec.parts]) if one.expert // max(each, 1) == place.expert]
        spans = [_span(one, member) for one in here]
        sizes = [
            [one.rows - one.weight.padding for one in here],
            [one.columns for one in here],
            [(one.rows - one.weight.padding) * one.columns for one in here],
        ]
        copies = [one.weight.copies(degrees.split) for one in here]
        like: dict[str, Any] = {"dtype": local.dtype, "device": local.device}
        is_vector = len(spec.parts[0].shape) == 1
        mesh = self._groups.mesh_of(spec.placement)
        axis = self._groups.axes.get("etp" if of_experts else "tp")
        dim = spec.placement.dim("etp" if of_experts else "tp")
        return _Held(
            local=local,
            spans=spans,
            runs=[],
            rows=local.new_zeros(local.shape[0]),
            columns=None if is_vector else local.new_zeros(len(here), local.shape[1]),
            mean=local.new_zeros(len(here)),
            shares=torch.tensor([1 / n for n in copies], **like) if max(copies) > 1 else None,
            sizes=torch.tensor(sizes, **like),
            groups=[
                mesh.get_group("shard") if degrees.shards > 1 else None,
                axis.group if axis is not None and axis.size > 1 and dim is not None else None,
            ],
            is_expert=of_experts,
            divides_columns=dim == (2 if of_experts else 1),
        )


def _span(one: Matrix, member: int) -> tuple[int, int]:
    """Rows of a matrix in a member's shard."""
    part = next((part for part in one.parts if part.member == member), None)
    return (0, 0) if part is None else (part.local_row, part.local_row + part.rows)


def _runs(spans: list[tuple[int, int]], most: int) -> list[_Run]:
    """Runs of at most ``most`` matrices, so that what they need at once is no more than the largest matrix needs."""
    runs: list[_Run] = []
    for at, (start, stop) in enumerate(spans):
        rows, last = stop - start, runs[-1] if runs else None
        follows = last is not None and last.rows == rows and (not rows or last.start + last.length * rows == start)
        if last is not None and follows and last.length < most:
            runs[-1] = last._replace(matrices=slice(last.matrices.start, at + 1), length=last.length + 1)
        else:
            runs.append(_Run(slice(at, at + 1), 1, start, rows))
    return runs


def _by_matrix(one: _Held, values: Tensor) -> Tensor:
    """Sums of the squares of the values of each matrix, [J], of which the ranks' sum counts every value once."""
    sums = torch.cat([torch.linalg.vector_norm(run.of(values).flatten(1), dim=1).square() for run in one.runs])
    return sums if one.shares is None else sums * one.shares


def _squares(values: Tensor, dim: int) -> Tensor:
    """Sums of squares along a dim, without a tensor of the squares."""
    return torch.linalg.vector_norm(values, dim=dim).square_()
