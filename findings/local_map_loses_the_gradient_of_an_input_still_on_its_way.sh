#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. local_map loses the gradient of an input that was redistributed with async_op=True.
#
# Expected: `local_map` gives its input the same gradient whether `redistribute` has waited for the collective or not.
# Behaviour: with `async_op=True` the local tensor is an AsyncCollectiveTensor. `local_map` calls its `wait()`, which returns the
# tensor inside, without a graph: the function's output is right, and no gradient goes back through that input. There is no error
# where the output depends on something else that has a gradient. Without `local_map` the gradient is right.
# Who meets it: torchtitan 0.3.0 redistributes every input asynchronously. Under tensor parallelism without expert parallelism
# (with `spmd_backend="partial_dtensor"`) the input of routed experts comes so: it gets the gradient of the router and the
# shared experts alone. Losses and gradients of the experts are right; the norm before them and all layers before it are not.
#
# Output of 2026-11-30 (t * t + t of t = 3, whose derivative is 7):
#   without local_map, async_op=False: gradient [7.0, 7.0]
#   without local_map, async_op=True: gradient [7.0, 7.0]
#   in local_map, async_op=False: gradient [7.0, 7.0]
#   in local_map, async_op=True: gradient [1.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = [Replicate()]


def square(t):
    return t * t


mapped = local_map(square, out_placements=(whole,), in_placements=(whole,), device_mesh=mesh)
for name, function in (("without local_map", square), ("in local_map", mapped)):
    for async_op in (False, True):
        shard = DTensor.from_local(torch.full((1,), 3.0), mesh, [Shard(0)]).requires_grad_()
        gathered = shard.redistribute(placements=whole, async_op=async_op)
        (function(gathered) + gathered).sum().backward()
        gradient = shard.grad.full_tensor().tolist()
        if dist.get_rank() == 0:
            print(f"{name}, async_op={async_op}: gradient {gradient}", flush=True)
dist.barrier()
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
without local_map, async_op=False: gradient [7.0, 7.0]
without local_map, async_op=True: gradient [7.0, 7.0]
in local_map, async_op=False: gradient [7.0, 7.0]
in local_map, async_op=True: gradient [1.0, 1.0]
EXPECTED
