#!/usr/bin/env bash
# torch 2.13.0. The chunks of `F.linear_cross_entropy` change the loss of bf16 inputs by a tenth, whatever is asked of its sums.
#
# Expected: the size of a chunk is a matter of memory; with `acc_policy="accurate"` and `acc_dtype=torch.float32` the loss is at
# least as exact as that of logits in one piece.
# Behaviour: the loss of all chunks is added in bf16, and returned in it. A sum of seven bits of mantissa stands still once it is
# some hundred times a chunk's share, so the loss falls short by about 10 % with 64 tokens a chunk, which is also what the default
# options choose for a vocabulary far wider than the hidden size (Gemma's 262,144 by 1,152 has this ratio). `acc_policy` and
# `acc_dtype` change the gradients' sums and not the loss's. Gradients keep the accuracy of bf16 (2e-3 of inputs, 1e-2 of weights),
# so training goes on, and only the curve is wrong. In fp32 the chunks agree to 1e-6.
# Who meets it: whoever replaces a head's loss by this function and compares its curve with one of another chunk size.
#
# Output of 2026-11-28 (mean loss; the verdicts are compared, the figures may differ in the last digit between CPUs):
#   8192 tokens, 128 x 512, logits of fp32: 6.26
#   one piece, bf16: 6.25, within 2 %
#   2048 tokens a chunk, accurate, float32: 6.28, within 2 %
#   64 tokens a chunk, accurate, float32: 5.44, more than 5 % off
#   64 tokens a chunk, fp32 inputs: 6.26, within 2 %
#   4096 tokens, 72 x 16384, logits of fp32: 9.72
#   one piece, bf16: 9.88, within 2 %
#   default options, bf16: 8.81, more than 5 % off
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/loss.py" <<'PYTHON'
import torch
from torch.nn import LinearCrossEntropyOptions as Options
from torch.nn import functional as F

torch.manual_seed(0)


def compare(tokens, hidden, vocabulary, trials):
    x, weight = torch.randn(tokens, hidden).bfloat16(), (0.02 * torch.randn(vocabulary, hidden)).bfloat16()
    target = torch.randint(vocabulary, (tokens,))
    exact = F.cross_entropy(x.float() @ weight.float().t(), target).item()
    print(f"{tokens} tokens, {hidden} x {vocabulary}, logits of fp32: {exact:.2f}")
    for name, options, dtype in trials:
        loss = F.linear_cross_entropy(x.to(dtype), weight.to(dtype), target, options=options).item()
        off = abs(loss / exact - 1)
        verdict = "within 2 %" if off < 0.02 else "more than 5 % off" if off > 0.05 else "between"
        print(f"{name}: {loss:.2f}, {verdict}")


accurate = {"acc_policy": "accurate", "acc_dtype": torch.float32}
compare(8192, 128, 512, [
    ("one piece, bf16", None, torch.bfloat16),
    ("2048 tokens a chunk, accurate, float32", Options(batch_chunk_size=2048, **accurate), torch.bfloat16),
    ("64 tokens a chunk, accurate, float32", Options(batch_chunk_size=64, **accurate), torch.bfloat16),
    ("64 tokens a chunk, fp32 inputs", Options(batch_chunk_size=64), torch.float32),
])
compare(4096, 72, 16384, [
    ("one piece, bf16", None, torch.bfloat16),
    ("default options, bf16", Options(), torch.bfloat16),
])
PYTHON
"$folder/venv/bin/python" "$folder/loss.py" | tee "$folder/output"
sed -E 's/: [0-9.]+/:/' "$folder/output" | diff - <(cat <<'EXPECTED'
8192 tokens, 128 x 512, logits of fp32:
one piece, bf16:, within 2 %
2048 tokens a chunk, accurate, float32:, within 2 %
64 tokens a chunk, accurate, float32:, more than 5 % off
64 tokens a chunk, fp32 inputs:, within 2 %
4096 tokens, 72 x 16384, logits of fp32:
one piece, bf16:, within 2 %
default options, bf16:, more than 5 % off
EXPECTED
)
