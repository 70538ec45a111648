#!/usr/bin/env bash
# torchao 0.17.0, torch 2.13.0. Its low-bit AdamW moves weights with small gradients a hundred times too far, or hardly.
#
# Expected: moments in 8 or 4 bits are AdamW with noise: every weight moves at the learning rate, whatever the size of its
# gradient, a few per cent more or less.
# Behaviour: 256 (128 in 4 bits) neighbouring weights share a scale, set by the largest moment of them, and the second moment,
# a square, spans twice the decades of the gradients. Below a hundredth (fp8) or near a thousandth (8 bits) of the block's
# largest gradient it becomes 0. All that is left of it in a step is then (1 - beta2) of the newest square, so the root is some
# thirty times too small if gradients keep their size, and smaller yet where one is small by chance: with random gradients such
# a weight walks a hundred or two hundred times as far as it should. In 4 bits there is no 0, and the smallest second moment is a
# sixteenth of the largest: weights with a tenth of the block's largest gradient move at a third of the learning rate, those
# with a hundredth at a thirtieth. The norm of gradients does not show it, and nothing is reported.
# Who meets it: whoever halves the optimizer's memory with torchao where some inputs of a layer (outlier channels, rarely
# active units) have far larger or smaller gradients than their neighbours.
#
# Output of 2026-11-29 (distance after 200 steps over that of AdamW, of weights whose gradients are 1, 0.1, 0.01, 0.001 of the
# block's largest; gradients that keep their sign, and random ones):
#   AdamW8bit: kept 1 1 1.1 9.9; random 1 1 1.1 98
#   AdamWFp8: kept 0.99 0.98 0.99 37; random 0.99 0.99 1.7 200
#   AdamW4bit: kept 1 0.32 0.031 0.0059; random 0.94 0.27 0.078 0.072
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 torchao==0.17.0 2>/dev/null
cat >"$folder/distances.py" <<'PYTHON'
import torch
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

SIZES = torch.tensor([1.0, 0.1, 0.01, 0.001])
SHAPE, STEPS = (16, 256), 200


def distances(kind, sign):
    """Root mean square distance from the start, a number for each of `SIZES`, which the gradients have by `sizes`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(SHAPE))
    optimizer = kind([weight], lr=1e-3, weight_decay=0.0)
    for _ in range(STEPS):
        weight.grad = sizes * (sign + torch.randn(SHAPE, generator=generator) / (1 + sign))
        optimizer.step()
    return torch.stack([weight.detach()[sizes == size].square().mean().sqrt() for size in SIZES])


sizes = SIZES[torch.randint(len(SIZES), SHAPE, generator=torch.Generator().manual_seed(1))]
for kind in (AdamW8bit, AdamWFp8, AdamW4bit):
    texts = []
    for name, sign in (("kept", 1), ("random", 0)):
        ratios = distances(kind, sign) / distances(torch.optim.AdamW, sign)
        texts.append(f"{name} " + " ".join(f"{float(f'{ratio:.2g}'):g}" for ratio in ratios.tolist()))
    print(f"{kind.__name__}: {'; '.join(texts)}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/distances.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
AdamW8bit: kept 1 1 1.1 9.9; random 1 1 1.1 98
AdamWFp8: kept 0.99 0.98 0.99 37; random 0.99 0.99 1.7 200
AdamW4bit: kept 1 0.32 0.031 0.0059; random 0.94 0.27 0.078 0.072
EXPECTED
