#!/usr/bin/env bash
# came-pytorch 0.1.3, torch 2.13.0. CAME keeps its moments in fp32 until a run is resumed; then they are bf16 and never shrink.
#
# Expected: a resumed run goes on as if it had not been stopped, but for the last bit: `load_state_dict` brings back the states that
# `state_dict` gave, in the type that they had.
# Behaviour: `Optimizer.load_state_dict` of torch gives every floating-point state the type of its weight. torch's own optimizers
# have states of that type anyway (AdamW below). CAME computes in fp32 whatever the weights are, and with bf16 weights its moments
# come back in bf16 and stay so. A second moment with beta 0.999 loses a thousandth a step, and bf16 has no number that near: when
# gradients become smaller nothing of it is forgotten, and the weights move half as far as in the run that was not stopped.
# Nothing is reported. With fp32 weights a resumed run is the run that was not stopped.
# Who meets it: each optimizer that keeps better states than weights and leaves loading to torch. transformers' Adafactor is
# spared: its next step makes fp32 of them again. (The cast is reported and open: pytorch/pytorch#43706.)
#
# Output of 2026-11-30 (gradients of a tenth from step 3000 on, for 2000 steps; stopped and resumed at step 3000 or not):
#   CAME, weights in float32, uninterrupted: moment in float32, 0.14 of it left, weights moved by 0.119
#   CAME, weights in float32, resumed: moment in float32, 0.14 of it left, weights moved by 0.119
#   CAME, weights in bfloat16, uninterrupted: moment in float32, 0.14 of it left, weights moved by 0.012
#   CAME, weights in bfloat16, resumed: moment in bfloat16, 1.00 of it left, weights moved by 0.006
#   AdamW, weights in float32, uninterrupted: moment in float32, 0.01 of it left, weights moved by 0.283
#   AdamW, weights in float32, resumed: moment in float32, 0.01 of it left, weights moved by 0.283
#   AdamW, weights in bfloat16, uninterrupted: moment in bfloat16, 0.01 of it left, weights moved by 0.027
#   AdamW, weights in bfloat16, resumed: moment in bfloat16, 0.01 of it left, weights moved by 0.027
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 came-pytorch==0.1.3 2>/dev/null
cat >"$folder/moments.py" <<'PYTHON'
import copy

import torch
from came_pytorch import CAME

SHAPE, BEFORE, AFTER = (64, 64), 3000, 2000


def came(weights):
    return CAME(weights, lr=1e-4)


def adamw(weights):
    return torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.99))


def moment(optimizer, weight):
    state = optimizer.state[weight]
    return state.get("exp_avg_sq_row", state.get("exp_avg_sq"))


def train(optimizer, weight, steps, size, generator):
    for _ in range(steps):
        weight.grad = (size * torch.randn(SHAPE, generator=generator)).to(weight.dtype)
        optimizer.step()


def continued(make, dtype, resume):
    """Type of the second moment at the end, and how much of it is left, when gradients are a tenth from some step on."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SHAPE, generator=generator).to(dtype))
    optimizer = make([weight])
    train(optimizer, weight, BEFORE, 1.0, generator)
    if resume:
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = make([weight])
        optimizer.load_state_dict(state)
    start, full = weight.detach().clone(), moment(optimizer, weight).float().mean()
    train(optimizer, weight, AFTER, 0.1, generator)
    now = moment(optimizer, weight)
    moved = (weight.detach() - start).float().norm()
    return f"moment in {str(now.dtype)[6:]}, {now.float().mean() / full:.2f} of it left, weights moved by {moved:.3f}"


for name, make in (("CAME", came), ("AdamW", adamw)):
    for dtype in (torch.float32, torch.bfloat16):
        for resume in (False, True):
            how = "resumed" if resume else "uninterrupted"
            print(f"{name}, weights in {str(dtype)[6:]}, {how}: {continued(make, dtype, resume)}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/moments.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
CAME, weights in float32, uninterrupted: moment in float32, 0.14 of it left, weights moved by 0.119
CAME, weights in float32, resumed: moment in float32, 0.14 of it left, weights moved by 0.119
CAME, weights in bfloat16, uninterrupted: moment in float32, 0.14 of it left, weights moved by 0.012
CAME, weights in bfloat16, resumed: moment in bfloat16, 1.00 of it left, weights moved by 0.006
AdamW, weights in float32, uninterrupted: moment in float32, 0.01 of it left, weights moved by 0.283
AdamW, weights in float32, resumed: moment in float32, 0.01 of it left, weights moved by 0.283
AdamW, weights in bfloat16, uninterrupted: moment in bfloat16, 0.01 of it left, weights moved by 0.027
AdamW, weights in bfloat16, resumed: moment in bfloat16, 0.01 of it left, weights moved by 0.027
EXPECTED
