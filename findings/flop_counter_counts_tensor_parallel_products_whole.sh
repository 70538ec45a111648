#!/usr/bin/env bash
# torch 2.13.0. `FlopCounterMode` counts the products of all ranks of a tensor-parallel group, and the attention of one.
#
# Expected: the counter gives what its rank computes, as it does under FSDP2 and pipelines, so that tensor parallelism over t
# ranks divides the count by t; or, if it took the shapes of whole tensors, the count stays what it was.
# Behaviour: it is neither. A product of DTensors is counted by their whole shapes, once for the group of t ranks. Between two
# products `parallelize_module` gives plain tensors, so attention, with the heads of one rank, is counted as that rank's. With
# 8 ranks the count of a block is 93 % of the whole block's where it should be 12.5 %, and dividing it by 8 leaves a share of
# attention that falls with t. FLOP/s and MFU of "this rank" are up to t times too high, more so the shorter the sequence: what
# a run logs from the counter depends on the layout. FSDP2 gathers plain weights and is counted right. Nothing is reported.
# Who meets it: throughput of tensor-parallel runs that is measured with the counter instead of a formula.
#
# Output of 2026-11-29 (MFLOPs of one block, forward and backward; products of weights, of attention, and the whole):
#   one rank: 4831.8 + 402.7 = 5234.5
#   FSDP2 over 8 ranks: 4831.8 + 402.7 = 5234.5
#   tensor parallelism over 2 ranks: 4831.8 + 201.3 = 5033.2
#   tensor parallelism over 8 ranks: 4831.8 + 50.3 = 4882.2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/counts.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

TOKENS, HEADS, HEAD = 256, 8, 64
WIDTH = HEADS * HEAD
PLAN = {name: ColwiseParallel() for name in ("q", "k", "v", "up")} | {name: RowwiseParallel() for name in ("o", "down")}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (part(x).view(1, TOKENS, -1, HEAD).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


def shown(name, block):
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # attention as batched products
        block(x).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    attention = counts[torch.ops.aten.bmm]
    total = counter.get_total_flops()
    print(f"{name}: {(total - attention) / 1e6:.1f} + {attention / 1e6:.1f} = {total / 1e6:.1f}")


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
mesh = init_device_mesh("cpu", (8,))
shown("one rank", Block())
shown("FSDP2 over 8 ranks", fully_shard(Block(), mesh=mesh))
for ranks in (2, 8):
    mesh = init_device_mesh("cpu", (8 // ranks, ranks), mesh_dim_names=("replicas", "ranks"))["ranks"]
    shown(f"tensor parallelism over {ranks} ranks", parallelize_module(Block(), mesh, PLAN))
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/counts.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
one rank: 4831.8 + 402.7 = 5234.5
FSDP2 over 8 ranks: 4831.8 + 402.7 = 5234.5
tensor parallelism over 2 ranks: 4831.8 + 201.3 = 5033.2
tensor parallelism over 8 ranks: 4831.8 + 50.3 = 4882.2
EXPECTED
