#!/usr/bin/env bash
# torch 2.13.0. After an epoch of uneven batches under `join` the replicas have equal weights and unequal optimizers.
#
# Expected: `with model.join():` around an epoch in which some ranks have more batches leaves all replicas alike, as
# its description says, with no other change to the loop. The next epoch begins as it would on one rank.
# Behaviour: a rank that has run out of batches takes part in the others' communication, but its loop is over: its
# optimizer does not step, and neither does its scheduler. At the end the weights of the last rank are sent to all, and
# nothing else is. Moments and the counts of steps remain what each rank had when it ran out. In the next epoch every
# rank makes another update of the same gradient, so the replicas part with the first step; gradients are means over
# different models until the end of the epoch, when one rank's weights replace all, and so on in each epoch. A
# checkpoint that rank 0 writes can have the weights of a rank that saw more batches, and the optimizer of rank 0. A
# scheduler that steps with the batches has the ranks at different learning rates for good. SGD without momentum is
# right in weights. DistributedDataParallel compares nothing after its start, and nothing is reported.
# What to do: have as many batches on each rank, or after each `join` send the last rank's optimizer state and
# scheduler to all (`broadcast_object_list`), or `throw_on_early_termination=True`, which ends the epoch for all at
# once.
# Who meets it: training for more than one epoch, or over several files with a `join` each, on uneven numbers of
# batches.
#
# Output of 2026-12-01 (2 ranks; three epochs, of 5 batches on rank 0 and of 5 or 6 on rank 1, then one common step;
# distance of the replicas, and the steps that their optimizers have counted):
#   SGD, 0 more: equal after the epochs, after a step equal
#   SGD, 1 more: equal after the epochs, after a step equal
#   SGD with momentum, 0 more: equal after the epochs, after a step equal
#   SGD with momentum, 1 more: equal after the epochs, after a step over a tenth of it apart
#   AdamW, 0 more: equal after the epochs, after a step equal, steps counted [16, 16]
#   AdamW, 1 more: equal after the epochs, after a step over a tenth of it apart, steps counted [16, 19]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
cat >"$folder/uneven.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS, BATCHES = 2, 5


def gathered(weights):
    everyone = [torch.empty_like(weights) for _ in range(RANKS)]
    dist.all_gather(everyone, weights)
    return everyone


def train(rank, more, make):
    """Three epochs, of which rank 1 has one more batch each, and one more step. Distances of the replicas."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    replica = DistributedDataParallel(model)
    optimizer = make(model.parameters())
    data = torch.Generator().manual_seed(rank)

    def weights():
        return torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    def step():
        x, y = torch.randn(4, 8, generator=data), torch.randn(4, 8, generator=data)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(replica(x), y).backward()
        optimizer.step()

    for _ in range(3):
        with replica.join():
            for _ in range(BATCHES + more * rank):
                step()
    after_epochs, before = gathered(weights()), weights()
    step()
    after_step, moved = gathered(weights()), (weights() - before).norm()
    at_epoch = (after_epochs[0] - after_epochs[1]).norm().item()
    share = ((after_step[0] - after_step[1]).norm() / moved).item()
    counts = [None] * RANKS
    dist.all_gather_object(counts, [int(state["step"]) for state in optimizer.state.values() if "step" in state][:1])
    return at_epoch, share, sum(counts, [])


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, make in {
        "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1),
        "SGD with momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
        "AdamW": lambda weights: torch.optim.AdamW(weights, lr=0.01),
    }.items():
        for more in (0, 1):
            at_epoch, share, counts = train(rank, more, make)
            if rank == 0:
                steps = f", steps counted {counts}" if counts else ""
                epoch = "equal" if at_epoch == 0 else "apart"
                step = "equal" if share < 1e-6 else f"over {'a tenth' if share > 0.1 else 0} of it apart"
                print(f"{name}, {more} more: {epoch} after the epochs, after a step {step}{steps}", flush=True)
    dist.destroy_process_group()


main()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/uneven.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
SGD, 0 more: equal after the epochs, after a step equal
SGD, 1 more: equal after the epochs, after a step equal
SGD with momentum, 0 more: equal after the epochs, after a step equal
SGD with momentum, 1 more: equal after the epochs, after a step over a tenth of it apart
AdamW, 0 more: equal after the epochs, after a step equal, steps counted [16, 16]
AdamW, 1 more: equal after the epochs, after a step over a tenth of it apart, steps counted [16, 19]
EXPECTED
