#!/usr/bin/env bash
# megatron-core 0.19.2 (and 0.16.1). Its fused clamped activation clamps the product before it adds the bias.
#
# Expected: `--quick-geglu --activation-func-clamp-value` compute gpt-oss's activation, with and without the fusion of the
# bias (`bias_activation_fusion`, on by default): the gate and the linear part, each with its bias, are clamped.
# Behaviour: `weighted_bias_quick_geglu_impl` clamps its input, and its autograd function adds the bias afterwards. The
# path without fusion, and transformers' gpt-oss, clamp the sum. Outputs differ wherever product or sum passes the clamp;
# the gradients differ there, too, and no message says so.
# Who meets it: whoever trains or fine-tunes gpt-oss with Megatron and the default fusion; `--no-bias-gelu-fusion` is right.
#
# Output of 2026-11-30 (product 6, bias 3, clamp 7):
#   fused 90.0, the same function of the clamped sum 56.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
"$folder/venv/bin/pip" download --quiet --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
  --dest "$folder" megatron-core==0.19.2 2>/dev/null
"$folder/venv/bin/python" -m zipfile -e "$folder"/*.whl "$folder/site"
# The file alone: its package imports much more.
cat >"$folder/compare.py" <<'PYTHON'
import sys

import torch

source = open(sys.argv[1]).read().replace("from megatron.core.jit import jit_fuser", "jit_fuser = lambda function: function")
names = {}
exec(compile(source, "fused_bias_geglu.py", "exec"), names)
product, bias, weight, clamp, offset = torch.full((1, 2), 6.0), torch.full((2,), 3.0), torch.ones(1, 1), 7.0, 1.0
fused = names["weighted_bias_quick_geglu_impl"](product, bias, weight, False, offset, clamp)
gate, linear = (product + bias).chunk(2, -1)
right = names["quick_gelu"](gate.clamp(max=clamp)) * (linear.clamp(-clamp, clamp) + offset)
print(f"fused {fused.item():.1f}, the same function of the clamped sum {right.item():.1f}")
PYTHON
"$folder/venv/bin/python" "$folder/compare.py" "$folder/site/megatron/core/fusions/fused_bias_geglu.py" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
fused 90.0, the same function of the clamped sum 56.0
EXPECTED
