#!/usr/bin/env bash
# schedulefree 1.4.1, torch 2.13.0. Resumed by torch.distributed.checkpoint, a run has none of its schedule-free state.
#
# Expected: `get_state_dict`, `dcp.load` and `set_state_dict`, in a process that has just made its model and optimizer,
# bring back all that was saved, as they do for torch's own optimizers, or say what is missing.
# Behaviour: torch takes a step with gradients of 0 so that there is a state to load into, and an optimizer that is not
# in train mode refuses it. After `optimizer.train()`, as the message asks, nothing fails and nothing is loaded.
# `train()` looks up the state of each weight in a dictionary that makes an empty entry for each; torch takes any entry
# for a state that is there, takes no step, and returns the empty entries; and a checkpoint is read for the keys of the
# dictionary that is given. Weights come back, and so do the values of the groups (the count of steps, the sum of the
# average's weights), so that a log looks right. The base sequence z begins again at the weights. The second moment
# begins at 0 with the correction for the old count, so that the first step of z is up to 1 / sqrt(1 - beta2) = 32 times
# as long, and the loss jumps. FSDP2 and accelerate's FSDP2 read in the same way. `load_state_dict` of the optimizer is
# right. So is dcp if `train_mode` is set in the groups in place of a call of `train()`.
# Who meets it: schedule-free training with sharded checkpoints, at each resume, where it passes for a bad batch.
#
# Output of 2026-12-01 (resumed after 1000 steps: state tensors that were read for four weights; longest step of z in
# the first step, in learning rates; mean loss of the ten steps after it, in that of the run that was not stopped):
#   AdamWScheduleFree, not stopped: tensors 8, step of z 2, loss 1
#   AdamWScheduleFree, load_state_dict: tensors 8, step of z 2, loss 1
#   AdamWScheduleFree, dcp before train(): Exception, Optimizer was not in train mode when step is called
#   AdamWScheduleFree, dcp after train(): tensors 0, step of z 25, loss 7
#   AdamWScheduleFree, dcp train_mode set in the groups: tensors 8, step of z 2, loss 1
#   RAdamScheduleFree, not stopped: tensors 8, step of z 2, loss 1
#   RAdamScheduleFree, load_state_dict: tensors 8, step of z 2, loss 1
#   RAdamScheduleFree, dcp before train(): Exception, Optimizer was not in train mode when step is called
#   RAdamScheduleFree, dcp after train(): tensors 0, step of z 16, loss 2
#   RAdamScheduleFree, dcp train_mode set in the groups: tensors 8, step of z 2, loss 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 schedulefree==1.4.1 2>/dev/null
cat >"$folder/resumed.py" <<'PYTHON'
import copy
import os
import sys

import schedulefree
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

RATE, STEPS, MORE = 0.01, 1000, 10
inputs = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
targets = inputs[:, :4].sin().sum(1, keepdim=True)


def made(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    return model, kind(model.parameters(), lr=RATE)


def train(model, optimizer, first, last):
    losses = []
    for step in range(first, last):
        rows = torch.randint(0, len(inputs), (256,), generator=torch.Generator().manual_seed(step))
        loss = (model(inputs[rows]) - targets[rows]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def tensors(states):
    return sum(torch.is_tensor(value) and value.dim() > 0 for state in states.values() for value in state.values())


def bases(optimizer, otherwise):
    """The base sequence z of the weights, which begins at the weights if there is none."""
    weights = optimizer.param_groups[0]["params"]
    return [optimizer.state[weight].get("z", start).clone() for weight, start in zip(weights, otherwise)]


def goes_on(name, model, optimizer, read):
    start = bases(optimizer, [weight.detach().clone() for weight in model.parameters()])
    loss = train(model, optimizer, STEPS, STEPS + 1)
    moved = max((new - old).abs().max().item() for new, old in zip(bases(optimizer, start), start)) / RATE
    loss = train(model, optimizer, STEPS + 1, STEPS + 1 + MORE)
    print(f"{name}: tensors {read}, step of z {moved:.0f}, loss {loss / usual.get(kind, loss):.0f}", flush=True)
    usual.setdefault(kind, loss)


usual = {}
for kind in (schedulefree.AdamWScheduleFree, schedulefree.RAdamScheduleFree):
    name, path = kind.__name__, f"{sys.argv[1]}/{kind.__name__}"
    model, optimizer = made(kind)
    optimizer.train()
    train(model, optimizer, 0, STEPS)
    optimizer.eval()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=path)
    plain = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    optimizer.train()
    goes_on(f"{name}, not stopped", model, optimizer, tensors(optimizer.state))

    model, optimizer = made(kind)
    optimizer.train()
    model.load_state_dict(plain[0])
    optimizer.load_state_dict(plain[1])
    optimizer.train()
    goes_on(f"{name}, load_state_dict", model, optimizer, tensors(optimizer.state))

    for way in ("before train()", "after train()", "train_mode set in the groups"):
        model, optimizer = made(kind)
        if way == "after train()":
            optimizer.train()
        if way == "train_mode set in the groups":
            for group in optimizer.param_groups:
                group["train_mode"] = True
        try:
            weights, moments = get_state_dict(model, optimizer)
        except Exception as error:
            print(f"{name}, dcp {way}: {type(error).__name__}, {str(error).split('. ')[0]}", flush=True)
            continue
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        assert optimizer.param_groups[0]["k"] == STEPS
        optimizer.train()
        goes_on(f"{name}, dcp {way}", model, optimizer, tensors(moments["state"]))
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/resumed.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
AdamWScheduleFree, not stopped: tensors 8, step of z 2, loss 1
AdamWScheduleFree, load_state_dict: tensors 8, step of z 2, loss 1
AdamWScheduleFree, dcp before train(): Exception, Optimizer was not in train mode when step is called
AdamWScheduleFree, dcp after train(): tensors 0, step of z 25, loss 7
AdamWScheduleFree, dcp train_mode set in the groups: tensors 8, step of z 2, loss 1
RAdamScheduleFree, not stopped: tensors 8, step of z 2, loss 1
RAdamScheduleFree, load_state_dict: tensors 8, step of z 2, loss 1
RAdamScheduleFree, dcp before train(): Exception, Optimizer was not in train mode when step is called
RAdamScheduleFree, dcp after train(): tensors 0, step of z 16, loss 2
RAdamScheduleFree, dcp train_mode set in the groups: tensors 8, step of z 2, loss 1
EXPECTED
