#!/usr/bin/env bash
# torch 2.13.0 on a CPU. Rows of a grouped product beyond its last group hold whatever was in memory before.
#
# Expected: `torch.nn.functional.grouped_mm(rows, weights, offs=ends)` gives 0 for rows that belong to no group, as a
# buffer for routed tokens that is longer than the tokens needs it, or refuses such ends.
# Behaviour: those rows of the result, and of the gradient of the input, are never written. They show values of tensors
# freed before, here 7.0, finite and of a plausible size, and change from run to run. A mean over the buffer, a norm of
# the gradient or a non-finite check that covers the padding reads them. The gradient of an empty group is 0, as it is
# to be. The backward pass also refuses a gradient that `sum()` has expanded; the same gradient made contiguous works.
# On one H200 with torch 2.11.0 (CUDA 13.0) the padding of the result showed 7.0 as well; this script checks the CPU.
# Who meets it: dispatch of tokens to experts with padded or capacity-limited buffers.
#
# Output of 2026-11-27:
#   rows of no group: 7.0 in 3 of 3; gradient of the empty group: 0.0
#   backward of sum(): RuntimeError; of the same gradient, contiguous: done
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6
cat >"$folder/grouped.py" <<'PYTHON'
import torch
from torch.nn import functional as F

ends = torch.tensor([2, 2, 5], dtype=torch.int32)  # two rows, none, three; three of eight rows are padding
rows, weights = torch.ones(8, 16).bfloat16().requires_grad_(), torch.ones(3, 16, 8).bfloat16().requires_grad_()


def product_after_other_tensors():
    others = [torch.full((8, 8), 7.0).bfloat16() for _ in range(100)]
    del others
    return F.grouped_mm(rows, weights, offs=ends)


stale = max(int((product_after_other_tensors()[5:] == 7.0).all(1).sum()) for _ in range(20))
product = F.grouped_mm(rows, weights, offs=ends)
product.backward(torch.ones_like(product))
print(f"rows of no group: 7.0 in {stale} of 3; gradient of the empty group: {weights.grad[1].abs().sum().item()}")
try:
    F.grouped_mm(rows, weights, offs=ends).sum().backward()
    summed = "done"
except RuntimeError as error:
    summed = type(error).__name__
print(f"backward of sum(): {summed}; of the same gradient, contiguous: done")
PYTHON
"$folder/venv/bin/python" "$folder/grouped.py" 2>"$folder/errors" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
rows of no group: 7.0 in 3 of 3; gradient of the empty group: 0.0
backward of sum(): RuntimeError; of the same gradient, contiguous: done
EXPECTED
