#!/usr/bin/env bash
# torch 2.13.0, gloo, one rank. A checkpoint before the first step changes the training that follows it.
#
# Expected: `get_optimizer_state_dict` of torch.distributed.checkpoint reads; a run that saves its first state (or asks for the
# dictionary to load into, and finds no checkpoint) trains as one that does not.
# Behaviour: an optimizer that has no state yet is stepped once, with gradients of 0 and a learning rate of 0, so that there is
# something to return. The weights stay; the state does not. AdamW takes its own first step for the second: momentum and second
# moment are corrected for two gradients and have seen one, so the first step moves weights by 0.744 of the learning rate in
# place of 1. The difference fades over the first steps for beta1 and over some thousand for beta2. Muon forgets the 0, SGD with
# dampening takes the 0 for its first gradient and halves the next. `state_dict()` of the optimizer itself only reads. (Reported
# and open: pytorch/pytorch#164929.)
# Who meets it: whoever compares losses or weights, bit by bit, of a run with a checkpoint at step 0 and one without.
#
# Output of 2026-11-29 (mean distance from the first weights after 1, 2, 3 steps with lr 1 and one gradient):
#   AdamW
#     nothing read: 1.000 2.000 3.000
#     state_dict(): 1.000 2.000 3.000
#     get_optimizer_state_dict: 0.744 1.603 2.512
#   AdamW with betas (0.9, 0.95)
#     nothing read: 1.000 2.000 3.000
#     state_dict(): 1.000 2.000 3.000
#     get_optimizer_state_dict: 0.735 1.583 2.482
#   SGD with dampening 0.5
#     nothing read: 8.500 20.400 35.360
#     state_dict(): 8.500 20.400 35.360
#     get_optimizer_state_dict: 4.250 12.325 23.843
#   Muon
#     nothing read: 0.240 0.480 0.706
#     state_dict(): 0.240 0.480 0.706
#     get_optimizer_state_dict: 0.240 0.480 0.706
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/first.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
GRADIENT = torch.arange(1.0, 17.0).view(4, 4)
NO_DECAY = {"lr": 1.0, "weight_decay": 0.0}


def trained(kind, options, read):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4, bias=False)
    first = layer.weight.detach().clone()
    optimizer = kind(layer.parameters(), **options)
    if read:
        read(layer, optimizer)
    assert torch.equal(layer.weight, first)
    distances = []
    for _ in range(3):
        layer.weight.grad = GRADIENT.clone()
        optimizer.step()
        distances.append(f"{(layer.weight - first).abs().mean():.3f}")
    return " ".join(distances)


for kind, options in (
    (torch.optim.AdamW, NO_DECAY),
    (torch.optim.AdamW, NO_DECAY | {"betas": (0.9, 0.95)}),
    (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.Muon, NO_DECAY),
):
    told = ", ".join(f"{name} {value}" for name, value in options.items() if name in ("betas", "dampening"))
    print(f"{kind.__name__}{' with ' + told if told else ''}")
    print("  nothing read:", trained(kind, options, None))
    print("  state_dict():", trained(kind, options, lambda layer, optimizer: optimizer.state_dict()))
    print("  get_optimizer_state_dict:", trained(kind, options, get_optimizer_state_dict))
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/first.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
AdamW
  nothing read: 1.000 2.000 3.000
  state_dict(): 1.000 2.000 3.000
  get_optimizer_state_dict: 0.744 1.603 2.512
AdamW with betas (0.9, 0.95)
  nothing read: 1.000 2.000 3.000
  state_dict(): 1.000 2.000 3.000
  get_optimizer_state_dict: 0.735 1.583 2.482
SGD with dampening 0.5
  nothing read: 8.500 20.400 35.360
  state_dict(): 8.500 20.400 35.360
  get_optimizer_state_dict: 4.250 12.325 23.843
Muon
  nothing read: 0.240 0.480 0.706
  state_dict(): 0.240 0.480 0.706
  get_optimizer_state_dict: 0.240 0.480 0.706
EXPECTED
