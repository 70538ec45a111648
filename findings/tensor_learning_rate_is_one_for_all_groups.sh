#!/usr/bin/env bash
# torch 2.13.0. A learning rate given as a tensor is one object for all groups, and some schedulers step it once per group.
#
# Expected: `lr=torch.tensor(1.0)`, which torch recommends for compiled optimizers so that a schedule does not compile again, is
# `lr=1.0` in another type: each group of parameters has its own learning rate.
# Behaviour: the groups that set none of their own refer to the tensor that was passed, and schedulers write into it in place.
# `ReduceLROnPlateau` multiplies it once for each group: with the two groups that everybody has (with and without weight decay) a
# factor of 0.5 acts as 0.25, with three groups as 0.125. `LambdaLR` with one function a group, which freezes or warms up one of
# them, gives all groups the rate of the last. The schedulers with one formula for all groups come out right. A number that a loop
# of one's own multiplies in place (`group["lr"] *= 0.5`) is multiplied once per group, too. The state dict of the optimizer
# shows the same number for all groups, as it should for the first case, so a log does not tell. A tensor per group is right.
# Who meets it: compiled or captured optimizers with groups.
#
# Output of 2026-11-29 (learning rates of the groups after 0, 1, 2, 3 steps):
#   ReduceLROnPlateau, factor 0.5, 2 groups
#     1.0: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
#     tensor(1.0): 1/1, 0.25/0.25, 0.0625/0.0625, 0.015625/0.015625
#     a tensor for each: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
#   LambdaLR, constant and growing
#     1.0: 1/0.25, 1/0.5, 1/0.75, 1/1
#     tensor(1.0): 0.25/0.25, 0.5/0.5, 0.75/0.75, 1/1
#     a tensor for each: 1/0.25, 1/0.5, 1/0.75, 1/1
#   ExponentialLR, gamma 0.5
#     1.0: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
#     tensor(1.0): 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
#     a tensor for each: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/rates.py" <<'PYTHON'
import torch
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau


def optimizer(kind):
    """AdamW with a group that decays and one that does not; `kind` says what the learning rate of 1 is."""
    decayed, other = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [decayed]}, {"params": [other], "weight_decay": 0.0}]
    if kind == "a tensor for each":
        for group in groups:
            group["lr"] = torch.tensor(1.0)
        return torch.optim.AdamW(groups)
    return torch.optim.AdamW(groups, lr=1.0 if kind == "1.0" else torch.tensor(1.0))


def rates(made, scheduler, *loss):
    shown = []
    for _ in range(4):
        shown.append("/".join(f"{float(group['lr']):g}" for group in made.param_groups))
        made.step()
        scheduler.step(*loss)
    return ", ".join(shown)


def plateau(made):
    scheduler = ReduceLROnPlateau(made, factor=0.5, patience=0)
    scheduler.step(1.0)  # the best loss so far; every later one is as high
    return rates(made, scheduler, 1.0)


for name, scheduled in (
    ("ReduceLROnPlateau, factor 0.5, 2 groups", plateau),
    ("LambdaLR, constant and growing", lambda made: rates(made, LambdaLR(made, [lambda step: 1.0, lambda step: (1 + step) / 4]))),
    ("ExponentialLR, gamma 0.5", lambda made: rates(made, ExponentialLR(made, gamma=0.5))),
):
    print(name)
    for kind in ("1.0", "tensor(1.0)", "a tensor for each"):
        print(f"  {kind}: {scheduled(optimizer(kind))}")
PYTHON
"$folder/venv/bin/python" "$folder/rates.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
ReduceLROnPlateau, factor 0.5, 2 groups
  1.0: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
  tensor(1.0): 1/1, 0.25/0.25, 0.0625/0.0625, 0.015625/0.015625
  a tensor for each: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
LambdaLR, constant and growing
  1.0: 1/0.25, 1/0.5, 1/0.75, 1/1
  tensor(1.0): 0.25/0.25, 0.5/0.5, 0.75/0.75, 1/1
  a tensor for each: 1/0.25, 1/0.5, 1/0.75, 1/1
ExponentialLR, gamma 0.5
  1.0: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
  tensor(1.0): 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
  a tensor for each: 1/1, 0.5/0.5, 0.25/0.25, 0.125/0.125
EXPECTED
