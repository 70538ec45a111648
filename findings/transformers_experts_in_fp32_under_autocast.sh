#!/usr/bin/env bash
# transformers 5.24.0 with torch 2.13.0. Under autocast in bf16 routed experts are computed in fp32, their router is not.
#
# Expected: autocast, which accelerate and the Trainer use for `bf16` unless FSDP casts the weights, computes the products of
# experts in bf16 as it does those of attention and of dense layers.
# Behaviour: the default way to compute experts, `grouped_mm`, is no operation that autocast knows. transformers casts the rows to
# the dtype of the weights, and master weights are in fp32, so all products of all experts run in fp32, forward and backward,
# without a word. The two other ways (`eager`, `batched_mm`) call operations that autocast casts. FSDP2 with a policy for mixed
# precision is not affected, since it gathers weights in bf16.
# Who meets it: training or comparing a mixture of experts with `bf16=True` on one GPU or under DDP. On one H200 seven layers of
# Nemotron 3 Nano took 1.34 s a step, and 0.67 s compiled under FSDP2, with experts in bf16 (results/recorded/h200x1_kinds_peers).
# Set `experts_implementation`, or keep the weights in bf16.
#
# Output of 2026-12-01 (dtypes of the matrix products of one layer's experts and router, Qwen3's mixture, autocast in bf16):
#   weights in fp32, default: _grouped_mm float32, mm bfloat16
#   weights in fp32, eager: mm bfloat16
#   weights in fp32, batched_mm: bmm bfloat16, mm bfloat16
#   weights in bf16, default: _grouped_mm bfloat16, mm bfloat16
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.2.6 2>/dev/null
cat >"$folder/dtypes.py" <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES |= {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if (name := function.__name__.split(".")[0]).endswith("mm"):
            dtype = next(one.dtype for one in arguments if torch.is_tensor(one))
            self.seen.add(f"{name} {str(dtype).removeprefix('torch.')}")
        return function(*arguments, **(named or {}))


def layer(chosen):
    torch.manual_seed(0)
    options = {} if chosen == "default" else {"experts_implementation": chosen}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **options)).model.layers[0].mlp


for weights, chosen in (("fp32", "default"), ("fp32", "eager"), ("fp32", "batched_mm"), ("bf16", "default")):
    mlp = layer(chosen) if weights == "fp32" else layer(chosen).bfloat16()
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        mlp(torch.randn(1, 32, 64))
    print(f"weights in {weights}, {chosen}: {', '.join(sorted(products.seen))}")
PYTHON
"$folder/venv/bin/python" "$folder/dtypes.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
weights in fp32, default: _grouped_mm float32, mm bfloat16
weights in fp32, eager: mm bfloat16
weights in fp32, batched_mm: bmm bfloat16, mm bfloat16
weights in bf16, default: _grouped_mm bfloat16, mm bfloat16
EXPECTED
