#!/usr/bin/env bash
# torch 2.13.0. Local SGD by torch's model averagers mixes different weights when ranks use different experts.
#
# Expected: `average_parameters(model.parameters())` of PeriodicModelAverager or HierarchicalModelAverager gives each
# parameter the mean of its values on all ranks.
# Behaviour: parameters without a gradient on a rank are left out on that rank. The others are put end to end into one
# buffer, which is summed over the ranks place by place, without names or shapes. Where the ranks used different parts
# of the model, experts or branches for a modality, the buffers hold different parameters, and when the sizes agree
# each rank gets the mean of its own expert and of the other rank's: both experts are lost on both ranks. What lies
# behind a part of another size is shifted. Experts of one size give buffers of one length, so nothing fails.
# Parameters that every rank left out are averaged never, and those that some left out are wrong from then on. The
# description says only that the parameters are averaged. PostLocalSGDOptimizer calls the same function. Under
# DistributedDataParallel with `find_unused_parameters=True` a parameter that any rank used has a gradient everywhere,
# zeros if need be, and the means are right; local SGD without it is not.
# What to do: give each parameter without a gradient one of zeros before the averager is called, and only after the
# step.
# Who meets it: local SGD and methods on top of it (averagers of torch.distributed.algorithms) with mixtures of
# experts, adapters for tasks or modalities, or layers that are dropped at random on each rank.
#
# Output of 2026-12-01 (2 ranks, weights of the first expert all 10 and of the second all 20 on both, 4 steps at rate
# 0, so that nothing but the averaging can change them; the experts' mean weights afterwards):
#   both ranks use the same expert: rank 0 has 10.0 and 20.0, rank 1 has 10.0 and 20.0
#   each rank uses its own expert: rank 0 has 15.0 and 20.0, rank 1 has 10.0 and 15.0
#   each rank uses its own expert, zeros for missing gradients: rank 0 has 10.0 and 20.0, rank 1 has 10.0 and 20.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
cat >"$folder/averaged.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

RANKS = 2


class Model(torch.nn.Module):
    """A shared layer and two experts of one size, the first of which is 10 everywhere and the second 20."""

    def __init__(self):
        super().__init__()
        self.shared = torch.nn.Linear(4, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        for expert, value in zip(self.experts, (10.0, 20.0)):
            torch.nn.init.constant_(expert.weight, value)

    def forward(self, x, expert):
        return self.experts[expert](self.shared(x))


def train(rank, chosen, averaged):
    """Four steps at rate 0, averaged after the second and the fourth: averaging equal replicas changes nothing."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    averager = PeriodicModelAverager(period=2)
    for step in range(4):
        model(torch.randn(2, 4), chosen(rank, step)).sum().backward()
        optimizer.step()
        averaged(averager, model)
        optimizer.zero_grad()
    values = [None] * RANKS
    dist.all_gather_object(values, [round(expert.weight.mean().item(), 1) for expert in model.experts])
    return values


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def as_is(averager, model):
        averager.average_parameters(model.parameters())

    def with_zeros(averager, model):
        for weight in model.parameters():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        as_is(averager, model)

    for name, chosen, averaged in (
        ("both ranks use the same expert", lambda rank, step: 0, as_is),
        ("each rank uses its own expert", lambda rank, step: rank, as_is),
        ("each rank uses its own expert, zeros for missing gradients", lambda rank, step: rank, with_zeros),
    ):
        values = train(rank, chosen, averaged)
        if rank == 0:
            found = ", ".join(f"rank {r} has {first} and {second}" for r, (first, second) in enumerate(values))
            print(f"{name}: {found}", flush=True)
    dist.destroy_process_group()


main()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/averaged.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
both ranks use the same expert: rank 0 has 10.0 and 20.0, rank 1 has 10.0 and 20.0
each rank uses its own expert: rank 0 has 15.0 and 20.0, rank 1 has 10.0 and 15.0
each rank uses its own expert, zeros for missing gradients: rank 0 has 10.0 and 20.0, rank 1 has 10.0 and 20.0
EXPECTED
