#!/usr/bin/env bash
# torch 2.13.0, transformers 5.24.0. AdamW of bf16 weights never forgets a large gradient, and Trainer with `bf16=True` has it so.
#
# Expected: bf16 states are coarse and lose small updates, but the second moment follows the gradients with its memory of
# 1/(1 - beta2) = 1000 steps, so that one bad batch is over after some thousand. `bf16=True` of Trainer, which is called mixed
# precision, keeps weights and moments in fp32.
# Behaviour: with the default betas the second moment of bf16 weights never falls: 0.999 of it rounds to itself, since bf16 has
# steps of 0.4 to 0.8 %. After one gradient of a hundred times the usual size its root stays three times too large, 5000
# steps later, and the weights move a third as far, for good; without such a gradient it still only rises. The three
# implementations (single tensor, foreach, fused) agree. beta2 of 0.95 forgets.
# transformers 5 loads a model in the type of its file, mostly bf16, and `bf16=True` leaves it there: weights, gradients
# and moments are bf16, where version 4 loaded fp32 and kept it. `dtype=torch.float32` at loading is mixed precision again.
# Who meets it: fine-tuning by Trainer 5, and each loop over a model in bf16, with beta2 = 0.999.
#
# Output of 2026-11-29:
#   left of the second moment after 1000 steps without gradient, beta2 0.999: float32 0.37 0.37 0.37, bfloat16 1.00 1.00 1.00
#   the same, beta2 0.95: float32 0.00 0.00 0.00, bfloat16 0.00 0.00 0.00
#   its root over the usual gradient, 5000 steps after one a hundred times as large: float32 1.0, bfloat16 3.2
#   Trainer with bf16=True, as loaded: weights torch.bfloat16, second moment torch.bfloat16, betas (0.9, 0.999)
#   Trainer with bf16=True, loaded with dtype=torch.float32: weights torch.float32, second moment torch.float32, betas (0.9, 0.999)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.2.6 2>/dev/null
cat >"$folder/moments.py" <<'PYTHON'
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZE, USUAL = 1000, 0.1
TYPES = (torch.float32, torch.bfloat16)


def stepped(dtype, gradients, **options):
    """The second moment before and after the gradients that follow the first."""
    weight = torch.nn.Parameter(torch.ones(SIZE, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=0.0, **options)
    moments = []
    for gradient in gradients:
        weight.grad = gradient.to(dtype)
        optimizer.step()
        moments.append(optimizer.state[weight]["exp_avg_sq"].float().clone())
    return moments[0], moments[-1]


def left(dtype, beta2):
    shares = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        gradients = [torch.linspace(0.5, 1.5, SIZE)] + 1000 * [torch.zeros(SIZE)]
        first, last = stepped(dtype, gradients, betas=(0.9, beta2), **options)
        shares.append(f"{(last / first).mean():.2f}")
    return f"{str(dtype).removeprefix('torch.')} {' '.join(shares)}"


def root(dtype):
    torch.manual_seed(0)
    gradients = [torch.full((SIZE,), 100 * USUAL)] + [USUAL * torch.randn(SIZE) for _ in range(5000)]
    _, last = stepped(dtype, gradients)
    return f"{str(dtype).removeprefix('torch.')} {last.mean().sqrt() / USUAL:.1f}"


print(f"left of the second moment after 1000 steps without gradient, beta2 0.999: {', '.join(left(t, 0.999) for t in TYPES)}")
print(f"the same, beta2 0.95: {', '.join(left(t, 0.95) for t in TYPES)}")
print(f"its root over the usual gradient, 5000 steps after one a hundred times as large: {', '.join(map(root, TYPES))}")
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().save_pretrained(sys.argv[1])
row = torch.randint(64, (16,))
for name, options in (("as loaded", {}), ("loaded with dtype=torch.float32", {"dtype": torch.float32})):
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], **options)
    arguments = TrainingArguments(
        sys.argv[1], bf16=True, max_steps=1, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=8 * [{"input_ids": row, "labels": row}])
    trainer.train()
    weights = {p.dtype for p in trainer.model.parameters()}
    moments = {state["exp_avg_sq"].dtype for state in trainer.optimizer.state.values()}
    betas = trainer.optimizer.param_groups[0]["betas"]
    assert len(weights) == len(moments) == 1
    print(f"Trainer with bf16=True, {name}: weights {weights.pop()}, second moment {moments.pop()}, betas {betas}")
PYTHON
"$folder/venv/bin/python" "$folder/moments.py" "$folder/model" 2>/dev/null | grep 'moment\|root\|same' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
left of the second moment after 1000 steps without gradient, beta2 0.999: float32 0.37 0.37 0.37, bfloat16 1.00 1.00 1.00
the same, beta2 0.95: float32 0.00 0.00 0.00, bfloat16 0.00 0.00 0.00
its root over the usual gradient, 5000 steps after one a hundred times as large: float32 1.0, bfloat16 3.2
Trainer with bf16=True, as loaded: weights torch.bfloat16, second moment torch.bfloat16, betas (0.9, 0.999)
Trainer with bf16=True, loaded with dtype=torch.float32: weights torch.float32, second moment torch.float32, betas (0.9, 0.999)
EXPECTED
