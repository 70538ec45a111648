#!/usr/bin/env bash
# torch 2.13.0, gloo, four ranks. A maximum over ranks loses the NaN of most of them.
#
# Expected: `all_reduce` with MAX (or MIN) of a tensor that is NaN on one rank is NaN, as `torch.maximum` of the parts is.
# Behaviour: which NaN survives depends on the rank that holds it and on the element. Of a single number, only a NaN of
# rank 0 is in the result; of a longer tensor, a NaN of any one rank is left in a quarter of the elements (one part of as
# many as there are ranks). The largest norm of sharded gradients (`clip_grad_norm_` with norm_type inf) is therefore
# finite although a gradient on rank 1 is NaN, and the gradients are not made NaN by it; with norm_type 2, a sum, the norm
# is NaN.
# Who meets it: tests on CPUs of code that looks for NaN or overflow by a maximum over ranks: loss scales, clipping by the
# largest value, largest values for scales of fp8.
#
# Output of 2026-11-28:
#   one number, NaN on rank 0, 1, 2, 3: nan 1.0 1.0 1.0
#   a thousand numbers, share that is NaN: 0.25 0.25 0.25 0.25
#   a gradient on rank 1 is NaN: norm inf 1.0, norm 2 nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def largest(count, bad):
    part = torch.full((count,), float("nan") if rank == bad else 1.0)
    dist.all_reduce(part, op=dist.ReduceOp.MAX)
    return part


alone = " ".join(f"{largest(1, bad).item()}" for bad in range(size))
shares = " ".join(f"{largest(1000, bad).isnan().float().mean().item():.2f}" for bad in range(size))
mesh = init_device_mesh("cpu", (size,))
norms = []
for kind in (float("inf"), 2.0):
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Shard(0)]))
    gradient = torch.full((3,), float("nan") if rank == 1 else 1.0)
    weight.grad = DTensor.from_local(gradient, mesh, [Shard(0)])
    norms.append(torch.nn.utils.clip_grad_norm_([weight], 10.0, norm_type=kind).full_tensor().item())
if rank == 0:
    print(f"one number, NaN on rank 0, 1, 2, 3: {alone}")
    print(f"a thousand numbers, share that is NaN: {shares}")
    print(f"a gradient on rank 1 is NaN: norm inf {norms[0]}, norm 2 {norms[1]}")
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 4 "$folder/ranks.py" 2>"$folder/errors" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
one number, NaN on rank 0, 1, 2, 3: nan 1.0 1.0 1.0
a thousand numbers, share that is NaN: 0.25 0.25 0.25 0.25
a gradient on rank 1 is NaN: norm inf 1.0, norm 2 nan
EXPECTED
