#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. The FLOPs that Trainer logs leave out a tied head and count every expert.
#
# Expected: `total_flos` (logs, trainer_state.json) is 6 FLOPs a token for each weight that multiplies it; two models with the same
# products have the same.
# Behaviour: it is 6 x tokens x all parameters that are not in an `nn.Embedding`. A head that shares the embedding's weight goes
# with it, though its product is computed: of Gemma 3 270M, whose head is most of it, 37 % is counted. Experts count in full,
# however few a token visits: Qwen3-30B-A3B has 10 times its FLOPs. Tying the head changes the figure and not the work, and
# experts that no token visits raise it. Attention to other tokens and recomputation do not enter at all.
# Who meets it: whoever divides `total_flos` by time for an MFU, or fits a scaling law over it.
#
# Output of 2026-11-29 (weights that a token is taken to meet, and does meet; shapes: of the published models, without weights):
#   trained, head tied: counted 20640, multiplying 36864
#   trained, head untied: counted 37024, multiplying 36864
#   trained, 2 of 4 experts: counted 49600, multiplying 37120
#   trained, 2 of 32 experts: counted 223424, multiplying 38912
#   shape of Gemma 3 270M: counted / multiplying 0.37
#   shape of Qwen3-30B-A3B: counted / multiplying 9.94
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.2.6 2>/dev/null
cat >"$folder/flops.py" <<'PYTHON'
import sys

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainingArguments,
)

TOKENS = 128
SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
GEMMA_270M = {
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
QWEN_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def trained(model):
    """Weights that a token is taken to meet, by `total_flos` of one step."""
    row = torch.arange(TOKENS)
    arguments = TrainingArguments(
        sys.argv[1],
        max_steps=1,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}])
    trainer.train()
    return int(trainer.state.total_flos / 6 / TOKENS)


def multiplying(model, share_of_experts=1.0):
    """Weights of the products that a token passes: those of linear layers (the head among them, tied or not) and experts."""
    weights = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
        else:  # weights of experts and routers, which are no nn.Linear
            for name, weight in module.named_parameters(recurse=False):
                if not isinstance(module, nn.Embedding) and weight.dim() > 1:
                    weights += weight.numel() * (share_of_experts if weight.dim() == 3 else 1)
    return weights


for tied in (True, False):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    print(f"trained, head {'tied' if tied else 'untied'}: counted {trained(model)}, multiplying {multiplying(model):.0f}")
for experts in (4, 32):
    sizes = {**SMALL, "num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, tie_word_embeddings=False))
    print(f"trained, 2 of {experts} experts: counted {trained(model)}, multiplying {multiplying(model, 2 / experts):.0f}")
with torch.device("meta"):
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA_270M))
    qwen = Qwen3MoeForCausalLM(Qwen3MoeConfig(**QWEN_30B_A3B))
for name, model, share in (("Gemma 3 270M", gemma, 1.0), ("Qwen3-30B-A3B", qwen, 8 / 128)):
    counted, met = model.num_parameters(exclude_embeddings=True), multiplying(model, share)
    print(f"shape of {name}: counted / multiplying {counted / met:.2f}")
PYTHON
"$folder/venv/bin/python" "$folder/flops.py" "$folder/run" 2>/dev/null | grep '^trained\|^shape' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
trained, head tied: counted 20640, multiplying 36864
trained, head untied: counted 37024, multiplying 36864
trained, 2 of 4 experts: counted 49600, multiplying 37120
trained, 2 of 32 experts: counted 223424, multiplying 38912
shape of Gemma 3 270M: counted / multiplying 0.37
shape of Qwen3-30B-A3B: counted / multiplying 9.94
EXPECTED
