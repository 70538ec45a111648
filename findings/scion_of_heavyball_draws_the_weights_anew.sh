#!/usr/bin/env bash
# heavyball 3.2.1, torch 2.13.0. The first step of its Scion throws the weights of the model away.
#
# Expected: an optimizer changes the weights that it is given by its updates. With a learning rate near 0 a trained
# model stays as it is, and a run may begin at trained weights: fine-tuning, a change of optimizers, a run that goes on
# with the weights alone.
# Behaviour: heavyball.Scion initializes each parameter in its first step. A matrix becomes a drawn orthogonal one,
# times the root of the quotient of its sides, and everything with fewer dimensions becomes 0: biases, and the gains of
# norms as well, whose layers are then shut. The flag that it has been done is in the state of each parameter, so a
# loaded optimizer state protects a run, and a parameter that joins later loses its values later. The seed is the
# parameter's place in its group, so with a group for each layer (a learning rate for each depth) all matrices of one
# shape begin equal. The authors' implementation leaves the initialization to a call of its own, `init()`; here it
# cannot be turned off. Neither the optimizer's description nor the package's README says that the step does it, and
# nothing is reported. The SCION of pytorch_optimizer 4.1.0 leaves weights alone.
# What to do: use that, or put the weights back after a first step, whose momentum is right.
# Who meets it: anyone who gives heavyball.Scion weights that are worth something, or an initialization of their own.
#
# Output of 2026-12-01 (a network trained to a loss under 0.01, one step at learning rate 1e-6):
#   heavyball.AdamW: loss under 0.01, gains about 1, matrices of two layers differ
#   heavyball.Muon: loss under 0.01, gains about 1, matrices of two layers differ
#   pytorch_optimizer.SCION: loss under 0.01, gains about 1, matrices of two layers differ
#   heavyball.Scion: loss over 0.5, gains about 0, matrices of two layers differ
#   heavyball.Scion, a group for each layer: loss over 0.5, gains about 0, matrices of two layers equal
#   heavyball.Scion, weights put back, second step: loss under 0.01, gains about 1, matrices of two layers differ
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages=(torch==2.13.0 numpy==2.4.6 heavyball==3.2.1 pytorch_optimizer==4.1.0)
"$folder/venv/bin/pip" install --quiet "${packages[@]}" 2>/dev/null
cat >"$folder/anew.py" <<'PYTHON'
import copy

import heavyball
import pytorch_optimizer
import torch

torch.manual_seed(0)
trained = torch.nn.Sequential(
    torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
)
x, y = torch.randn(16, 32), torch.randn(16, 32)


def step(model, optimizer):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


adam = torch.optim.Adam(trained.parameters(), lr=1e-3)
for _ in range(1000):
    step(trained, adam)


def layers(model):
    return [{"params": list(layer.parameters())} for layer in model if list(layer.parameters())]


def report(name, model):
    loss = torch.nn.functional.mse_loss(model(x), y).item()
    loss = "under 0.01" if loss < 0.01 else "over 0.5" if loss > 0.5 else f"{loss:.3f}"
    equal = "equal" if torch.allclose(model[3].weight, model[4].weight, atol=1e-4) else "differ"
    gains = abs(model[2].weight.mean())
    print(f"{name}: loss {loss}, gains about {gains:.0f}, matrices of two layers {equal}", flush=True)


for name, make, groups in (
    ("heavyball.AdamW", heavyball.AdamW, torch.nn.Module.parameters),
    ("heavyball.Muon", heavyball.Muon, torch.nn.Module.parameters),
    ("pytorch_optimizer.SCION", pytorch_optimizer.SCION, torch.nn.Module.parameters),
    ("heavyball.Scion", heavyball.Scion, torch.nn.Module.parameters),
    ("heavyball.Scion, a group for each layer", heavyball.Scion, layers),
):
    model = copy.deepcopy(trained)
    step(model, make(groups(model), lr=1e-6))
    report(name, model)
model = copy.deepcopy(trained)
optimizer = heavyball.Scion(model.parameters(), lr=1e-6)
step(model, optimizer)
model.load_state_dict(trained.state_dict())
step(model, optimizer)
report("heavyball.Scion, weights put back, second step", model)
PYTHON
TORCHDYNAMO_DISABLE=1 "$folder/venv/bin/python" "$folder/anew.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
heavyball.AdamW: loss under 0.01, gains about 1, matrices of two layers differ
heavyball.Muon: loss under 0.01, gains about 1, matrices of two layers differ
pytorch_optimizer.SCION: loss under 0.01, gains about 1, matrices of two layers differ
heavyball.Scion: loss over 0.5, gains about 0, matrices of two layers differ
heavyball.Scion, a group for each layer: loss over 0.5, gains about 0, matrices of two layers equal
heavyball.Scion, weights put back, second step: loss under 0.01, gains about 1, matrices of two layers differ
EXPECTED
