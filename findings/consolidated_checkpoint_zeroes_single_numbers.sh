#!/usr/bin/env bash
# torch 2.13.0, safetensors 0.8.0, gloo, two ranks. Consolidating a Hugging Face checkpoint turns weights that are one number into 0.
#
# Expected: `HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)`, which writes one safetensors file a rank
# and then joins them to the files that everyone else reads, gives each weight as it was, whatever its shape.
# Behaviour: a tensor without dimensions (`nn.Parameter(torch.tensor(2.66))`) is in the joined file with its name, its shape and
# its type, and with the value 0; the files of the ranks have the right one. The function that copies a shard into place returns
# at once if the shape is empty, which it takes for a tensor without elements. Matrices, vectors of one element and uneven or
# empty shards are right. The three ways to consolidate (with the save, afterwards, and by all ranks) have it. So has a load
# from the joined files: it reads the 0 back. Nothing is reported, sizes and index are right.
# Who meets it: weights that are one number, such as the logit scale of CLIP and learned temperatures, and scales of quantized
# matrices. With a logit scale of 0 the exported CLIP still gives plausible similarities: its temperature is exp(0) = 1.
#
# Output of 2026-11-30 (value saved, in the file of a rank, in the joined file):
#   with the save: matrix True True; vector of one 2.66 2.66 2.66; one number 2.66 2.66 0.00; DTensor of one number 2.66 2.66 0.00
#   afterwards: matrix True True; vector of one 2.66 2.66 2.66; one number 2.66 2.66 0.00; DTensor of one number 2.66 2.66 0.00
#   by all ranks: matrix True True; vector of one 2.66 2.66 2.66; one number 2.66 2.66 0.00; DTensor of one number 2.66 2.66 0.00
#   loaded from the joined files: one number 0.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 safetensors==0.8.0 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files,
    consolidate_safetensors_files_on_every_rank,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
VALUE = 2.66
matrix = torch.randn(7, 5)
state = {
    "matrix": distribute_tensor(matrix, mesh, [Shard(0)]),
    "vector of one": distribute_tensor(torch.tensor([VALUE]), mesh, [Shard(0)]),
    "one number": torch.tensor(VALUE),
    "DTensor of one number": distribute_tensor(torch.tensor(VALUE), mesh, [Replicate()]),
}
files = dict.fromkeys(state, 1)


def read(folder):
    """Every tensor of a folder's files that has elements: all shards of it, in the order of the ranks."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                found.setdefault(name, []).append(file.get_tensor(name))
    return found


def told(name, shards, joined):
    parts = [part for part in shards[name] if part.numel()]
    if name == "matrix":
        return f"{name} {torch.equal(torch.cat(parts), matrix)} {torch.equal(joined[name][0], matrix)}"
    assert joined[name][0].shape == state[name].shape and len(parts) == 1
    return f"{name} {VALUE} {parts[0].item():.2f} {joined[name][0].item():.2f}"


for how in ("with the save", "afterwards", "by all ranks"):
    folder = Path(sys.argv[1]) / how.replace(" ", "_")
    shards, joined = folder / "sharded", folder
    if how == "with the save":
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True)
        dcp.save(state, storage_writer=writer)
    else:
        joined = folder / "joined"
        if rank == 0:
            joined.mkdir(parents=True)
        dist.barrier()
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(shards), fqn_to_index_mapping=files, save_distributed=True))
        if how == "by all ranks":
            consolidate_safetensors_files_on_every_rank(str(shards), str(joined), files)
        elif rank == 0:
            consolidate_safetensors_files(str(shards), str(joined), files)
    dist.barrier()
    if rank == 0:
        of_ranks, of_all = read(shards), read(joined)
        print(f"{how}: {'; '.join(told(name, of_ranks, of_all) for name in state)}", flush=True)

loaded = {name: torch.full_like(value, 9) for name, value in state.items()}
dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(Path(sys.argv[1]) / "with_the_save")))
if rank == 0:
    print(f"loaded from the joined files: one number {loaded['one number'].item():.2f}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
with the save: matrix True True; vector of one 2.66 2.66 2.66; one number 2.66 2.66 0.00; DTensor of one number 2.66 2.66 0.00
afterwards: matrix True True; vector of one 2.66 2.66 2.66; one number 2.66 2.66 0.00; DTensor of one number 2.66 2.66 0.00
by all ranks: matrix True True; vector of one 2.66 2.66 2.66; one number 2.66 2.66 0.00; DTensor of one number 2.66 2.66 0.00
loaded from the joined files: one number 0.00
EXPECTED
