#!/usr/bin/env bash
# torchtitan 0.3.0 with torch 2.13.0, two ranks on a CPU. Its defaults need torch 2.14, and nothing says so.
#
# Expected: pip refuses torch 2.13 for torchtitan 0.3.0, or the package works with it: the API that is new to torchtitan
# in this release, torch.distributed.fsdp.DataParallelMeshDims, is in torch 2.13.
# Behaviour: the package requires no version of torch. It can be imported, its configurations are read and one rank trains.
# On two ranks the default parallelism.spmd_backend, spmd_types, fails: FSDP takes the annotated plain tensors of spmd_types
# only from torch 2.14 on (pytorch/pytorch#181519). partial_dtensor works. Its pipelines fail with every backend: the trainer
# calls `schedule.step(arg_mbs=...)`, and schedules have that argument from torch 2.14 on.
# Who meets it: everyone who installs torchtitan 0.3.0 beside the torch that is there.
#
# Output of 2026-11-27:
#   requirements that name torch: none
#   spmd_types: ValueError: When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh
#   partial_dtensor: 45 parameters sharded
#   schedules take lists of micro-batches: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring_parser==0.18.0 \
  typeguard==4.6.0 triton==3.7.1 torchdata==0.11.0 tensorboard==2.21.0 absl-py==2.5.1 protobuf==7.36.2 \
  tokenizers==0.23.3 huggingface_hub==2.4.0 httpx2==2.16.2 httpcore2==2.16.2 h11==0.16.0 anyio==4.16.0 truststore==0.10.5 \
  tqdm==4.70.1 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 pyarrow==26.0.1 pandas==3.1.1 \
  python-dateutil==4.0.0 six==1.17.0 requests==2.34.2 urllib3==2.7.0 idna==3.20 certifi==2026.10.18 \
  charset-normalizer==3.4.5 PyYAML==6.0.3 packaging==26.3 pillow==13.0.0
cat >"$folder/ranks.py" <<'PYTHON'
import importlib.metadata
import inspect
import sys

import torch
import torch.distributed as dist
import torchtitan.trainer
from torch.distributed.pipelining import ScheduleGPipe
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims

for module in list(sys.modules.values()):  # torchtitan takes a machine without accelerator for one with CUDA
    if module.__name__.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
        module.device_type = "cpu"
dist.init_process_group("gloo")
lines = [f"requirements that name torch: {[r for r in importlib.metadata.requires('torchtitan') if r.split()[0].startswith('torch>')] or 'none'}"]
for backend in ("spmd_types", "partial_dtensor"):
    arguments = ["--module", "llama3", "--config", "llama3_debugmodel", "--parallelism.spmd_backend", backend]
    config = ConfigManager().parse_args(arguments)
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    try:
        spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(config.parallelism, 2),
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder="",
        )
        lines.append(f"{backend}: {sum(p.device_mesh.size() == 2 for p in model.parameters())} parameters sharded")
    except ValueError as error:
        lines.append(f"{backend}: ValueError: {str(error).partition(' (')[0]}")
lines.append(f"schedules take lists of micro-batches: {'arg_mbs' in inspect.signature(ScheduleGPipe.step).parameters}")
if dist.get_rank() == 0:
    print("\n".join(lines))
dist.destroy_process_group()
PYTHON
cd "$folder"
venv/bin/torchrun --standalone --nproc-per-node 2 ranks.py 2>errors | tee output
diff output - <<'EXPECTED'
requirements that name torch: none
spmd_types: ValueError: When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh
partial_dtensor: 45 parameters sharded
schedules take lists of micro-batches: False
EXPECTED
