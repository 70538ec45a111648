#!/usr/bin/env bash
# torch 2.13.0, gloo, four ranks. `any()` of a sharded DTensor counts ranks once it is a number, and norms do not add up.
#
# Expected: `any(0)` is True or False, so as a float it is 1 or 0 and its mean a share; a norm for each column, added up, is the
# sum of those norms. Reductions along a sharded dimension leave an open result, but what is computed from it is of the whole.
# Behaviour: the open result of `any` is a sum over ranks, read as True where that is not 0. A cast to a number and a sum are done
# within the parts, so each True counts as often as ranks had one: 4 of 6 experts are used, they sum to 10, and 167 % are used on
# average. `isnan().any().float()` is the number of ranks with a NaN. The open result of a norm is joined by squares, and the sum
# of norms is joined from each rank's sum: it falls short if the ranks have unlike shares of them. So it is for the norms of
# columns and for those of several tensors, stacked and then summed. Read as they are, all of them are right. So are `mean()` and
# `norm()` of norms, `count_nonzero` of `any`, and what is computed from `all`. Nothing is reported.
# Who meets it: counts of used experts, dead units and bad gradients, group penalties on norms, and logged sums of norms over a
# model that FSDP2 or tensor parallelism has sharded.
#
# Output of 2026-11-30 (sharded along rows: tokens that experts get, 8 x 6; weights, 8 x 3):
#   (tokens > 0).any(0): [True, True, True, True, False, False], wanted the same
#   (tokens > 0).any(0).float(): [4.0, 3.0, 2.0, 1.0, 0.0, 0.0], wanted [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
#   (tokens > 0).any(0).sum(): 10, wanted 4
#   (tokens > 0).any(0).float().mean(): 1.67, wanted 0.67
#   (tokens > 6).any().float(): 1.0, wanted the same
#   (tokens > 4).any().float(): 4.0, wanted 1.0
#   (tokens > 0).any(0).count_nonzero(): 4, wanted the same
#   (tokens >= 0).all(0).sum(): 6, wanted the same
#   weights.norm(dim=0): [5.2, 6.93, 16.97], wanted the same
#   weights.norm(dim=0).sum(): 24.06, wanted 29.09
#   weights.norm(dim=0).mean(): 9.7, wanted the same
#   torch.stack([weights.norm(), tokens.norm()]): [19.05, 18.06], wanted the same
#   torch.stack([weights.norm(), tokens.norm()]).sum(): 35.63, wanted 37.11
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

# the first four experts get tokens from 4, 3, 2 and 1 of the ranks, each of which has two rows
OF_RANKS = [[5.0, 2, 1, 7, 0, 0], [5, 2, 1, 0, 0, 0], [5, 2, 0, 0, 0, 0], [5, 0, 0, 0, 0, 0]]
TOKENS = torch.tensor(OF_RANKS).repeat_interleave(2, 0)
WEIGHTS = torch.diag(torch.tensor([3.0, 4.0, 12.0])).repeat(3, 1)[:8]
FUNCTIONS = """
(tokens > 0).any(0)
(tokens > 0).any(0).float()
(tokens > 0).any(0).sum()
(tokens > 0).any(0).float().mean()
(tokens > 6).any().float()
(tokens > 4).any().float()
(tokens > 0).any(0).count_nonzero()
(tokens >= 0).all(0).sum()
weights.norm(dim=0)
weights.norm(dim=0).sum()
weights.norm(dim=0).mean()
torch.stack([weights.norm(), tokens.norm()])
torch.stack([weights.norm(), tokens.norm()]).sum()
""".split("\n")[1:-1]


def rounded(tensor):
    return (100 * tensor.double()).round().div(100).tolist() if tensor.is_floating_point() else tensor.tolist()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
names = {"tokens": TOKENS, "weights": WEIGHTS}
shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in names.items()}
for text in FUNCTIONS:
    function = eval(f"lambda tokens, weights: {text}")
    got, wanted = rounded(function(**shards).full_tensor()), rounded(function(**names))
    if dist.get_rank() == 0:
        print(f"{text}: {got}, wanted {'the same' if got == wanted else wanted}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=4 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
(tokens > 0).any(0): [True, True, True, True, False, False], wanted the same
(tokens > 0).any(0).float(): [4.0, 3.0, 2.0, 1.0, 0.0, 0.0], wanted [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
(tokens > 0).any(0).sum(): 10, wanted 4
(tokens > 0).any(0).float().mean(): 1.67, wanted 0.67
(tokens > 6).any().float(): 1.0, wanted the same
(tokens > 4).any().float(): 4.0, wanted 1.0
(tokens > 0).any(0).count_nonzero(): 4, wanted the same
(tokens >= 0).all(0).sum(): 6, wanted the same
weights.norm(dim=0): [5.2, 6.93, 16.97], wanted the same
weights.norm(dim=0).sum(): 24.06, wanted 29.09
weights.norm(dim=0).mean(): 9.7, wanted the same
torch.stack([weights.norm(), tokens.norm()]): [19.05, 18.06], wanted the same
torch.stack([weights.norm(), tokens.norm()]).sum(): 35.63, wanted 37.11
EXPECTED
