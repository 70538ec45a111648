#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. Trainer multiplies the router's loss of a mixture of experts by micro-batches and ranks.
#
# Expected: the same eight rows have the same loss and gradient however they are split into micro-batches and over ranks, as
# Trainer aims at since it divides by the number of target tokens of the whole batch; the weight of the balancing loss
# (`router_aux_loss_coef`) is what the configuration says.
# Behaviour: the division by all tokens is within the model's cross entropy. The balancing loss, a mean over the micro-batch, is
# added behind that and never divided: every micro-batch adds it in full, and the factor by which Trainer makes up for the mean
# over data-parallel ranks multiplies it as well. So 0.001 acts as 0.512 with 8 micro-batches on 64 ranks. The cross
# entropy's gradient is right throughout.
# Who meets it: fine-tuning of mixtures with `output_router_logits=True`. A smaller micro-batch, taken to fit the memory, or more
# GPUs change the training; a coefficient found on one GPU is another on many. (The factor of the ranks is reported and open:
# huggingface/transformers#48690.)
#
# Output of 2026-11-29 (norm of the balancing loss's gradient over that of one micro-batch on one rank; eight equal rows):
#   mixtral, ranks 1, micro-batches 1: cross entropy x 1.00, balancing x 1.00
#   mixtral, ranks 1, micro-batches 2: cross entropy x 1.00, balancing x 2.00
#   mixtral, ranks 1, micro-batches 4: cross entropy x 1.00, balancing x 4.00
#   mixtral, ranks 2, micro-batches 1: cross entropy x 1.00, balancing x 2.00
#   mixtral, ranks 2, micro-batches 2: cross entropy x 1.00, balancing x 4.00
#   mixtral, ranks 2, micro-batches 4: cross entropy x 1.00, balancing x 8.00
#   qwen, ranks 1, micro-batches 1: cross entropy x 1.00, balancing x 1.00
#   qwen, ranks 1, micro-batches 2: cross entropy x 1.00, balancing x 2.00
#   qwen, ranks 1, micro-batches 4: cross entropy x 1.00, balancing x 4.00
#   qwen, ranks 2, micro-batches 1: cross entropy x 1.00, balancing x 2.00
#   qwen, ranks 2, micro-batches 2: cross entropy x 1.00, balancing x 4.00
#   qwen, ranks 2, micro-batches 4: cross entropy x 1.00, balancing x 8.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.2.6 2>/dev/null
cat >"$folder/router.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

ROWS, LENGTH, VOCABULARY = 8, 64, 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
}
folder, ranks = Path(sys.argv[1]), int(sys.argv[2])


class Gradient(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.flat = torch.cat([p.grad.flatten() for p in model.parameters()])


def gradient(make, coefficient, micro_batches):
    """Of the first step, all parameters in one vector."""
    torch.manual_seed(0)
    model = make(coefficient).float()
    row = torch.randint(VOCABULARY, (LENGTH,))
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=1,
        per_device_train_batch_size=ROWS // ranks // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0.0,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    seen = Gradient()
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}] * ROWS, callbacks=[seen]).train()
    return seen.flat


def mixtral(coefficient):
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, router_aux_loss_coef=coefficient))


def qwen(coefficient):
    config = Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, router_aux_loss_coef=coefficient)
    return Qwen3MoeForCausalLM(config)


for make in (mixtral, qwen):
    first = folder / f"{make.__name__}.pt"
    for micro_batches in (1, 2, 4):
        entropy = gradient(make, 0.0, micro_batches)
        balancing = gradient(make, 1.0, micro_batches) - entropy
        if not first.exists():
            torch.save((entropy, balancing), first)
        entropy_of_one, balancing_of_one = torch.load(first)
        line = (
            f"{make.__name__}, ranks {ranks}, micro-batches {micro_batches}: "
            f"cross entropy x {entropy.norm() / entropy_of_one.norm():.2f}, "
            f"balancing x {balancing.norm() / balancing_of_one.norm():.2f}\n"
        )
        if not dist.is_initialized() or dist.get_rank() == 0:
            with (folder / "lines").open("a") as file:
                file.write(line)
PYTHON
for ranks in 1 2; do
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=$ranks "$folder/router.py" "$folder" $ranks >"$folder/log" 2>&1
done
sort "$folder/lines" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
mixtral, ranks 1, micro-batches 1: cross entropy x 1.00, balancing x 1.00
mixtral, ranks 1, micro-batches 2: cross entropy x 1.00, balancing x 2.00
mixtral, ranks 1, micro-batches 4: cross entropy x 1.00, balancing x 4.00
mixtral, ranks 2, micro-batches 1: cross entropy x 1.00, balancing x 2.00
mixtral, ranks 2, micro-batches 2: cross entropy x 1.00, balancing x 4.00
mixtral, ranks 2, micro-batches 4: cross entropy x 1.00, balancing x 8.00
qwen, ranks 1, micro-batches 1: cross entropy x 1.00, balancing x 1.00
qwen, ranks 1, micro-batches 2: cross entropy x 1.00, balancing x 2.00
qwen, ranks 1, micro-batches 4: cross entropy x 1.00, balancing x 4.00
qwen, ranks 2, micro-batches 1: cross entropy x 1.00, balancing x 2.00
qwen, ranks 2, micro-batches 2: cross entropy x 1.00, balancing x 4.00
qwen, ranks 2, micro-batches 4: cross entropy x 1.00, balancing x 8.00
EXPECTED
