"""Where the ranks of a pipeline stage hold the rows and columns of every matrix, and which rank updates which matrix.

An update that needs whole matrices (Muon) gives each matrix to one rank of its stage, its owner: "Distributed Muon"
(arXiv:2502.16982, section 2.3), here over tensor-parallel ranks and replicas too. A parameter is several matrices
(q, k and v; every expert's gate and up), one after another in its rows; tensor parallelism divides each matrix, data
parallelism the rows of the whole parameter. No torch here: the engine sends by these numbers, the closed forms count by
them.

Members are the ranks of a stage in rank order, from 0. A copy is a set of members that holds a matrix once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.weights import Weight

NEWTON_SCHULZ_STEPS = 5
"""Iterations of Newton-Schulz, as published (arXiv:2502.16982, section 2.2, and Keller Jordan's Muon)."""


def is_hidden_matrix(weight: Weight) -> bool:
    """Whether Muon takes a weight: the matrices of the layers. Embedding, output projection, norms, biases and other
    vectors are AdamW's, as published."""
    return weight.name.startswith("layers.") and is_matrix(weight)


def is_matrix(weight: Weight) -> bool:
    """Whether a weight is a matrix, or one for each expert, with more than one row and column."""
    return len(weight.shape) > 1 and min(weight.shape[-2:]) > 1


class Part(NamedTuple):
    """What one member holds of a matrix: rows and columns of the matrix from ``row`` and ``column``, and from
    ``local_row`` of its shard of the parameter."""

    member: int
    copy: int
    row: int
    rows: int
    column: int
    columns: int
    local_row: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


class Place(NamedTuple):
    """Coordinates of a member for one kind of parameters (`workloads.spec.mesh`)."""

    replica: int
    shard: int
    expert: int
    """Which experts it holds; 0 for other parameters."""
    split: int
    """Which part of every matrix it holds: its tensor-parallel rank, of experts ``etp``."""


class Degrees(NamedTuple):
    replicas: int
    shards: int
    experts: int
    split: int

    def places(self) -> Iterator[Place]:
        """The members of a stage in rank order."""
        for replica in range(self.replicas):
            for shard in range(self.shards):
                for expert in range(self.experts):
                    for split in range(self.split):
                        yield Place(replica, shard, expert, split)


def degrees_of(experiment: Experiment, *, of_experts: bool) -> Degrees:
    """Degrees of a stage's members for routed experts, or for all other parameters."""
    e = experiment
    if of_experts:
        return Degrees(*expert_degrees(e), e.ep, e.etp)
    return Degrees(*data_degrees(e), 1, e.tp)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a parameter, with its parts on the members."""

    parameter: int
    """Index of the parameter."""
    weight: Weight
    expert: int
    """Index of the expert in its weight; 0 for a weight that is one matrix."""
    rows: int
    columns: int
    copies: int
    parts: tuple[Part, ...]
    """In the order of the members; those without any rows are left out."""

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        return newton_schulz_flops(self.rows, self.columns)


def newton_schulz_numbers(rows: int, columns: int) -> int:
    """Numbers that orthogonalising one matrix holds at a time: the matrix, its successor and the smaller side
    squared."""
    return 2 * rows * columns + min(rows, columns) ** 2


def computes_three_quarters(rows: int, columns: int) -> bool:
    """Whether of a symmetric product one of the two quarters beside the diagonal is copied from the other instead of
    computed. Smaller matrices have too little work for it: on H200 it takes 0.93 of the time with 4,096 x 14,336, and
    as long or longer with 4,096 x 4,096 and 2,048 x 8,192."""
    n, m = min(rows, columns), max(rows, columns)
    return n >= 4096 and m >= 2 * n and n % 2 == 0


def newton_schulz_flops(rows: int, columns: int) -> int:
    """FLOPs to orthogonalise one matrix. With n the smaller and m the larger side, an iteration is X X^T (2 n n m), its
    square (2 n n n) and the product with X (2 n n m). The first two are symmetric."""
    n, m = min(rows, columns), max(rows, columns)
    symmetric = 2 * n * n * m + 2 * n**3
    if computes_three_quarters(rows, columns):
        symmetric -= symmetric // 4
    return NEWTON_SCHULZ_STEPS * (symmetric + 2 * n * n * m)


def newton_schulz_traffic(rows: int, columns: int) -> int:
    """Numbers that the products of one matrix read and write. With n the smaller and m the larger side, an iteration
    reads X and writes X X^T (n m + n n), makes its polynomial (4 n n: the factor, what is added, and the result, with
    the factor read once more) and then X anew (3 n m + n n)."""
    n, m = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * n * m + 6 * n * n)


def matrices_of(experiment: Experiment, parameters: Sequence[Sequence[Weight]]) -> list[Matrix]:
    """Every matrix of the parameters of a stage, in order; a vector counts as a matrix of one column. ``parameters``:
    weights that are one parameter each, as the engine makes them
    (`workloads.engine.collectives.parameters.ParameterSpec`)."""
    return [one for at, parts in enumerate(parameters) for one in _of_parameter(experiment, at, parts)]


def _of_parameter(e: Experiment, number: int, parts: Sequence[Weight]) -> Iterator[Matrix]:
    of_experts = parts[0].placement.is_expert
    degrees = degrees_of(e, of_experts=of_experts)
    count = parts[0].shape[0] if of_experts else 1
    shapes = [(part.shape[-2], part.shape[-1]) if len(part.shape) > 1 else (part.shape[0], 1) for part in parts]
    (axis, dim) = next(((a, d) for a, d in parts[0].placement.split if a in ("tp", "etp")), ("", None))
    if axis == "":
        dim = None
    elif of_experts and dim is not None:
        dim -= 1
    # Copies among the ranks that split a matrix: of a whole one on each of them, of a key or value head on several.
    copies = [degrees.split if dim is None else part.copies(degrees.split) for part in parts]
    local = [_local(shape, dim, degrees.split // c) for shape, c in zip(shapes, copies, strict=True)]
    for expert in range(count):
        for at, part in enumerate(parts):
            held = _held(degrees, tuple(local), at, dim, copies[at], count, expert)
            rows, columns = shapes[at]
            yield Matrix(number, part, expert, rows, columns, degrees.replicas * copies[at], held)


def _local(shape: tuple[int, int], dim: int | None, split: int) -> tuple[int, int]:
    rows, columns = shape
    return (rows // split if dim == 0 else rows), (columns // split if dim == 1 else columns)


@lru_cache(maxsize=65536)
def _held(
    degrees: Degrees, local: tuple[tuple[int, int], ...], at: int, dim: int | None, copies: int, count: int, expert: int
) -> tuple[Part, ...]:
    """Parts of one matrix: of the ``at``-th of several with these shapes on one member, of an expert among ``count``.
    ``copies``: ranks in a row, among those that split it, that hold the same. Shards are rows like those of
    `torch.chunk`."""
    each = count // degrees.experts
    of_expert, first = sum(rows for rows, _ in local), sum(rows for rows, _ in local[:at])
    rows, columns = local[at]
    begin = expert % each * of_expert + first
    whole = each * of_expert
    chunk = -(-whole // degrees.shards)
    found = []
    for member, place in enumerate(degrees.places()):
        if place.expert != expert // each:
            continue
        start, stop = max(begin, place.shard * chunk), min(begin + rows, (place.shard + 1) * chunk)
        if stop <= start:
            continue
        copy, split = _own_copy(place, copies), place.split // copies
        row = start - begin + (split * rows if dim == 0 else 0)
        column = split * columns if dim == 1 else 0
        found.append(Part(member, copy, row, stop - start, column, columns, start - place.shard * chunk))
    return tuple(found)


class Owned(NamedTuple):
    """A matrix and the member that updates it, in one of the rounds."""

    matrix: Matrix
    owner: int
    copy: int
    """The copy that the owner takes the parts of: its own."""


def rounds_of(experiment: Experiment, matrices: Sequence[Matrix]) -> list[list[Owned]]:
    """Which member updates which matrix, round by round: in a round every member has one matrix or none.

    Matrices that take longest come first, so that those of one round are alike. All but experts are dealt to all
    members in turn. Shards often hold an expert's matrix whole, so it goes to a member that holds most of it; of
    several, to the one with least work so far.
    """
    ordered = sorted(matrices, key=lambda one: (-one.flops, one.weight.name, one.expert))
    dense = degrees_of(experiment, of_experts=False)
    places, rounds = list(dense.places()), list[list[Owned]]()
    for at, one in enumerate(one for one in ordered if not one.weight.placement.is_expert):
        number, owner = divmod(at, len(places))
        copy = _own_copy(places[owner], one.copies // dense.replicas)
        _in_round(rounds, number, Owned(one, owner, copy))
    of_experts = list[list[Owned]]()
    counts, work = [0] * len(places), [0] * len(places)
    for one in (one for one in ordered if one.weight.placement.is_expert):
        most = max(part.numel for part in one.parts)
        held = [part for part in one.parts if part.numel == most]
        part = min(held, key=lambda part: (work[part.member], part.member))
        _in_round(of_experts, counts[part.member], Owned(one, part.member, part.copy))
        counts[part.member] += 1
        work[part.member] += one.flops
    return rounds + of_experts


def _own_copy(place: Place, copies: int) -> int:
    """The copy that a member has of a matrix of which so many tensor-parallel ranks in a row hold the same."""
    return place.replica * copies + place.split % copies


def _in_round(rounds: list[list[Owned]], number: int, owned: Owned) -> None:
    if number == len(rounds):
        rounds.append([])
    rounds[number].append(owned)


def waves(one: Sequence[Owned]) -> int:
    """Number of messages in which the results of a round are sent: in wave w, an owner in copy c sends to the members
    of copy c + w, so that no message is larger than one matrix of every member."""
    return max(owned.matrix.copies for owned in one)


class Run(NamedTuple):
    """Equal matrices of one parameter whose rows follow one another."""

    parameter: int
    row: int
    """The first matrix's first row in the parameter."""
    number: int


class Batch(NamedTuple):
    """Equal matrices that one rank orthogonalises together."""

    rows: int
    columns: int
    runs: tuple[Run, ...]
    """In the order in which they are stacked."""

    @property
    def number(self) -> int:
        return sum(run.number for run in self.runs)


def batches_of(matrices: Sequence[Matrix]) -> list[Batch]:
    """What the only rank of a stage, which holds all matrices whole, orthogonalises together: as many matrices of a
    shape as need no more memory than the one matrix that needs most. Those that take longest come first."""
    most = max((newton_schulz_numbers(one.rows, one.columns) for one in matrices), default=0)
    by_shape: dict[tuple[int, int], list[Matrix]] = {}
    for one in sorted(matrices, key=lambda one: (-one.flops, one.parameter, one.parts[0].local_row)):
        by_shape.setdefault((one.rows, one.columns), []).append(one)
    found = []
    for (rows, columns), alike in by_shape.items():
        size = most // newton_schulz_numbers(rows, columns)
        found += [Batch(rows, columns, _runs(alike[at : at + size])) for at in range(0, len(alike), size)]
    return found


def _runs(matrices: Sequence[Matrix]) -> tuple[Run, ...]:
    found: list[Run] = []
    for one in matrices:
        row = one.parts[0].local_row
        if found and (one.parameter, row) == (found[-1].parameter, found[-1].row + found[-1].number * one.rows):
            found[-1] = found[-1]._replace(number=found[-1].number + 1)
        else:
            found.append(Run(one.parameter, row, 1))
    return tuple(found)
