#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. FSDP2 adds the gradients of different experts where ranks have used different ones.
#
# Expected: a module that a rank's tokens did not visit counts as a gradient of zero there, as with DDP
# (`find_unused_parameters`) and the flat parameters of FSDP1; or there is an error, as DDP has one without that option.
# Behaviour: each rank puts the gradients that it has into the buffer of the reduction, one after another, and leaves out those
# that are None. If two ranks have used as many parameters of the same sizes, the buffers fit, and what is added is the first
# used expert of one with the first used expert of the other. An expert that both ranks used is mixed up with the rest, too. Each
# rank then writes the result to the weights it has used itself: half of an expert's rows move by a sum that belongs to nobody,
# the other half do not move. Losses go on falling, and nothing is reported. `set_reduce_scatter_unused_params(True)`, which is
# off by default, gives the right gradients; its docstring speaks of mismatched collectives, which one takes for a hang.
# Who meets it: experts in an `nn.ModuleList` that skip when no token comes, adapters by task, encoders by kind of input.
#
# Output of 2026-11-29 (gradient of experts 0, 1, 2; tokens of rank 0 visit experts 0 and 1, those of rank 1 experts 1 and 2):
#   mean of both ranks: 0.5 3.0 4.0
#   DDP, unused found: rank 0 has 0.5 3.0 4.0, rank 1 has 0.5 3.0 4.0
#   FSDP2: rank 0 has 2.5 5.0 None, rank 1 has None 2.5 5.0
#   FSDP2, unused reduced: rank 0 has 0.5 3.0 4.0, rank 1 has 0.5 3.0 4.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/experts.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

WIDTH, EXPERTS = 4, 3
TOKENS = ({0: 1.0, 1: 2.0}, {1: 4.0, 2: 8.0})  # value of the token that a rank sends to each of its experts

dist.init_process_group("gloo")
rank = dist.get_rank()


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, tokens):
        return sum(self.experts[expert](torch.full((1, WIDTH), value)).sum() for expert, value in tokens.items())


def shown(model):
    """The mean gradient of each expert on this rank, of the rows that the rank holds, gathered from both ranks as text."""
    model(TOKENS[rank]).backward()
    texts = []
    for weight in model.parameters():
        gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
        texts.append(str(gradient if gradient is None else gradient.mean().item()))
    gathered = [None, None]
    dist.all_gather_object(gathered, " ".join(texts))
    return ", ".join(f"rank {at} has {text}" for at, text in enumerate(gathered))


def sharded(reduces_unused):
    model = fully_shard(Mixture(), mesh=init_device_mesh("cpu", (2,)))
    if reduces_unused:
        model.set_reduce_scatter_unused_params(True)
    return model


means = [sum(tokens.get(expert, 0.0) for tokens in TOKENS) / 2 for expert in range(EXPERTS)]
lines = [
    f"mean of both ranks: {' '.join(str(mean) for mean in means)}",
    f"DDP, unused found: {shown(DistributedDataParallel(Mixture(), find_unused_parameters=True))}",
    f"FSDP2: {shown(sharded(reduces_unused=False))}",
    f"FSDP2, unused reduced: {shown(sharded(reduces_unused=True))}",
]
if rank == 0:
    print("\n".join(lines), flush=True)
dist.barrier()
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/experts.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
mean of both ranks: 0.5 3.0 4.0
DDP, unused found: rank 0 has 0.5 3.0 4.0, rank 1 has 0.5 3.0 4.0
FSDP2: rank 0 has 2.5 5.0 None, rank 1 has None 2.5 5.0
FSDP2, unused reduced: rank 0 has 0.5 3.0 4.0, rank 1 has 0.5 3.0 4.0
EXPECTED
