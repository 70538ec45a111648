#!/usr/bin/env bash
# torch 2.13.0. After a resumption no scheduler reaches the optimizer inside PostLocalSGDOptimizer any more.
#
# Expected: PostLocalSGDOptimizer is the optimizer that it wraps, with an averager of the replicas behind it. Its state
# is saved and loaded as that of any optimizer, and a scheduler made for it sets the rate of the steps.
# Behaviour: the wrapper copies the reference to the groups of the inner optimizer when it is made. Loading a state
# gives the inner optimizer a new list of new groups, as torch's `load_state_dict` always does, and the wrapper keeps
# the old ones. Schedulers take the groups from the wrapper, so from then on they write into groups that no step reads,
# whether they were made before or after the loading. The inner optimizer steps on with the rate of the checkpoint: a
# run that is resumed in its warm-up stays at that small rate, one that is resumed in its decay never decays.
# `get_last_lr()` and `param_groups` of the wrapper, which a log would show, follow the schedule, if from the wrong
# place: chained schedulers multiply the rate that the wrapper was made with. Weight decay and momentum that are
# changed in the wrapper's groups are lost alike. Replicas are still averaged, and nothing is reported. torch's own
# ZeroRedundancyOptimizer, which wraps an optimizer too, is right.
# What to do: `optimizer.param_groups = optimizer.optim.param_groups` after each loading, before the scheduler is made
# or loaded, or a scheduler for the inner optimizer.
# Who meets it: post-local SGD with any schedule, at the first resumption.
#
# Output of 2026-12-01 (AdamW at rate 1 decays in a line to 0 over 8 steps and is stopped after 4. The rates that the
# scheduler gives for the last 4, and the lengths of these steps, which are the rates that were used):
#   AdamW, without a stop: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
#   AdamW, resumed: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
#   ZeroRedundancyOptimizer, without a stop: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
#   ZeroRedundancyOptimizer, resumed: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
#   PostLocalSGDOptimizer, without a stop: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
#   PostLocalSGDOptimizer, resumed: rates 0.500, 0.750, 0.500, 0.250; steps 0.500, 0.500, 0.500, 0.500
#   PostLocalSGDOptimizer, resumed, groups joined: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
cat >"$folder/resumed.py" <<'PYTHON'
import sys

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

STEPS, SAVED = 8, 4


def plain(weights):
    return torch.optim.AdamW(weights, lr=1.0, weight_decay=0.0)


def post_local(weights):
    return PostLocalSGDOptimizer(plain(weights), PeriodicModelAverager(period=2))


def zero(weights):
    return ZeroRedundancyOptimizer(weights, torch.optim.AdamW, lr=1.0, weight_decay=0.0)


def made(make, weight):
    optimizer = make([weight])
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)


def steps(weight, optimizer, scheduler, count):
    """What each step says that its rate is, and how far it moves: as AdamW does under a gradient that is always 1."""
    lines = []
    for _ in range(count):
        before, said = weight.item(), scheduler.get_last_lr()[0]
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        lines.append((said, before - weight.item()))
        scheduler.step()
    return lines


def report(name, lines):
    said, moved = (", ".join(f"{part:.3f}" for part in column) for column in zip(*lines))
    print(f"{name}: rates {said}; steps {moved}", flush=True)


def resumed(make, repair=lambda optimizer: None):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer, scheduler = made(make, weight)
    steps(weight, optimizer, scheduler, SAVED)
    if make is zero:
        optimizer.consolidate_state_dict()
    torch.save([weight.detach(), optimizer.state_dict(), scheduler.state_dict()], sys.argv[1])
    value, of_optimizer, of_scheduler = torch.load(sys.argv[1])
    weight = torch.nn.Parameter(value)
    optimizer, scheduler = made(make, weight)
    optimizer.load_state_dict(of_optimizer)
    repair(optimizer)
    scheduler.load_state_dict(of_scheduler)
    return steps(weight, optimizer, scheduler, STEPS - SAVED)


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for name, make in {"AdamW": plain, "ZeroRedundancyOptimizer": zero, "PostLocalSGDOptimizer": post_local}.items():
    weight = torch.nn.Parameter(torch.zeros(1))
    report(f"{name}, without a stop", steps(weight, *made(make, weight), STEPS)[SAVED:])
    report(f"{name}, resumed", resumed(make))


def joined(optimizer):
    optimizer.param_groups = optimizer.optim.param_groups


report("PostLocalSGDOptimizer, resumed, groups joined", resumed(post_local, joined))
torch.distributed.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/resumed.py" "$folder/checkpoint.pt" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
AdamW, without a stop: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
AdamW, resumed: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
ZeroRedundancyOptimizer, without a stop: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
ZeroRedundancyOptimizer, resumed: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
PostLocalSGDOptimizer, without a stop: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
PostLocalSGDOptimizer, resumed: rates 0.500, 0.750, 0.500, 0.250; steps 0.500, 0.500, 0.500, 0.500
PostLocalSGDOptimizer, resumed, groups joined: rates 0.500, 0.375, 0.250, 0.125; steps 0.500, 0.375, 0.250, 0.125
EXPECTED
