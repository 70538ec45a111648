#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. After a forward without backward FSDP2 goes on computing with old weights of the root module.
#
# Expected: weights that are changed in place (by an optimizer's step, or by an average of another model's) are those of the next
# forward, as without FSDP and as the blocks of the same model have it.
# Behaviour: by default the module that `fully_shard` is called on last, with embedding, final norm and head, keeps its gathered
# copy after a forward, for a backward that is about to come. Without one (`no_grad`) the copy stays, and the next forward takes
# it as it is, while the blocks gather anew. So a copy of the model that only looks on, such as a moving average, a target
# or a reference model, has the averaged blocks between the embedding and head of its first forward, for good: a model that
# never was. After an evaluation between backward and `optimizer.step()` the next forward is of such a mixture, and if it is
# a training step, so are its loss and gradients. Nothing is reported, and checkpoints are right: `state_dict` reads the shards.
# `reshard_after_forward=True` for the root as well, or `model.reshard()` after such a forward, is right.
# Who meets it: moving averages and target networks that are updated shard by shard, from a list of parameters made once.
#
# Output of 2026-11-30 (relative difference of outputs from those of one process; after 1, 2 and 3 updates of an average):
#   average, FSDP2: above 0.01, above 0.01, above 0.01; shards differ by 0.000
#   average, FSDP2, reshard_after_forward=True: 0.000, 0.000, 0.000; shards differ by 0.000
#   average, FSDP2, reshard() after each forward: 0.000, 0.000, 0.000; shards differ by 0.000
#   evaluation before each step, FSDP2: above 0.01, above 0.01, above 0.01; shards differ by above 0.01
#   evaluation before each step, FSDP2, reshard_after_forward=True: 0.000, 0.000, 0.000; shards differ by 0.000
#   evaluation before each step, FSDP2, reshard() after each forward: 0.000, 0.000, 0.000; shards differ by 0.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, UPDATES = dist.get_rank(), 3
ROWS = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def made(engine, seed):
    """First and last layer in the root's group, the block between them in one of its own."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    if engine != "one process":
        options = {"reshard_after_forward": True} if "True" in engine else {}
        fully_shard(model[1])
        fully_shard(model, **options)
    return model


@torch.no_grad()
def evaluated(engine, model):
    result = model(ROWS)
    if "reshard()" in engine:
        model.reshard()
    return result


def whole(parameters):
    return torch.cat([getattr(value, "full_tensor", lambda value=value: value)().detach().flatten() for value in parameters])


def average(engine):
    """A model that follows another, whose weights are moved by an equal amount each time."""
    follower, leader = made(engine, 0), made(engine, 1)
    weights, targets = list(follower.parameters()), list(leader.parameters())
    evaluated(engine, follower)
    outputs = []
    for _ in range(UPDATES):
        with torch.no_grad():
            for weight, target in zip(weights, targets, strict=True):
                weight.lerp_(target, 0.5)
        outputs.append(evaluated(engine, follower))
    return outputs, whole(weights)


def training(engine):
    model = made(engine, 0)
    weights = list(model.parameters())
    optimizer = torch.optim.SGD(weights, lr=1.0)
    outputs = []
    for _ in range(UPDATES):
        model(ROWS).square().mean().backward()
        evaluated(engine, model)
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(evaluated(engine, model))
    return outputs, whole(weights)


def told(one, other):
    difference = ((one - other).norm() / other.norm()).item()
    return "above 0.01" if difference > 0.01 else f"{difference:.3f}"


for name, run in (("average", average), ("evaluation before each step", training)):
    right, right_weights = run("one process")
    for engine in ("FSDP2", "FSDP2, reshard_after_forward=True", "FSDP2, reshard() after each forward"):
        outputs, weights = run(engine)
        differences = ", ".join(told(one, other) for one, other in zip(outputs, right, strict=True))
        if rank == 0:
            print(f"{name}, {engine}: {differences}; shards differ by {told(weights, right_weights)}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
average, FSDP2: above 0.01, above 0.01, above 0.01; shards differ by 0.000
average, FSDP2, reshard_after_forward=True: 0.000, 0.000, 0.000; shards differ by 0.000
average, FSDP2, reshard() after each forward: 0.000, 0.000, 0.000; shards differ by 0.000
evaluation before each step, FSDP2: above 0.01, above 0.01, above 0.01; shards differ by above 0.01
evaluation before each step, FSDP2, reshard_after_forward=True: 0.000, 0.000, 0.000; shards differ by 0.000
evaluation before each step, FSDP2, reshard() after each forward: 0.000, 0.000, 0.000; shards differ by 0.000
EXPECTED
