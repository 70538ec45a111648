#!/usr/bin/env bash
# torch 2.13.0. Under Join, a rank that has run out of batches updates its share of ZeroRedundancyOptimizer by its last
# gradient.
#
# Expected: `with Join([model, optimizer])`, with DistributedDataParallel and ZeroRedundancyOptimizer, trains on uneven
# numbers of batches as DistributedDataParallel with the same optimizer unsharded does. It is the example of Join's
# description, which promises correctness, and of the tutorial.
# Behaviour: each weight is updated on one rank. A rank that has joined takes part in the sums of gradients with zeros
# and throws their results away: its hook sums copies of the buckets, not the gradients of the weights. The optimizer's
# hook then steps, since the other ranks wait for its weights, and steps by what the gradients hold: those of the
# rank's last batch, again for every batch that the others still have. All weights that the rank owns, about the
# model's size divided by the ranks, move on by an old gradient and are sent to everybody; the others' gradients are
# then those at wrong weights. Where gradients are cleared after the step, as many loops do, these weights get no
# updates instead. Gradients as views of the buckets change nothing. Replicas stay alike, and nothing is reported.
# What to do: have as many batches on each rank (drop or pad the rest), or `throw_on_early_termination=True`, or an
# optimizer that isn't sharded, for which however see the state that it keeps after an uneven epoch.
# Who meets it: data parallel training with ZeroRedundancyOptimizer on shards or documents of uneven number.
#
# Output of 2026-12-01 (2 ranks, two matrices, of which each rank owns one; 5 batches on rank 0, and 5 and some more on
# rank 1; distance of the trained weights to those of the same optimizer unsharded):
#   SGD, no more batches: matrix of rank 0 right, of rank 1 right
#   SGD, 1 more batch: matrix of rank 0 over 10 % off, of rank 1 right
#   SGD, 3 more batches: matrix of rank 0 over 10 % off, of rank 1 over 1 % off
#   AdamW, 3 more batches: matrix of rank 0 over 1 % off, of rank 1 under 1 % off
#   SGD, 3 more batches, gradients as views of buckets: matrix of rank 0 over 10 % off, of rank 1 over 1 % off
#   SGD, 3 more batches, gradients cleared after the step: matrix of rank 0 over 10 % off, of rank 1 over 1 % off
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
cat >"$folder/joined.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

RANKS, BATCHES = 2, 5


def train(rank, more, kind, options, sharded, cleared_after=False, views=False):
    """The two matrices after one epoch, of which rank 1 has some more batches than rank 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    replica = DistributedDataParallel(model, gradient_as_bucket_view=views)
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    else:
        optimizer = kind(model.parameters(), **options)
    data = torch.Generator().manual_seed(rank)
    with Join([replica, optimizer] if sharded else [replica]):
        for _ in range(BATCHES + more * rank):
            x, y = torch.randn(4, 8, generator=data), torch.randn(4, 8, generator=data)
            if not cleared_after:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(replica(x), y).backward()
            optimizer.step()
            if cleared_after:
                optimizer.zero_grad()
    return [weight.detach().clone() for weight in model.parameters()]


def off(got, right):
    distance = ((got - right).norm() / right.norm()).item()
    if distance < 1e-6:
        return "right"
    return next((f"over {part} % off" for part in (10, 1) if distance > part / 100), "under 1 % off")


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    sgd, adam = (torch.optim.SGD, {"lr": 0.5}), (torch.optim.AdamW, {"lr": 0.01})
    for name, more, chosen, options in (
        ("SGD, no more batches", 0, sgd, {}),
        ("SGD, 1 more batch", 1, sgd, {}),
        ("SGD, 3 more batches", 3, sgd, {}),
        ("AdamW, 3 more batches", 3, adam, {}),
        ("SGD, 3 more batches, gradients as views of buckets", 3, sgd, {"views": True}),
        ("SGD, 3 more batches, gradients cleared after the step", 3, sgd, {"cleared_after": True}),
    ):
        right = train(rank, more, *chosen, sharded=False)
        first, second = map(off, train(rank, more, *chosen, sharded=True, **options), right)
        if rank == 0:
            print(f"{name}: matrix of rank 0 {first}, of rank 1 {second}", flush=True)
    dist.destroy_process_group()


main()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/joined.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
SGD, no more batches: matrix of rank 0 right, of rank 1 right
SGD, 1 more batch: matrix of rank 0 over 10 % off, of rank 1 right
SGD, 3 more batches: matrix of rank 0 over 10 % off, of rank 1 over 1 % off
AdamW, 3 more batches: matrix of rank 0 over 1 % off, of rank 1 under 1 % off
SGD, 3 more batches, gradients as views of buckets: matrix of rank 0 over 10 % off, of rank 1 over 1 % off
SGD, 3 more batches, gradients cleared after the step: matrix of rank 0 over 10 % off, of rank 1 over 1 % off
EXPECTED
