#!/usr/bin/env bash
# torchtitan 0.2.2 with torch 2.13.0, one process. `--compile.enable` on gpt-oss: none of the model's blocks is compiled.
#
# Expected: the option compiles every transformer block ("model" is among its components by default), as for its other
# mixtures, or says that it cannot.
# Behaviour: parallelize_gptoss reads the option, passes it to checkpointing, float8 and DDP, and compiles nothing. Nothing is
# logged about it. Only the loss is compiled, by another function, so a run prints that it compiles. Llama 4 of
# the same release compiles its blocks.
# Who meets it: benchmarks of gpt-oss in torchtitan 0.2.2 "with torch.compile".
#
# Output of 2026-11-29:
#   llama4: 6 of 6 blocks have compiled parts
#   gpt_oss: 0 of 4 blocks have compiled parts
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 tyro==1.0.17 triton==3.7.1 torchdata==0.11.0 torchao==0.17.0
"$folder/venv/bin/pip" install --quiet tokenizers datasets einops fsspec pillow tomli tensorboard
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.2.2
cat >"$folder/blocks.py" <<'PYTHON'
import importlib
import os

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

dist.init_process_group("gloo")
for name in ("llama4", "gpt_oss"):
    importlib.import_module(f"torchtitan.models.{name}")
    spec = get_train_spec(name)
    args = spec.model_args["debugmodel"]
    job = JobConfig()
    job.compile.enable = True
    job.activation_checkpoint.mode = "none"
    dims = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    with torch.device("meta"):
        model = spec.model_cls(args)
    spec.parallelize_fn(model, dims, job)

    def is_compiled(module):
        return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None

    blocks = list(model.layers.values())
    compiled = sum(any(is_compiled(part) for part in block.modules()) for block in blocks)
    print(f"{name}: {compiled} of {len(blocks)} blocks have compiled parts")
dist.destroy_process_group()
PYTHON
cd "$folder"
venv/bin/python blocks.py 2>errors | tee output || { tail -5 errors >&2; exit 1; }
diff output - <<'EXPECTED'
llama4: 6 of 6 blocks have compiled parts
gpt_oss: 0 of 4 blocks have compiled parts
EXPECTED
