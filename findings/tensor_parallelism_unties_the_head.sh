#!/usr/bin/env bash
# torch 2.13.0, gloo, two ranks. `parallelize_module` makes two weights of a head that shares the embedding's, without a word.
#
# Expected: a model with a tied head (`head.weight = embedding.weight`) stays tied under tensor parallelism, or the call says
# that it cannot be; `fully_shard`, given the two modules apart, raises a ValueError in the first forward.
# Behaviour: each style replaces the parameters of its module by DTensors of its own, and what was one weight is two. They start
# equal (the loss of the first step is right), get different gradients, and are different weights after the first step: the
# embedding has the gradient of its own use alone, the head that of the product alone. There is one more weight in the norm of
# gradients, in the optimizer's states and in the checkpoint, from which a loader of tied models takes one of the two. That both
# are sharded along the same dimension does not help. Tying again after the call (`head.weight = embedding.weight`) does.
# Who meets it: small models, which are the ones with tied heads (Llama 3.2 1B, Qwen3 up to 4B, Gemma), under a plan with
# embedding and head.
#
# Output of 2026-11-29:
#   one process: 200 parameters, loss 3.222, gradient of the embedding 0.559, one weight after a step: True
#   parallelize_module: 328 parameters, loss 3.222, gradient of the embedding 0.390, one weight after a step: False
#   parallelize_module, tied again: 200 parameters, loss 3.222, gradient of the embedding 0.559, one weight after a step: True
#   fully_shard apart: ValueError, Parameter 'head.weight' is shared with a parameter already
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

VOCABULARY, WIDTH = 16, 8
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def plain(model):
    return model


def tensor_parallel(model):
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),  # shards the vocabulary, as the head's style does
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh, plan)


def tied_again(model):
    model = tensor_parallel(model)
    model.head.weight = model.embedding.weight
    return model


def sharded_apart(model):
    for part in (model.embedding, model.head, model):
        fully_shard(part, mesh=mesh)
    return model


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


for name, parallel in (
    ("one process", plain),
    ("parallelize_module", tensor_parallel),
    ("parallelize_module, tied again", tied_again),
    ("fully_shard apart", sharded_apart),
):
    torch.manual_seed(0)
    model = parallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(VOCABULARY).view(2, -1)
    try:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        embedding, head = whole(model.embedding.weight), whole(model.head.weight)
        gradient = whole(model.embedding.weight.grad)
        numbers = sum(parameter.numel() for parameter in model.parameters())
        told = (
            f"{numbers} parameters, loss {loss.item():.3f}, gradient of the embedding {gradient.norm():.3f}, "
            f"one weight after a step: {torch.equal(embedding, head)}"
        )
    except ValueError as error:
        told = f"ValueError, {' '.join(str(error).split()[:8])}"
    if dist.get_rank() == 0:
        print(f"{name}: {told}", flush=True)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/ranks.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
one process: 200 parameters, loss 3.222, gradient of the embedding 0.559, one weight after a step: True
parallelize_module: 328 parameters, loss 3.222, gradient of the embedding 0.390, one weight after a step: False
parallelize_module, tied again: 200 parameters, loss 3.222, gradient of the embedding 0.559, one weight after a step: True
fully_shard apart: ValueError, Parameter 'head.weight' is shared with a parameter already
EXPECTED
