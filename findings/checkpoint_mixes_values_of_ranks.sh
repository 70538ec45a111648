#!/usr/bin/env bash
# torch 2.13.0, gloo, four ranks. A distributed checkpoint of values that differ between ranks is a mixture of the ranks.
#
# Expected: `torch.distributed.checkpoint.save` keeps a tensor or number that is no DTensor, and that every rank passes under the
# same name, as rank 0 has it (or keeps all, or says that they differ).
# Behaviour: one rank writes each name, and the names are dealt out among the ranks so that each writes a like share. So what a
# rank alone knows (position in its data, random generator, counters) is taken from a rank per name, down to the values of one
# dictionary, and after `load` every rank has that mixture, which no rank ever had: here the epoch of rank 0 with the shard of
# rank 1. Which rank a name is taken from changes with what else is saved and with the number of ranks. Nothing is reported.
# Who meets it: loaders and generators whose state is put in the same checkpoint as the weights. A name with the rank in it keeps
# all; `DefaultSavePlanner(dedup_save_to_lowest_rank=True)` keeps rank 0's.
#
# Output of 2026-11-29 (rank from which a value comes after `load`):
#   default: loader.epoch 0, loader.shard 1, loader.seen 2, position 3, generator 0, scale 1
#   lowest rank: loader.epoch 0, loader.shard 0, loader.seen 0, position 0, generator 0, scale 0
#   all ranks have loaded the same: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

dist.init_process_group("gloo")
NOTHING = 99


def state(rank):
    """Values of a rank, all of them its number."""
    return {
        "loader": {"epoch": rank, "shard": rank, "seen": rank},
        "position": torch.tensor([rank]),
        "generator": torch.full((5056,), rank, dtype=torch.uint8),
        "scale": torch.tensor(float(rank)),
    }


def flat(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{name}.")
        else:
            assert not isinstance(value, torch.Tensor) or bool((value == value.flatten()[0]).all())
            yield f"{prefix}{name} {int(value.flatten()[0]) if isinstance(value, torch.Tensor) else value}"


same = True
for name, planner in (("default", DefaultSavePlanner()), ("lowest rank", DefaultSavePlanner(dedup_save_to_lowest_rank=True))):
    folder = f"{sys.argv[1]}/{name}"
    dcp.save(state(dist.get_rank()), checkpoint_id=folder, planner=planner)
    loaded = state(NOTHING)
    dcp.load(loaded, checkpoint_id=folder)
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, ", ".join(flat(loaded)))
    same = same and len(set(lines)) == 1
    if dist.get_rank() == 0:
        print(f"{name}: {lines[0]}", flush=True)
if dist.get_rank() == 0:
    print(f"all ranks have loaded the same: {same}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=4 "$folder/ranks.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
default: loader.epoch 0, loader.shard 1, loader.seen 2, position 3, generator 0, scale 1
lowest rank: loader.epoch 0, loader.shard 0, loader.seen 0, position 0, generator 0, scale 0
all ranks have loaded the same: True
EXPECTED
