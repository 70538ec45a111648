#!/usr/bin/env bash
# torch 2.13.0, gloo, four ranks. A step that is given up half-way comes back in the next one under FSDP2: `zero_grad` misses it.
#
# Expected: `optimizer.zero_grad()` (or `model.zero_grad()`) forgets every gradient, those of micro-batches that were accumulated
# without communication too, as it does with `no_sync` of DDP; a loop that meets a loss of NaN among its micro-batches drops the
# step, zeroes and goes on.
# Behaviour: with `set_requires_gradient_sync(False)` FSDP2 keeps the gradients unsharded, beside the parameters that the
# optimizer and the model show, whose `.grad` is None all the while. `zero_grad` looks at those alone. What was accumulated
# stays and is added to the next gradients that are reduced: a micro-batch that was dropped counts in the next step in full,
# and a NaN, whose step was dropped for it, makes all weights NaN one step later. The same holds for the halfway sums of HSDP
# (`set_requires_all_reduce(False)`). `set_to_none` does not matter, and nothing is reported. A backward with communication
# before `zero_grad` empties both places.
# Who meets it: loops that skip a step for a NaN, a spike of the loss or an empty batch, or end an epoch within an accumulation.
#
# Output of 2026-11-30 (gradient of the step after a dropped micro-batch; "with it": that of the step and the dropped one together):
#   DDP, no_sync: after zero_grad None, next gradient as it should be
#   FSDP2, no gradient sync: after zero_grad None, next gradient with it
#   HSDP, no gradient sync: after zero_grad None, next gradient with it
#   HSDP, no all-reduce: after zero_grad None, next gradient with it
#   FSDP2, no gradient sync, dropped after a sync: after zero_grad None, next gradient as it should be
#   DDP, no_sync, a dropped NaN: after zero_grad None, next gradient as it should be
#   FSDP2, no gradient sync, a dropped NaN: after zero_grad None, next gradient NaN
#   HSDP, no gradient sync, a dropped NaN: after zero_grad None, next gradient NaN
#   HSDP, no all-reduce, a dropped NaN: after zero_grad None, next gradient NaN
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
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
flat = init_device_mesh("cpu", (ranks,))
hybrid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
DROPPED, FIRST, LAST = range(3)


def made(engine):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(2)))
    if engine == "DDP":
        return DistributedDataParallel(model)
    for part in (*model, model):
        fully_shard(part, mesh=flat if engine == "FSDP2" else hybrid)
    return model


def communicate(model, how, on):
    if how == "no_sync":
        model.require_backward_grad_sync = on
    elif how == "no gradient sync":
        model.set_requires_gradient_sync(on)
    else:
        model.set_requires_all_reduce(on)


def step_after(engine, how, dropped, factor=1.0, counted=True, synced=False):
    """What is left after `zero_grad`, and the gradient of a step of two micro-batches behind a dropped one."""
    model = made(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward(number, last, factor=1.0):
        communicate(model, how, last)
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        (model(rows).square().mean() * factor).backward()

    if dropped:
        backward(DROPPED, last=synced, factor=factor)
        if counted:
            optimizer.zero_grad()
    left = [parameter.grad for parameter in model.parameters()]
    backward(FIRST, last=False)
    backward(LAST, last=True)
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = [getattr(gradient, "full_tensor", lambda gradient=gradient: gradient)() for gradient in gradients]
    return left, torch.cat([gradient.flatten() for gradient in whole])


def near(one, other):
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6)


_, right = step_after("DDP", "no_sync", dropped=False)
_, together = step_after("DDP", "no_sync", dropped=True, counted=False)
assert not near(right, together)
CASES = (("DDP", "no_sync"), ("FSDP2", "no gradient sync"), ("HSDP", "no gradient sync"), ("HSDP", "no all-reduce"))
runs = [(engine, how, "", {}) for engine, how in CASES]
runs.append(("FSDP2", "no gradient sync", ", dropped after a sync", {"synced": True}))
runs += [(engine, how, ", a dropped NaN", {"factor": float("nan")}) for engine, how in CASES]
for engine, how, note, options in runs:
    left, gradient = step_after(engine, how, dropped=True, **options)
    told = "as it should be" if near(gradient, right) else "with it" if near(gradient, together) else "another"
    told = "NaN" if bool(gradient.isnan().all()) else told
    seen = "None" if all(value is None for value in left) else "some"
    if rank == 0:
        print(f"{engine}, {how}{note}: after zero_grad {seen}, next gradient {told}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=4 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
DDP, no_sync: after zero_grad None, next gradient as it should be
FSDP2, no gradient sync: after zero_grad None, next gradient with it
HSDP, no gradient sync: after zero_grad None, next gradient with it
HSDP, no all-reduce: after zero_grad None, next gradient with it
FSDP2, no gradient sync, dropped after a sync: after zero_grad None, next gradient as it should be
DDP, no_sync, a dropped NaN: after zero_grad None, next gradient as it should be
FSDP2, no gradient sync, a dropped NaN: after zero_grad None, next gradient NaN
HSDP, no gradient sync, a dropped NaN: after zero_grad None, next gradient NaN
HSDP, no all-reduce, a dropped NaN: after zero_grad None, next gradient NaN
EXPECTED
