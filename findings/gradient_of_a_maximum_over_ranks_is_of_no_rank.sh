#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. The differentiable all_reduce gives a maximum, minimum or product over ranks a wrong gradient.
#
# Expected: the gradient of `torch.distributed.nn.functional.all_reduce(x, op=MAX)` goes to the rank whose value is the maximum,
# and that of PRODUCT is the product of the others; or they are refused, as the functional collectives refuse them.
# Behaviour: backward reduces the incoming gradients with the operation of the forward. Each rank gets the maximum (minimum,
# product) of the ranks' gradients, whoever had the maximum: all ranks move, equally. With a loss that all ranks compute, as
# tensor and context parallelism do, the right gradient is 2 on one rank and 0 on the other, and 1 comes back on both. SUM and
# AVG are right. `broadcast` of the functional collectives has such a gradient, too: the ranks that were overwritten get one,
# and the source gets its own alone. The maximum of a sharded DTensor has the right gradient.
# Who meets it: a maximum over shards of a sequence (pooling, scales of activations) through which a gradient is to flow. Where
# a maximum only steadies a sum of exponentials its gradient cancels, and nothing is seen.
#
# Output of 2026-11-29 (values 1 5 and 2 4; gradient of the sum of both ranks' losses):
#   one process, maximum: [0.0, 2.0] and [2.0, 0.0]
#   one process, product: [4.0, 8.0] and [2.0, 10.0]
#   all_reduce SUM: [2.0, 2.0] and [2.0, 2.0]
#   all_reduce AVG: [1.0, 1.0] and [1.0, 1.0]
#   all_reduce MAX: [1.0, 1.0] and [1.0, 1.0]
#   all_reduce MIN: [1.0, 1.0] and [1.0, 1.0]
#   all_reduce PRODUCT: [1.0, 1.0] and [1.0, 1.0]
#   functional all_reduce max: RuntimeError, all_reduce backward only supports 'sum' reduction, got 'max'
#   broadcast from rank 0: [2.0, 2.0] and [0.0, 0.0]
#   functional broadcast from rank 0: [1.0, 1.0] and [1.0, 1.0]
#   DTensor, maximum, one loss: [0.0, 1.0] and [1.0, 0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_reduce, broadcast
from torch.distributed.tensor import DTensor, Shard

VALUES = ([1.0, 5.0], [2.0, 4.0])
dist.init_process_group("gloo")
rank, mesh, world = dist.get_rank(), init_device_mesh("cpu", (2,)), dist.group.WORLD


def over_ranks(reduce):
    """Gradients of both ranks' values, of the sum of the losses that both compute."""
    x = torch.tensor(VALUES[rank], requires_grad=True)
    try:
        reduce(x).sum().backward()
        told = x.grad.tolist()
    except RuntimeError as error:
        told = f"RuntimeError, {str(error).splitlines()[0]}"
    gradients = [None, None]
    dist.all_gather_object(gradients, told)
    return gradients[0] if isinstance(gradients[0], str) else gradients


def in_one(reduce):
    x = torch.tensor(VALUES, requires_grad=True)
    (2 * reduce(x)).sum().backward()
    return x.grad.tolist()


cases = [("one process, maximum", in_one(lambda x: x.amax(0))), ("one process, product", in_one(lambda x: x.prod(0)))]
for name in ("SUM", "AVG", "MAX", "MIN", "PRODUCT"):
    cases.append((f"all_reduce {name}", over_ranks(lambda x, op=getattr(dist.ReduceOp, name): all_reduce(x, op=op))))
cases += [
    ("functional all_reduce max", over_ranks(lambda x: functional.all_reduce(x, "max", world))),
    ("broadcast from rank 0", over_ranks(lambda x: broadcast(x, 0))),
    ("functional broadcast from rank 0", over_ranks(lambda x: functional.broadcast(x, 0, world))),
    ("DTensor, maximum, one loss", over_ranks(lambda x: DTensor.from_local(x[None], mesh, [Shard(0)]).amax(0).full_tensor())),
]
if rank == 0:
    for name, gradients in cases:
        print(f"{name}: {gradients if isinstance(gradients, str) else ' and '.join(map(str, gradients))}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
one process, maximum: [0.0, 2.0] and [2.0, 0.0]
one process, product: [4.0, 8.0] and [2.0, 10.0]
all_reduce SUM: [2.0, 2.0] and [2.0, 2.0]
all_reduce AVG: [1.0, 1.0] and [1.0, 1.0]
all_reduce MAX: [1.0, 1.0] and [1.0, 1.0]
all_reduce MIN: [1.0, 1.0] and [1.0, 1.0]
all_reduce PRODUCT: [1.0, 1.0] and [1.0, 1.0]
functional all_reduce max: RuntimeError, all_reduce backward only supports 'sum' reduction, got 'max'
broadcast from rank 0: [2.0, 2.0] and [0.0, 0.0]
functional broadcast from rank 0: [1.0, 1.0] and [1.0, 1.0]
DTensor, maximum, one loss: [0.0, 1.0] and [1.0, 0.0]
EXPECTED
