#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, gloo. A run resumed from a universal checkpoint of ZeRO-3 has the weight decay and
# the learning rate of its first parameter group in all groups.
#
# Expected: a universal checkpoint, made to resume on another number of ranks, brings back what the plain one does:
# each group its own learning rate, weight decay and betas, as ZeRO-1 and -2 do.
# Behaviour: on loading under ZeRO-3 the settings of group 0 are written over those of every group, for they "should
# be the same" (a comment in the loader). The usual second group, norms, biases and embeddings without weight decay,
# decays from then on like the matrices, and a head, an adapter or scaled matrices (muP) with a rate of their own lose
# it. A LambdaLR sets the rates again from its base after one step; nothing sets the weight decay again, and the next
# checkpoint saves it. Weights and moments are exact, the loss goes on where it was, and nothing is reported. Setting
# the groups' values again after `load_checkpoint` is right.
# Who meets it: ZeRO-3 runs that go on with more or fewer GPUs, after nodes were lost for example.
#
# Output of 2026-12-01 (learning rate and weight decay of both groups before saving and after loading, on other
# ranks):
#   ZeRO-2, two ranks, before: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
#   ZeRO-2, two ranks, plain checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
#   ZeRO-2, one rank, universal checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
#   ZeRO-3, two ranks, before: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
#   ZeRO-3, two ranks, plain checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
#   ZeRO-3, one rank, universal checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.002 decay 0.1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 deepspeed==0.19.8 2>/dev/null
cat >"$folder/resume.py" <<'PYTHON'
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO

stage, folder, verb = int(sys.argv[1]), sys.argv[2], sys.argv[3]
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
wide, narrow = torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 8, bias=False)
model = torch.nn.Sequential(wide, torch.nn.LayerNorm(16), narrow)
norm = list(model[1].parameters())
matrices = [wide.weight, narrow.weight]
groups = [
    {"params": matrices, "lr": 0.002, "weight_decay": 0.1},
    {"params": norm, "lr": 0.001, "weight_decay": 0.0},
]
config = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8 // dist.get_world_size(),
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
    "checkpoint": {"load_universal": verb == "universal"},
}
engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups), config=config)[0]
# what the conversion asks for under ZeRO-1 and -2
client = {UNIVERSAL_CHECKPOINT_INFO: {"universal_checkpoint_version": 0.2}} if stage < 3 else {}


def loss(batch):
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(batch))
    part = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    return (engine(part) - part).pow(2).mean()


def show(name):
    texts = [f"lr {group['lr']} decay {group['weight_decay']}" for group in engine.optimizer.param_groups]
    if dist.get_rank() == 0:
        print(f"ZeRO-{stage}, {name}: matrices {texts[0]}, norms {texts[1]}", file=sys.stderr, flush=True)


if verb == "save":
    for batch in range(4):
        engine.backward(loss(batch))
        engine.step()
    engine.save_checkpoint(folder, tag="plain", client_state=client)
    show("two ranks, before")
elif verb == "plain":
    engine.load_checkpoint(folder, tag="plain")
    show("two ranks, plain checkpoint")
else:
    engine.load_checkpoint(folder, tag="universal")
    show("one rank, universal checkpoint")
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$folder/extensions
run() { # run RANKS STAGE VERB
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node "$1" \
    "$folder/resume.py" "$2" "$folder/zero-$2" "$3" 2>&1 >/dev/null | { grep -a "^ZeRO" || true; }
}
for stage in 2 3; do
  run 2 "$stage" save
  run 2 "$stage" plain
  "$folder/venv/bin/python" -m deepspeed.checkpoint.ds_to_universal --input_folder "$folder/zero-$stage/plain" \
    --output_folder "$folder/zero-$stage/universal" >/dev/null 2>&1
  run 1 "$stage" universal
done | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
ZeRO-2, two ranks, before: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
ZeRO-2, two ranks, plain checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
ZeRO-2, one rank, universal checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
ZeRO-3, two ranks, before: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
ZeRO-3, two ranks, plain checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.001 decay 0.0
ZeRO-3, one rank, universal checkpoint: matrices lr 0.002 decay 0.1, norms lr 0.002 decay 0.1
EXPECTED
