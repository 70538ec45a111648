#!/usr/bin/env bash
# torch 2.13.0, gloo, four ranks. After an overflow some ranks skip the step and others take it, under FSDP2 with tensor parallelism.
#
# Expected: `torch.amp.GradScaler` looks for infinities in the gradients of all parameters and, since FSDP2's gradients are DTensors,
# comes to one decision on all ranks that hold a part of the model.
# Behaviour: the finding of a rank is reduced over the mesh of the first gradient, whatever meshes the others are on. With an
# embedding that the plan of tensor parallelism leaves out, the first gradient lives on the data-parallel mesh alone, and an
# overflow in the shard of one rank is told to its data-parallel group and not to the other tensor-parallel ranks. These step by
# gradients that the others refuse: half of the matrix has moved, copies of the embedding differ, and the loss scales are
# different for good, so that the next gradients are multiplied by different numbers. With the embedding in the plan, or
# behind another parameter, the same overflow is skipped by all. Nothing is reported.
# Who meets it: training in fp16 over two meshes: FSDP2 with tensor parallelism of a part of the model, or with experts on a mesh
# of their own.
#
# Output of 2026-11-30 (2 x 2 ranks, infinity in the shard of the last rank; what each rank does, and its scale afterwards):
#   embedding in the plan: skips 4, skips 4, skips 4, skips 4
#   embedding left out, first: steps 8, skips 4, steps 8, skips 4
#   embedding left out, last: skips 4, skips 4, skips 4, skips 4
#   embedding left out, first: matrix moved in 50 % of its elements, copies of the embedding equal: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
SCALE = 8.0


class Model(torch.nn.Module):
    def __init__(self, first):
        super().__init__()
        for name in ("embedding", "up", "down") if first else ("up", "down", "embedding"):
            self.add_module(name, torch.nn.Embedding(16, 8) if name == "embedding" else torch.nn.Linear(8, 8, bias=False))

    def forward(self, tokens):
        return self.down(self.up(self.embedding(tokens)).relu())


def tell(name, planned, first):
    torch.manual_seed(0)
    model = Model(first)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if planned:
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    before = model.up.weight.full_tensor().detach()
    tokens = torch.arange(16) if rank < ranks // 2 else torch.arange(16).flip(0)
    scaler.scale(model(tokens).square().mean()).backward()
    if rank == ranks - 1:  # as an overflow of fp16 leaves it
        model.up.weight.grad.to_local()[0, 0] = float("inf")
    local = model.up.weight.to_local().detach().clone()
    scaler.step(optimizer)
    scaler.update()
    stepped = not torch.equal(local, model.up.weight.to_local())
    deeds = [None] * ranks
    dist.all_gather_object(deeds, f"{'steps' if stepped else 'skips'} {scaler.get_scale():.0f}")
    moved = (model.up.weight.full_tensor().detach() != before).float().mean().item()
    copies = [None] * ranks
    dist.all_gather_object(copies, model.embedding.weight.full_tensor().detach())
    if rank == 0:
        print(f"{name}: {', '.join(deeds)}", flush=True)
    same = all(torch.equal(copy, copies[0]) for copy in copies)
    return f"{name}: matrix moved in {moved:.0%} of its elements".replace("%", " %") + f", copies of the embedding equal: {same}"


tell("embedding in the plan", planned=True, first=True)
told = tell("embedding left out, first", planned=False, first=True)
tell("embedding left out, last", planned=False, first=False)
if rank == 0:
    print(told, flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=4 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
embedding in the plan: skips 4, skips 4, skips 4, skips 4
embedding left out, first: steps 8, skips 4, steps 8, skips 4
embedding left out, last: skips 4, skips 4, skips 4, skips 4
embedding left out, first: matrix moved in 50 % of its elements, copies of the embedding equal: False
EXPECTED
