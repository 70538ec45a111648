#!/usr/bin/env bash
# torch 2.13.0, gloo, two and three ranks. Losses of a batch-sharded DTensor: gradients that grow with the ranks, values off.
#
# Expected: the loss of a DTensor that is sharded along the batch, and its gradient, are those of the whole tensor; where
# they cannot be, an error says so, as `F.cross_entropy` of an uneven batch has one ("biased mean result").
# Behaviour: nothing is reported, and the result is a Partial(avg), in which every rank's mean counts alike:
# - the gradient of `F.mse_loss`, `F.smooth_l1_loss` and `F.huber_loss` is as many times too large as there are ranks, on
#   even shards, too; that of `F.l1_loss`, or of the square and `mean()` written out, is right;
# - the value of `F.mse_loss` and `F.binary_cross_entropy_with_logits` on uneven shards is the mean of the ranks' means;
# - the value of `F.cross_entropy` with ignored labels is, too, though its gradient is that of the whole batch: the logged loss
#   of padded or masked tokens is wrong while training is right.
# Who meets it: heads for values, rewards or distillation, and logged losses, under sequence or data parallelism by DTensor.
#
# Output of 2026-11-29 (value / gradient, each divided by that of the whole tensor):
#   2 ranks, 12 rows
#   mse_loss: 1.000 / 2.000
#   smooth_l1_loss: 1.000 / 2.000
#   huber_loss: 1.000 / 2.000
#   l1_loss: 1.000 / 1.000
#   square, mean: 1.000 / 1.000
#   cross_entropy: 1.000 / 1.000
#   cross_entropy, 4 labels of the first rank ignored: 1.185 / 1.000
#   2 ranks, 11 rows
#   mse_loss: 0.963 / 1.932
#   square, mean: 1.000 / 1.000
#   binary_cross_entropy_with_logits: 0.983 / 1.000
#   3 ranks, 12 rows
#   mse_loss: 1.000 / 3.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/losses.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

dist.init_process_group("gloo")
ranks = dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
CLASSES = 10


def shown(name, loss, x, target):
    """Prints value and gradient norm of the loss of the sharded tensors, over those of the whole ones."""
    whole = x.clone().requires_grad_()
    value = loss(whole, target)
    value.backward()
    sharded = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
    result = loss(sharded, distribute_tensor(target, mesh, [Shard(0)]))
    result.backward()
    values = result.full_tensor() / value
    gradients = sharded.grad.full_tensor().norm() / whole.grad.norm()
    if dist.get_rank() == 0:
        print(f"{name}: {values:.3f} / {gradients:.3f}", flush=True)


def rows_of(rows):
    """Rows of which the first have large values, so that a wrong mean over ranks is seen."""
    if dist.get_rank() == 0:
        print(f"{ranks} ranks, {rows} rows", flush=True)
    torch.manual_seed(0)
    sizes = torch.linspace(3, 1, rows)[:, None]
    return sizes * torch.randn(rows, CLASSES), torch.zeros(rows, CLASSES)


x, zeros = rows_of(12)
shown("mse_loss", F.mse_loss, x, zeros)
if ranks == 2:
    for name in ("smooth_l1_loss", "huber_loss", "l1_loss"):
        shown(name, getattr(F, name), x, zeros)
    shown("square, mean", lambda a, b: (a - b).square().mean(), x, zeros)
    labels = torch.arange(12) % CLASSES
    shown("cross_entropy", F.cross_entropy, x, labels)
    labels[:4] = -100
    shown("cross_entropy, 4 labels of the first rank ignored", F.cross_entropy, x, labels)
    x, zeros = rows_of(11)
    shown("mse_loss", F.mse_loss, x, zeros)
    shown("square, mean", lambda a, b: (a - b).square().mean(), x, zeros)
    shown("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, x, zeros)
dist.destroy_process_group()
PYTHON
for ranks in 2 3; do
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=$ranks "$folder/losses.py" 2>/dev/null
done | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
2 ranks, 12 rows
mse_loss: 1.000 / 2.000
smooth_l1_loss: 1.000 / 2.000
huber_loss: 1.000 / 2.000
l1_loss: 1.000 / 1.000
square, mean: 1.000 / 1.000
cross_entropy: 1.000 / 1.000
cross_entropy, 4 labels of the first rank ignored: 1.185 / 1.000
2 ranks, 11 rows
mse_loss: 0.963 / 1.932
square, mean: 1.000 / 1.000
binary_cross_entropy_with_logits: 0.983 / 1.000
3 ranks, 12 rows
mse_loss: 1.000 / 3.000
EXPECTED
