#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. `torch.optim.Adafactor` cannot step a matrix that `fully_shard` has sharded.
#
# Expected: torch's optimizers step FSDP2's weights; AdamW does, and Muon does, though it needs whole matrices.
# Behaviour: the first step raises a RuntimeError from the middle of the optimizer, with `foreach` and without: a norm along a
# row is a partial result over the shards, and the in-place square of it is refused. Nothing before the step says so.
# Who meets it: whoever takes torch's Adafactor to save the second moment of a model that is sharded anyway.
#
# Output of 2026-11-28:
#   AdamW: stepped
#   Muon: stepped
#   Adafactor: RuntimeError, in-place operations that require placement changes are not supported
#   Adafactor, foreach: RuntimeError, in-place operations that require placement changes are not supported
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import re

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
for name, kind, options in [
    ("AdamW", torch.optim.AdamW, {}),
    ("Muon", torch.optim.Muon, {}),
    ("Adafactor", torch.optim.Adafactor, {}),
    ("Adafactor, foreach", torch.optim.Adafactor, {"foreach": True}),
]:
    layer = fully_shard(torch.nn.Linear(64, 96, bias=False), mesh=mesh)
    optimizer = kind(layer.parameters(), **options)
    layer(torch.ones(4, 64)).sum().backward()
    try:
        optimizer.step()
        outcome = "stepped"
    except RuntimeError as error:
        reason = re.search(r"in-place operations[^.]*", str(error))
        outcome = f"RuntimeError, {reason.group() if reason else error}"
    if dist.get_rank() == 0:
        print(f"{name}: {outcome}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" -m torch.distributed.run --nproc-per-node=2 --master-port=29574 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
AdamW: stepped
Muon: stepped
Adafactor: RuntimeError, in-place operations that require placement changes are not supported
Adafactor, foreach: RuntimeError, in-place operations that require placement changes are not supported
EXPECTED
