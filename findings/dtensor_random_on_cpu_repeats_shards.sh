#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. Random numbers of a sharded DTensor on the CPU are the same numbers on every rank.
#
# Expected: after `torch.manual_seed(0)`, `nn.init.normal_` of a sharded DTensor fills the whole tensor with independent
# numbers, as on CUDA, where each rank takes its own part of one random stream.
# Behaviour: on a mesh of CPU devices each rank draws from its own generator. With the same seed on all ranks, which is
# what recipes for tensor parallelism ask for, all shards are copies of one another: two of four rows of a weight are
# equal, and a dropout mask repeats. Only a warning that support "may be incomplete" is printed.
# Who meets it: rehearsals on a CPU whose losses or initial weights are compared with those of one process.
#
# Output of 2026-11-27:
#   weight of 4 x 3 over two ranks: distinct rows 2; dropout of 8 ones: kept [2, 6]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty, ones

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
weight = torch.nn.init.normal_(empty(4, 3, device_mesh=mesh, placements=[Shard(0)])).full_tensor()
torch.manual_seed(0)
mask = torch.nn.functional.dropout(ones(8, device_mesh=mesh, placements=[Shard(0)]), 0.5).full_tensor()
if dist.get_rank() == 0:
    kept = mask.nonzero().flatten().tolist()
    print(f"weight of 4 x 3 over two ranks: distinct rows {len(weight.unique(dim=0))}; dropout of 8 ones: kept {kept}")
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/ranks.py" 2>"$folder/errors" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
weight of 4 x 3 over two ranks: distinct rows 2; dropout of 8 ones: kept [2, 6]
EXPECTED
