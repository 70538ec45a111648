#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. A convolution along the sharded dimension of a DTensor gives each rank its own part as the whole.
#
# Expected: `F.conv1d` of a sequence that is sharded over ranks is that of the whole sequence, with the neighbours' borders
# exchanged or the shards gathered first, as other operations of DTensors gather what they need; or an error.
# Behaviour: each rank convolves its own shard, with padding at the cut, and calls the result Replicate. Its shape is said to be
# that of the whole, while the tensor behind it is as long as the shard's. So the loss is another on each rank, of a part of the
# tokens, and nothing is reported until an operation meets a tensor of the real length, if one does; a mean, a norm or a product
# over channels does not. The same holds for conv2d along height and width (patches of images). Sharded by batch all is right.
# Who meets it: short convolutions of Mamba and delta-rule layers, and audio or image encoders, under sequence parallelism by
# DTensor.
#
# Output of 2026-11-29 (mean squares of the whole and of the ranks; R is Replicate, with the shape that the DTensor says):
#   conv1d, by batch: loss 0.1574, of ranks 0.1574 and 0.1574; R (2, 4, 18), local (2, 4, 18) and (2, 4, 18)
#   conv1d, depthwise, by sequence: loss 0.1574, of ranks 0.0288 and 0.2422; R (2, 4, 18), local (2, 4, 10) and (2, 4, 10)
#   conv1d, stride 2, by sequence: loss 2.8006, of ranks 0.5611 and 4.7211; R (2, 6, 8), local (2, 6, 4) and (2, 6, 4)
#   conv2d, patches, by width: loss 5.6327, of ranks 1.0612 and 10.2041; R (2, 6, 4, 4), local (2, 6, 4, 2) and (2, 6, 4, 2)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/convolutions.py" <<'PYTHON'
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
CHANNELS = 4


def shown(name, convolution, shape, weight_shape, dim):
    """Convolves a ramp along the sharded dimension, so that the two halves have different losses."""
    x = torch.linspace(0, 1, shape[-1]).expand(shape).contiguous()
    weight = torch.ones(weight_shape) / CHANNELS
    whole = convolution(x, weight)
    result = convolution(distribute_tensor(x, mesh, [Shard(dim)]), distribute_tensor(weight, mesh, [Replicate()]))
    if dim == 0:
        result = result.redistribute(mesh, [Replicate()])
    local = result.to_local()
    gathered = [None, None]
    dist.all_gather_object(gathered, (f"{local.square().mean():.4f}", str(tuple(local.shape))))
    (losses, shapes) = (" and ".join(texts) for texts in zip(*gathered))
    if dist.get_rank() == 0:
        print(f"{name}: loss {whole.square().mean():.4f}, of ranks {losses}; {result.placements[0]} {tuple(result.shape)}, local {shapes}")


causal = partial(F.conv1d, padding=2, groups=CHANNELS)
strided = partial(F.conv1d, padding=1, stride=2)
patches = partial(F.conv2d, stride=2)
shown("conv1d, by batch", causal, (2, CHANNELS, 16), (CHANNELS, 1, 3), dim=0)
shown("conv1d, depthwise, by sequence", causal, (2, CHANNELS, 16), (CHANNELS, 1, 3), dim=2)
shown("conv1d, stride 2, by sequence", strided, (2, CHANNELS, 16), (6, CHANNELS, 3), dim=2)
shown("conv2d, patches, by width", patches, (2, CHANNELS, 8, 8), (6, CHANNELS, 2, 2), dim=3)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/convolutions.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
conv1d, by batch: loss 0.1574, of ranks 0.1574 and 0.1574; R (2, 4, 18), local (2, 4, 18) and (2, 4, 18)
conv1d, depthwise, by sequence: loss 0.1574, of ranks 0.0288 and 0.2422; R (2, 4, 18), local (2, 4, 10) and (2, 4, 10)
conv1d, stride 2, by sequence: loss 2.8006, of ranks 0.5611 and 4.7211; R (2, 6, 8), local (2, 6, 4) and (2, 6, 4)
conv2d, patches, by width: loss 5.6327, of ranks 1.0612 and 10.2041; R (2, 6, 4, 4), local (2, 6, 4, 2) and (2, 6, 4, 2)
EXPECTED
