#!/usr/bin/env bash
# torch 2.13.0. FlopCounterMode counts no FLOP of grouped products, of attention on a CPU, and of matrix times vector.
#
# Expected: `torch.utils.flop_counter.FlopCounterMode`, which profilers and MFU figures are built on, counts every matrix
# product, or says which operators it could not count.
# Behaviour: operators without a formula count as 0 in silence. Those are `torch.nn.functional.grouped_mm`, in which
# today's mixtures of experts do nearly all of their work, the fused attention kernel of the CPU (its CUDA counterparts
# have formulas), and a product with a vector (`aten.mv`). The MFU of a mixture that is counted so is far too low.
# A second effect in the same count: activation checkpointing without reentrance stops the second forward as soon as the
# last saved tensor is there, so that full recomputation of two linear layers costs one product less than a forward.
#
# Output of 2026-11-27 (counted / multiply-adds times two):
#   linear 65536 / 65536
#   four experts in one grouped product 0 / 65536
#   attention on the CPU 0 / 2097152
#   matrix times vector 0 / 8192
#   forward and backward of two layers 24576, checkpointed 28672 / 32768
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/count.py" <<'PYTHON'
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


rows, weight = torch.randn(64, 16).bfloat16(), torch.randn(16, 32).bfloat16()
print("linear", counted(lambda: rows @ weight), "/", 2 * 64 * 16 * 32)
experts, ends = torch.randn(4, 16, 32).bfloat16(), torch.tensor([8, 24, 40, 64], dtype=torch.int32)
print("four experts in one grouped product", counted(lambda: F.grouped_mm(rows, experts, offs=ends)), "/", 2 * 64 * 16 * 32)
q, k, v = (torch.randn(1, 8, 64, 16) for _ in range(3))
print("attention on the CPU", counted(lambda: F.scaled_dot_product_attention(q, k, v)), "/", 2 * 2 * 8 * 64 * 64 * 16)
print("matrix times vector", counted(lambda: torch.ones(64, 64) @ torch.ones(64)), "/", 2 * 64 * 64)
layers = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))
x = torch.randn(4, 16, requires_grad=True)
once = counted(lambda: layers(x).sum().backward())
again = counted(lambda: checkpoint(layers, x, use_reentrant=False).sum().backward())
print(f"forward and backward of two layers {once}, checkpointed {again} / {4 * 2 * 2 * 4 * 16 * 32}")
PYTHON
"$folder/venv/bin/python" "$folder/count.py" 2>"$folder/errors" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
linear 65536 / 65536
four experts in one grouped product 0 / 65536
attention on the CPU 0 / 2097152
matrix times vector 0 / 8192
forward and backward of two layers 24576, checkpointed 28672 / 32768
EXPECTED
