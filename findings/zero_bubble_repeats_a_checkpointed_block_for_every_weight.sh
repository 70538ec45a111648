#!/usr/bin/env bash
# torch 2.13.0. Under a zero-bubble schedule a checkpointed block is computed again once per weight, and once more.
#
# Expected: a backward in two halves repeats the forward of a checkpointed block once, as a backward in one piece does, or at
# most twice, once a half.
# Behaviour: the half that computes the gradients of weights runs autograd once for each linear layer, and every such run finds
# the activations of its block dropped and repeats the whole block. With the half that computes the input's gradient, a block of
# n linear layers is repeated 1 + n times: 8 times for the 7 of a Llama layer. The gradients are right, and nothing is reported;
# the products of such a layer are 1 + 8 + 2 forwards' worth instead of 1 + 1 + 2. The first stage, whose input needs no gradient,
# is spared.
# Who meets it: ScheduleZBVZeroBubble and ScheduleInterleavedZeroBubble with activation checkpointing, to which one turns
# because these schedules keep more activations. With a checkpoint around each linear layer instead, each is repeated twice.
#
# Output of 2026-11-29 (forwards of the last stage's block per micro-batch, the first one too):
#   ScheduleInterleaved1F1B: 1 layer 2, 2 layers 2, 4 layers 2, 7 layers 2, Llama's 2
#   ScheduleInterleavedZeroBubble: 1 layer 3, 2 layers 4, 4 layers 6, 7 layers 9, Llama's 9
#   ScheduleZBVZeroBubble: 1 layer 3, 2 layers 4, 4 layers 6, 7 layers 9, Llama's 9
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/forwards.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS = 8, 5
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


class Chain(nn.Module):
    """Linear layers one after the other; `forwards` counts how often they are computed."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.forwards = 0

    def block(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def counted(self, x):
        self.forwards += 1
        return self.block(x)

    def forward(self, x):
        return checkpoint(self.counted, x, use_reentrant=False)


class Llama(Chain):
    """The seven linear layers of a Llama layer, where they are in it."""

    def block(self, x):
        query, key, value, out, gate, up, down = self.layers
        y = F.rms_norm(x, (WIDTH,))
        x = x + out(F.scaled_dot_product_attention(query(y), key(y), value(y), is_causal=True))
        y = F.rms_norm(x, (WIDTH,))
        return x + down(F.silu(gate(y)) * up(y))


def forwards(kind, make):
    """Of the last stage's block, per micro-batch: the difference of 8 and 4, since the first finds shapes as well."""
    counts = []
    for micro_batches in (4, 8):
        parts = [nn.Linear(WIDTH, WIDTH), make()]
        stages = [PipelineStage(part, at, 2, torch.device("cpu")) for at, part in enumerate(parts)]
        x = torch.randn(micro_batches, TOKENS, WIDTH)
        kind(stages, micro_batches, loss_fn=F.mse_loss).step(x, target=x)
        counts.append(parts[1].forwards)
    return (counts[1] - counts[0]) // 4


for kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble):
    chains = [f"{n} layer{'s' if n > 1 else ''} {forwards(kind, lambda n=n: Chain(n))}" for n in (1, 2, 4, 7)]
    print(f"{kind.__name__}: {', '.join(chains)}, Llama's {forwards(kind, lambda: Llama(7))}")
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/forwards.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
ScheduleInterleaved1F1B: 1 layer 2, 2 layers 2, 4 layers 2, 7 layers 2, Llama's 2
ScheduleInterleavedZeroBubble: 1 layer 3, 2 layers 4, 4 layers 6, 7 layers 9, Llama's 9
ScheduleZBVZeroBubble: 1 layer 3, 2 layers 4, 4 layers 6, 7 layers 9, Llama's 9
EXPECTED
