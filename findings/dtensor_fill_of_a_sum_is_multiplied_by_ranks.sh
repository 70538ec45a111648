#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. A number written into the sum of a sharded DTensor is read as the number times the ranks.
#
# Expected: `total.fill_(2)` makes every element 2, as it does of any other DTensor, whatever `total` was computed from.
# Behaviour: the sum along the sharded dimension is a Partial, of which each rank has a part that is still to be added. `fill_`
# writes the number into each part and leaves the placement as it is, so the tensor reads as 4 on two ranks and 16 on eight.
# Partials of a mean and of a maximum come out right, since equal parts stay what they are, and so do `zero_` and a sum along
# another dimension.
# Who meets it: running totals of tokens or losses that are set in place between steps.
#
# Output of 2026-11-29 (a tensor of 4 x 3 ones, sharded along its rows; after `fill_(2)`, unless said):
#   sum of the rows: [4.0, 4.0, 4.0]
#   sum of all: 4.0
#   sum of the rows, zero_(): [0.0, 0.0, 0.0]
#   sum of the columns: [2.0, 2.0, 2.0, 2.0]
#   mean of the rows: [2.0, 2.0, 2.0]
#   maximum of the rows: [2.0, 2.0, 2.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
ones = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
for name, tensor in (
    ("sum of the rows", ones.sum(0).fill_(2)),
    ("sum of all", ones.sum().fill_(2)),
    ("sum of the rows, zero_()", ones.sum(0).zero_()),
    ("sum of the columns", ones.sum(1).fill_(2)),
    ("mean of the rows", ones.mean(0).fill_(2)),
    ("maximum of the rows", ones.amax(0).fill_(2)),
):
    values = tensor.full_tensor().tolist()
    if dist.get_rank() == 0:
        print(f"{name}: {values}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
sum of the rows: [4.0, 4.0, 4.0]
sum of all: 4.0
sum of the rows, zero_(): [0.0, 0.0, 0.0]
sum of the columns: [2.0, 2.0, 2.0, 2.0]
mean of the rows: [2.0, 2.0, 2.0]
maximum of the rows: [2.0, 2.0, 2.0]
EXPECTED
