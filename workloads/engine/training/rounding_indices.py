"""Where the elements of a rank's shards stand in the unsharded model, for bits that are the same in every layout.

Copies of an element (of replicas, of tensor-parallel ranks that hold a norm or a key and value head each, of a tied
embedding's two ends) are rounded by the same bits, and stay copies. Parts of a fused parameter are numbered as in the
fused one, whose parts are the same in every layout.
"""

from __future__ import annotations

import hashlib
import math

from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import NamedParameter, ParameterSpec
from workloads.engine.update_ops.stochastic_rounding import Segment


def segments_of(named: NamedParameter, groups: Groups) -> list[Segment]:
    """Runs of this rank's shard, flattened. FSDP shards the rows of a rank's part like torch.chunk."""
    spec, group = named.spec, groups.mesh_of(named.spec.placement).get_group("shard")
    runs = _runs(spec, groups)
    columns = runs[0].columns
    rows = sum(run.stop - run.start for run in runs) // columns
    per_shard = -(-rows // group.size()) * columns
    first = group.rank() * per_shard
    last = min(first + per_shard, rows * columns)
    shard: list[Segment] = []
    for run in runs:
        start, stop = max(run.start, first), min(run.stop, last)
        if start < stop:
            base = run.base + (start - run.start) // columns * run.whole_columns
            shard.append(run._replace(start=start - first, stop=stop - first, base=base))
    return shard


def _runs(spec: ParameterSpec, groups: Groups) -> list[Segment]:
    """Runs of a rank's part before data parallelism shards it; each has whole rows."""
    parts, placement = spec.parts, spec.placement
    axes = {axis: groups.axes[axis] for axis, _ in placement.split if axis in groups.axes}
    sizes = {name: axis.size for name, axis in axes.items()}
    key = _key(groups.experiment.seed, parts[0].name)
    experts, first_expert, within = 1, 0, 0
    if placement.is_expert:
        within = 1  # dim of a part that is the first of one expert's matrix
        experts = parts[0].shape[0] // sizes.get("ep", 1)
        first_expert = experts * axes["ep"].rank if "ep" in axes else 0
    divided = {dim: axes[name] for name, dim in placement.split if name != "ep" and name in axes}
    by_rows, by_columns = divided.get(within), divided.get(within + 1)
    whole_columns = math.prod(parts[0].shape[within + 1 :])
    columns = whole_columns // (by_columns.size if by_columns is not None else 1)
    first_column = columns * by_columns.rank if by_columns is not None else 0
    whole_rows = sum(part.shape[within] for part in parts)
    if by_rows is None or by_rows.size == 1:
        size = experts * whole_rows * columns
        return [Segment(0, size, key, first_expert * whole_rows * whole_columns + first_column, columns, whole_columns)]
    runs: list[Segment] = []
    start = 0
    for expert in range(first_expert, first_expert + experts):
        row = expert * whole_rows
        for part in parts:
            copies = part.copies(by_rows.size)
            rows = part.shape[within] // (by_rows.size // copies)
            base = (row + by_rows.rank // copies * rows) * whole_columns
            runs.append(Segment(start, start + rows * columns, key, base, columns, whole_columns))
            start += rows * columns
            row += part.shape[within]
    return runs


def _key(seed: int, name: str) -> int:
    """Key of a parameter's random bits, other than the seed of its initial values."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/rounding".encode()).digest()[:8], "big") >> 1
