#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. FSDP2 gathers the head, which is done, at the end of a backward that is one of several.
#
# Expected: a backward gathers the units that it needs, and no gathered copy is used after the weights have changed.
# Behaviour: when the backward of a unit starts, FSDP2 gathers the unit that is before it in a list of the forwards so
# far. With `set_is_last_backward(False)` this list is kept until the last backward of a step. So from the second
# micro-batch on even the first unit has one before it, the last unit of the forward before, which is gathered when a
# backward comes to the first unit. The backward of that one is done, and where forwards and backwards alternate no
# other waits for it. In models whose root has no weights of its own it is mostly the head, often the largest unit.
# * Between two micro-batches its buffer is held. The next forward takes it and gathers one unit less: it came early,
#   but is used. After the last backward of a step it is thrown away: one all-gather of the head a step is in vain.
# * If a step is given up after two or more micro-batches and other weights are loaded, the next forward takes the copy
#   all the same. It computes with the new blocks and the old head, and its gradients are wrong. Nothing is reported.
#   `zero_grad` (called in all these runs) and `reshard` of all units do not help, `reset_iter_state` of the root does.
# * Forwards under `no_grad` are in the list too: the first backward after an evaluation gathers the head in vain, even
#   in loops that never call `set_is_last_backward`. These have none of the rest, for them every backward is the last
#   one.
# The root's own weights ("own weights" below), if it has any, are gathered until a backward ends, and the root is what
# is before the first unit then. If all forwards of a step run first, the next backward needs the head, and nothing is
# in vain. Whether the head is resharded after its forward does not matter.
# Who meets it: gradient accumulation that marks its last backward, which the documentation calls useful for
# micro-batches, and loops that go back to a checkpoint within such a step.
#
# Output of 2026-12-01 (all-gathers of each forward and backward, the unit that each backward gathers last and the
# buffers held after it; output and gradients of the first and the second step after loading, compared with the loaded
# model's):
#   F B in turn: forwards 3 3 2 2, backwards 3 4 4 4, all 25; ends first head head head; held - head head -
#   F B in turn, head kept: forwards 3 3 2 2, backwards 2 3 3 3, all 21; ends first head head head; held - head head -
#   F B in turn, not marked: forwards 3 3 3 3, backwards 3 3 3 3, all 24; ends first first first first; held - - - -
#   F B in turn, own weights: forwards 4 4 4 4, backwards 4 4 4 4, all 32; ends first first first first; held - - - -
#   forwards first: forwards 3 3 3 3, backwards 4 3 3 2, all 24; ends head head head first; held head head head -
#   evaluation, F B, not marked: forwards 3 3, backwards 4, all 10; ends head; held -
#   loaded after 1 of 4: right, right; right, right
#   loaded after 2 of 4: wrong, wrong; right, right
#   loaded after 2 of 4, not marked: right, right; right, right
#   loaded after 2 of 4, reshard: wrong, wrong; right, right
#   loaded after 2 of 4, reset_iter_state: right, right; right, right
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import gc
import weakref

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, UNITS = dist.get_rank(), ("first", "middle", "head")
ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
calls, buffers = [], {}


class Watched:
    """The all-gather of a unit, as usual, noted down with its buffer."""

    def __init__(self, unit):
        self.unit = unit

    def allocate(self, size, *, dtype, device):
        buffer = torch.empty(*size, dtype=dtype, device=device)
        buffers[self.unit] = weakref.ref(buffer)
        return buffer

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        calls.append(self.unit)
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class Model(torch.nn.Module):
    def __init__(self, root):
        super().__init__()
        self.first, self.middle, self.head = (torch.nn.Linear(8, 8) for _ in UNITS)
        self.scale = torch.nn.Parameter(torch.ones(8)) if root else 1

    def forward(self, rows):
        return self.head(self.middle(self.first(rows))) * self.scale


def made(kind=""):
    torch.manual_seed(0)
    model = Model("own" in kind)
    for name in UNITS:
        unit = fully_shard(getattr(model, name), reshard_after_forward=not (name == "head" and "kept" in kind))
        unit.set_custom_all_gather(Watched(name))
    fully_shard(model, reshard_after_forward=True)
    if "own" in kind:
        model.set_custom_all_gather(Watched("root"))
    return model


