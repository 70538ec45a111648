#!/usr/bin/env bash
# heavyball 3.2.1, torchao 0.18.0, pytorch_optimizer 4.1.0, torch 2.13.0. Replicas drift apart under optimizers that
# draw random numbers.
#
# Expected: the replicas of DistributedDataParallel begin alike and get the same gradients, so any optimizer keeps them
# alike. Each rank has its own seed, so that dropout and augmentation differ between ranks; the optimizer has nothing
# to do with it.
# Behaviour: some optimizers draw from the rank's global generator, and each replica takes another step from the same
# gradient. heavyball rounds weights in bf16 stochastically, by default and in all its optimizers. torchao does it with
# `bf16_stochastic_round=True`, Rose of pytorch_optimizer in bf16 by default. PSGD of both packages draws the vectors
# that it probes its preconditioner with, in float32 as well. The weights part like random walks: after 100 steps the
# replicas are apart by 13 % to 53 % of the way that training has gone. Gradients are then means over different models,
# checkpoints and evaluations are those of rank 0, and a resumption, which gives all ranks the weights of rank 0,
# changes the model of the others in one step. DistributedDataParallel compares nothing after its construction, the
# loss falls, nothing is reported. heavyball's README says that DDP works, of seeds nothing. Compiled steps draw from
# the rank's seed alike.
# What to do: draw the optimizer's numbers from one seed on all ranks: `with torch.random.fork_rng():
# torch.manual_seed(step); optimizer.step()`, with numpy's as well for Kron; or shard the weights, so that there is one
# copy.
# Who meets it: data parallel training in bf16 weights with stochastic rounding, or by PSGD, with a seed for each rank.
#
# Output of 2026-12-01 (2 ranks, 100 steps; distance of the replicas beside the way that they went, with a seed for
# each rank and with one for both):
#   torch AdamW, bf16: own seeds equal, one seed equal
#   heavyball AdamW, bf16: own seeds over 5 % apart, one seed equal
#   torchao _AdamW with bf16_stochastic_round, bf16: own seeds over 5 % apart, one seed equal
#   pytorch_optimizer Rose, bf16: own seeds over 5 % apart, one seed equal
#   pytorch_optimizer Kron, float32: own seeds over 5 % apart, one seed equal
#   heavyball PSGDKron, float32: own seeds over 5 % apart, one seed equal
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages=(torch==2.13.0 numpy==2.4.6 heavyball==3.2.1 torchao==0.18.0 pytorch_optimizer==4.1.0)
"$folder/venv/bin/pip" install --quiet "${packages[@]}" 2>/dev/null
cat >"$folder/replicas.py" <<'PYTHON'
import random

import heavyball
import pytorch_optimizer
import torch
import torch.distributed as dist
import torchao.optim
from torch.nn.parallel import DistributedDataParallel

RANKS, STEPS = 2, 100


def stochastic(weights, lr):
    return torchao.optim._AdamW(weights, lr=lr, bf16_stochastic_round=True)


RUNS = (
    ("torch AdamW, bf16", torch.optim.AdamW, torch.bfloat16),
    ("heavyball AdamW, bf16", heavyball.AdamW, torch.bfloat16),
    ("torchao _AdamW with bf16_stochastic_round, bf16", stochastic, torch.bfloat16),
    ("pytorch_optimizer Rose, bf16", pytorch_optimizer.load_optimizer("rose"), torch.bfloat16),
    ("pytorch_optimizer Kron, float32", pytorch_optimizer.load_optimizer("kron"), torch.float32),
    ("heavyball PSGDKron, float32", heavyball.PSGDKron, torch.float32),
)


def weights_of(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().double()


def distance(rank, make, dtype, seed):
    """How far apart the replicas are after training, beside the length of the way that they have gone."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).to(dtype)
    begun = weights_of(model)
    replica = DistributedDataParallel(model)
    optimizer = make(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(rank)
    torch.manual_seed(seed)
    random.seed(seed)
    for _ in range(STEPS):
        x, y = (torch.randn(8, 64, generator=data).to(dtype) for _ in range(2))
        optimizer.zero_grad()
        (replica(x) - y).float().square().mean().backward()
        optimizer.step()
    everyone = [torch.empty_like(begun) for _ in range(RANKS)]
    dist.all_gather(everyone, weights_of(model))
    return ((everyone[0] - everyone[1]).norm() / (everyone[0] - begun).norm()).item()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, make, dtype in RUNS:
        found = []
        for seed in (1 + rank, 1):
            apart = distance(rank, make, dtype, seed)
            found.append("equal" if apart < 1e-3 else "over 5 % apart" if apart > 0.05 else f"{apart:.4f} apart")
        if rank == 0:
            print(f"{name}: own seeds {found[0]}, one seed {found[1]}", flush=True)
    dist.destroy_process_group()


main()
PYTHON
export TORCHDYNAMO_DISABLE=1
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/replicas.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
torch AdamW, bf16: own seeds equal, one seed equal
heavyball AdamW, bf16: own seeds over 5 % apart, one seed equal
torchao _AdamW with bf16_stochastic_round, bf16: own seeds over 5 % apart, one seed equal
pytorch_optimizer Rose, bf16: own seeds over 5 % apart, one seed equal
pytorch_optimizer Kron, float32: own seeds over 5 % apart, one seed equal
heavyball PSGDKron, float32: own seeds over 5 % apart, one seed equal
EXPECTED
