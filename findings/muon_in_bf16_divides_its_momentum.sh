#!/usr/bin/env bash
# torch 2.13.0. `torch.optim.Muon(nesterov=False)` on bf16 parameters divides its own momentum by the momentum's norm.
#
# Expected: a step reads the momentum, and only the next gradient changes it.
# Behaviour: the orthogonalisation casts its input to bf16 and divides the result by its norm in place. The cast of a bf16
# tensor is that tensor, and without Nesterov's look-ahead the input is the momentum itself. After every step the momentum has
# norm 1, so a new gradient outweighs all earlier ones by its norm, or vanishes beside them. In fp32, or with Nesterov's
# look-ahead (the default), the momentum is as it should be. PyTorch's main branch copies since August 2026 (pull request 194664).
# Who meets it: Muon with weights kept in bf16, to save the master copies.
#
# Output of 2026-11-28 (norms of the momentum after four steps with one gradient of norm 45.25, momentum 0.5, lr 0):
#   nesterov=True torch.float32 [22.63, 33.94, 39.6, 42.43]
#   nesterov=True torch.bfloat16 [22.63, 33.94, 39.6, 42.43]
#   nesterov=False torch.float32 [22.63, 33.94, 39.6, 42.43]
#   nesterov=False torch.bfloat16 [1.0, 1.0, 1.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/momentum.py" <<'PYTHON'
import torch

for nesterov in (True, False):
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.zeros(8, 16, dtype=dtype))
        weight.grad = torch.full_like(weight, 4.0)
        optimizer = torch.optim.Muon([weight], lr=0.0, weight_decay=0.0, momentum=0.5, nesterov=nesterov)
        norms = []
        for _ in range(4):
            optimizer.step()
            norms.append(round(optimizer.state[weight]["momentum_buffer"].float().norm().item(), 2))
        print(f"nesterov={nesterov} {dtype} {norms}")
PYTHON
"$folder/venv/bin/python" "$folder/momentum.py" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
nesterov=True torch.float32 [22.63, 33.94, 39.6, 42.43]
nesterov=True torch.bfloat16 [22.63, 33.94, 39.6, 42.43]
nesterov=False torch.float32 [22.63, 33.94, 39.6, 42.43]
nesterov=False torch.bfloat16 [1.0, 1.0, 1.0, 1.0]
EXPECTED