def backward(model, loss, last, marked):
    if marked:
        model.set_is_last_backward(last)
    loss.backward()


def taken():
    units = list(calls)
    calls.clear()
    return units


def counted(order, kind):
    model, losses = made(kind), []
    buffers.clear()
    forwards, backwards, held = [], [], []
    for place, action in enumerate(order):
        if action == "B":
            backward(model, losses.pop(0), place == len(order) - 1, "not marked" not in kind)
            backwards.append(taken())
            gc.collect()
            held.append("+".join(unit for unit, buffer in buffers.items() if buffer() is not None) or "-")
        else:
            with torch.set_grad_enabled(action == "F"):
                loss = model(ROWS).square().mean()
            losses += [loss] if action == "F" else []
            forwards.append(taken())
    numbers = [" ".join(str(len(units)) for units in each) for each in (forwards, backwards)]
    ends = " ".join(units[-1] for units in backwards)
    total = sum(len(units) for units in forwards + backwards)
    return f"forwards {numbers[0]}, backwards {numbers[1]}, all {total}; ends {ends}; held {' '.join(held)}"


def stepped(model):
    model.set_is_last_backward(True)
    output = model(ROWS)
    output.square().mean().backward()
    gradients = torch.cat([weight.grad.full_tensor().flatten() for weight in model.parameters()])
    model.zero_grad()
    return output.detach(), gradients


def returned(micro_batches, then, marked):
    """Whether output and gradients of the two steps after a step that was given up are those of the loaded model."""
    right, model = made(), made()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    for _ in range(micro_batches):
        backward(model, model(ROWS).square().mean(), False, marked)
    model.zero_grad()
    if then == "reshard":
        for unit in model.modules():
            unit.reshard()
    elif then == "reset_iter_state":
        model.reset_iter_state()
    model.load_state_dict(right.state_dict())
    pairs = [zip(stepped(model), stepped(right), strict=True) for _ in range(2)]
    close = [["right" if torch.allclose(*pair, rtol=1e-3, atol=1e-6) else "wrong" for pair in each] for each in pairs]
    return "; ".join(", ".join(each) for each in close)


STEP = ("F B in turn", "FBFBFBFB")
COUNTED = [(*STEP, kind) for kind in ("", ", head kept", ", not marked", ", own weights")]
COUNTED += [("forwards first", "FFFFBBBB", ""), ("evaluation, F B", "EFB", ", not marked")]
for name, order, kind in COUNTED:
    line = counted(order, kind)
    if rank == 0:
        print(f"{name}{kind}: {line}", flush=True)
LOADED = ((1, "", True), (2, "", True), (2, "", False), (2, "reshard", True), (2, "reset_iter_state", True))
for micro_batches, then, marked in LOADED:
    line = returned(micro_batches, then, marked)
    note = f", {then}" if then else "" if marked else ", not marked"
    if rank == 0:
        print(f"loaded after {micro_batches} of 4{note}: {line}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
F B in turn: forwards 3 3 2 2, backwards 3 4 4 4, all 25; ends first head head head; held - head head -
F B in turn, head kept: forwards 3 3 2 2, backwards 2 3 3 3, all 21; ends first head head head; held - head head -
F B in turn, not marked: forwards 3 3 3 3, backwards 3 3 3 3, all 24; ends first first first first; held - - - -
F B in turn, own weights: forwards 4 4 4 4, backwards 4 4 4 4, all 32; ends first first first first; held - - - -
forwards first: forwards 3 3 3 3, backwards 4 3 3 2, all 24; ends head head head first; held head head head -
evaluation, F B, not marked: forwards 3 3, backwards 4, all 10; ends head; held -
loaded after 1 of 4: right, right; right, right
loaded after 2 of 4: wrong, wrong; right, right
loaded after 2 of 4, not marked: right, right; right, right
loaded after 2 of 4, reshard: wrong, wrong; right, right
loaded after 2 of 4, reset_iter_state: right, right; right, right
EXPECTED
