#!/usr/bin/env bash
# prodigyopt 1.1.2, torch 2.13.0, gloo. Under FSDP2 each rank trains its part of the weights at a rate of its own.
#
# Expected: Prodigy finds one rate d for the model from the gradients of all weights, however they are sharded, since it
# says that it detects sharded weights by itself.
# Behaviour: what it looks for is an attribute that only the weights of the first FSDP have. The DTensors of FSDP2 do
# not have it. The two sums that d is made of are then read by `.item()` of a DTensor, which is the rank's part, and
# never added up, so that each rank finds the d of its own rows: those of frequent words another than those of rare
# ones. The parts of one matrix are trained at rates that differ by up to 1.8 times here on four ranks, and by more the
# less alike the parts are. d only grows, so that an early difference stays to the end. The loss falls all the same, the
# log of rank 0 shows one number, and a sharded checkpoint has one value for all ranks (the d of one and the greatest d
# of another, in a trial), so that a run resumes at other rates than it had. A matrix with fewer rows than ranks raises
# an error; without one, nothing is reported. `fsdp_in_use=True` gives all ranks the d of the whole model.
# Who meets it: fine-tuning with Prodigy (adapters, full models) after a move from one GPU, DDP or the first FSDP to
# FSDP2.
#
# Output of 2026-12-01 (d of each rank after 100 steps):
#   1 rank: 0.025
#   4 ranks: 0.018 0.027 0.026 0.032
#   4 ranks, fsdp_in_use: 0.025 0.025 0.025 0.025
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 prodigyopt==1.1.2 2>/dev/null
cat >"$folder/rates.py" <<'PYTHON'
import sys

import prodigyopt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORDS, STEPS = 512, 100


def estimate(ranks, **settings):
    """The estimate d, a factor of the rate, after training on words whose frequencies fall as 1 / their number."""
    torch.manual_seed(0)
    layers = torch.nn.Embedding(WORDS, 64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, WORDS)
    model = torch.nn.Sequential(*layers)
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = prodigyopt.Prodigy(model.parameters(), lr=1.0, **settings)
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(0, WORDS, (WORDS,), generator=generator)
    often = 1 / torch.arange(1, WORDS + 1).float()
    for _ in range(STEPS):
        words = torch.multinomial(often, 1024, replacement=True, generator=generator)
        noise = torch.rand(1024, generator=generator) < 0.2
        others = torch.multinomial(often, 1024, replacement=True, generator=generator)
        targets = torch.where(noise, others, following[words])
        torch.nn.functional.cross_entropy(model(words), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor([float(optimizer.param_groups[0]["d"])])


def run(rank, ranks, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    torch.Tensor.cuda = lambda tensor: tensor  # what fsdp_in_use sums over the ranks would be on a GPU
    for settings in [{}] if ranks == 1 else [{}, {"fsdp_in_use": True}]:
        each = [torch.zeros(1) for _ in range(ranks)]
        dist.all_gather(each, estimate(ranks, **settings))
        if rank == 0:
            told = " ".join(f"{value.item():.3f}" for value in each)
            print(f"{ranks} rank{'s' * (ranks > 1)}{''.join(f', {name}' for name in settings)}: {told}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for ranks in (1, 4):
        torch.multiprocessing.spawn(run, (ranks, sys.argv[1]), nprocs=ranks)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/rates.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
1 rank: 0.025
4 ranks: 0.018 0.027 0.026 0.032
4 ranks, fsdp_in_use: 0.025 0.025 0.025 0.025
EXPECTED
