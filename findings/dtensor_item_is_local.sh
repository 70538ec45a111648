#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. The item of a reduced DTensor is the rank's own part of the reduction.
#
# Expected: `.item()` of a DTensor that is the result of `sum` or `max` is the value of the whole tensor, or an error.
# Behaviour: the result keeps the placement Partial, and `.item()` returns the local value without a word: 2.0 for a sum
# of 4.0, and another maximum on each rank. A comparison of the same DTensor with a number does reduce it first, so that
# `bool(x > 4)` is True on the rank on which `x.item()` is 3.0. `x.full_tensor().item()` is right.
# Who meets it: code that logs losses, gradient norms or numbers of tokens of a sharded tensor with `.item()`.
#
# Output of 2026-11-27:
#   rank 0: sum of four ones: item 2.0, full 4.0; maximum of 1 5 2 3: item 5.0, full 5.0, above four: True
#   rank 1: sum of four ones: item 2.0, full 4.0; maximum of 1 5 2 3: item 3.0, full 5.0, above four: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor, ones

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
total = ones(4, device_mesh=mesh, placements=[Shard(0)]).sum()
largest = distribute_tensor(torch.tensor([1.0, 5.0, 2.0, 3.0]), mesh, [Shard(0)]).max()
line = (
    f"rank {dist.get_rank()}: sum of four ones: item {total.item()}, full {total.full_tensor().item()}; "
    f"maximum of 1 5 2 3: item {largest.item()}, full {largest.full_tensor().item()}, above four: {bool(largest > 4)}"
)
lines = [None, None]
dist.all_gather_object(lines, line)
if dist.get_rank() == 0:
    print("\n".join(lines))
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/ranks.py" 2>"$folder/errors" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
rank 0: sum of four ones: item 2.0, full 4.0; maximum of 1 5 2 3: item 5.0, full 5.0, above four: True
rank 1: sum of four ones: item 2.0, full 4.0; maximum of 1 5 2 3: item 3.0, full 5.0, above four: True
EXPECTED
