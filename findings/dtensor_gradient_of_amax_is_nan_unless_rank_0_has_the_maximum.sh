#!/usr/bin/env bash
# torch 2.13.0, gloo, four ranks. The gradient of `amax()` of a sharded DTensor is NaN unless the first rank has the maximum.
#
# Expected: the gradient of a maximum is 1 at the largest element and 0 elsewhere, whichever rank has that element; `amax()` and
# `max()` of a whole tensor are the same number and have the same gradient.
# Behaviour: the values agree with those of the whole tensor, and so does the gradient of `max()`. That of `amax()` is right while
# the largest element lies on the first rank; otherwise the largest element has infinity and all others have NaN, on every rank.
# Nothing is reported. The maximum moves in training, so a run can go well for thousands of steps before its loss becomes NaN in
# the step after the maximum has left rank 0. With r ranks a random tensor has it elsewhere in (r - 1)/r of all cases. `amin()`,
# `abs().amax()`, and all that is divided by them have the same; maxima along a dimension, with a scale for each row or column,
# are right.
# Who meets it: fake quantization with a scale per tensor (`w / w.abs().amax()`) through which gradients flow, on weights of
# tensor parallelism, and terms of a loss on the largest weight of a model that FSDP2 has sharded.
#
# Output of 2026-11-30 (8 x 4 random numbers, sharded along rows; the rank is the one with the largest absolute value, at each):
#   x.amax(), largest on rank 0: value right, gradient right
#   x.amax(), largest on rank 1: value right, gradient 31 nan, 1 inf
#   x.amax(), largest on rank 3: value right, gradient 31 nan, 1 inf
#   x.max(), largest on rank 0: value right, gradient right
#   x.max(), largest on rank 1: value right, gradient right
#   x.max(), largest on rank 3: value right, gradient right
#   (x / x.abs().amax()).square().sum(), largest on rank 0: value right, gradient right
#   (x / x.abs().amax()).square().sum(), largest on rank 1: value right, gradient 31 nan, 1 inf
#   (x / x.abs().amax()).square().sum(), largest on rank 3: value right, gradient 31 nan, 1 inf
#   (x / x.abs().amax(1, keepdim=True)).square().sum(), largest on rank 0: value right, gradient right
#   (x / x.abs().amax(1, keepdim=True)).square().sum(), largest on rank 1: value right, gradient right
#   (x / x.abs().amax(1, keepdim=True)).square().sum(), largest on rank 3: value right, gradient right
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

ROWS_A_RANK = 2
FUNCTIONS = {
    "x.amax()": lambda x: x.amax(),
    "x.max()": lambda x: x.max(),
    "(x / x.abs().amax()).square().sum()": lambda x: (x / x.abs().amax()).square().sum(),
    "(x / x.abs().amax(1, keepdim=True)).square().sum()": lambda x: (x / x.abs().amax(1, keepdim=True)).square().sum(),
}


def differentiated(function, x):
    value = function(x.requires_grad_())
    value.backward()
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (value.detach(), x.grad)]


def counted(gradient, wanted):
    if torch.allclose(gradient, wanted):
        return "right"
    return f"{gradient.isnan().sum()} nan, {gradient.isinf().sum()} inf"


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for name, function in FUNCTIONS.items():
    for rank in (0, 1, 3):
        torch.manual_seed(0)
        numbers = torch.randn(ROWS_A_RANK * dist.get_world_size(), 4)
        numbers[rank * ROWS_A_RANK, 1] = 5.0
        value, gradient = differentiated(function, distribute_tensor(numbers.clone(), mesh, [Shard(0)]))
        wanted_value, wanted = differentiated(function, numbers)
        if dist.get_rank() == 0:
            right = "right" if torch.allclose(value, wanted_value) else "wrong"
            print(f"{name}, largest on rank {rank}: value {right}, gradient {counted(gradient, wanted)}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=4 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
x.amax(), largest on rank 0: value right, gradient right
x.amax(), largest on rank 1: value right, gradient 31 nan, 1 inf
x.amax(), largest on rank 3: value right, gradient 31 nan, 1 inf
x.max(), largest on rank 0: value right, gradient right
x.max(), largest on rank 1: value right, gradient right
x.max(), largest on rank 3: value right, gradient right
(x / x.abs().amax()).square().sum(), largest on rank 0: value right, gradient right
(x / x.abs().amax()).square().sum(), largest on rank 1: value right, gradient 31 nan, 1 inf
(x / x.abs().amax()).square().sum(), largest on rank 3: value right, gradient 31 nan, 1 inf
(x / x.abs().amax(1, keepdim=True)).square().sum(), largest on rank 0: value right, gradient right
(x / x.abs().amax(1, keepdim=True)).square().sum(), largest on rank 1: value right, gradient right
(x / x.abs().amax(1, keepdim=True)).square().sum(), largest on rank 3: value right, gradient right
EXPECTED
