#!/usr/bin/env bash
# torch 2.13.0. Offloading activations with `torch.autograd.graph.save_on_cpu` also copies every weight, each micro-batch.
#
# Expected: the context moves activations to the host; parameters are on the device anyway, so nothing is won by moving them.
# Behaviour: autograd saves the weight of a product for the gradient of its input, as a transposed view, and the hook gets it
# like any other tensor. A step of m micro-batches sends every weight to the host m times and back m times. A tensor that
# several operations save (the normed input of q, k and v; of gate and up) is sent once for each of them, too.
# For one Llama block of width 256 and 64 tokens 6.3 MB are sent, of which 4.2 MB are weights and 0.4 MB repeats; at the
# lengths where people offload activations the weights are the smaller part, but they still cross the link of the host.
# Who meets it: whoever sizes host memory or the link for activation offload by the activations alone.
#
# Output of 2026-11-28:
#   sent 6295552 bytes: 4194304 of weights, 393728 sent before, 1707520 activations
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/offload.py" <<'PYTHON'
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

WIDTH, TOKENS, HEADS = 256, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        normed = self.norms[0](x)
        q, k, v = (part(normed).view(1, TOKENS, HEADS, -1).transpose(1, 2) for part in self.qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(1, TOKENS, WIDTH)
        x = x + self.out(mixed)
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


block = Block()
weights = {parameter.data_ptr() for parameter in block.parameters() if parameter.ndim == 2}
sent = []
context = save_on_cpu()
pack = context.pack_hook


def watched(tensor):
    sent.append((tensor.data_ptr(), tensor.numel() * tensor.element_size()))
    return pack(tensor)


context.pack_hook = watched
with context:
    out = block(torch.randn(1, TOKENS, WIDTH, requires_grad=True))
of_weights = sum(size for place, size in sent if place in weights)
rest = [(place, size) for place, size in sent if place not in weights]
repeated = sum(size for _, size in rest) - sum(dict(rest).values())
total = sum(size for _, size in sent)
print(f"sent {total} bytes: {of_weights} of weights, {repeated} sent before, {total - of_weights - repeated} activations")
PYTHON
"$folder/venv/bin/python" "$folder/offload.py" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
sent 6295552 bytes: 4194304 of weights, 393728 sent before, 1707520 activations
EXPECTED
