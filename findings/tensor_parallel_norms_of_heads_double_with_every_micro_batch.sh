#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0, gloo, two and four ranks. Under `tp_plan="auto"` the gradients of the norms of heads double
# with each micro-batch.
#
# Expected: tensor parallelism is a matter of speed: after any number of micro-batches every gradient is that of one process. A norm
# of queries and keys (`q_norm`, `k_norm`) sees the heads of its rank alone, so its gradient is added up over ranks, once.
# Behaviour: the plans of transformers mark these norms `replicated_with_grad_allreduce`, and a hook adds up over ranks what is in
# `.grad` after each backward: not the gradient of this micro-batch, but all that was accumulated, which has been added up before.
# So t ranks multiply the first of m micro-batches by t^(m-1), the next by t^(m-2), and so on. The gradient is 32 times too large
# with two ranks and eight micro-batches, and 2731 times with four ranks, where these few weights outweigh all others in the norm
# of gradients, so that clipping at that norm makes the steps of all weights small. With one micro-batch a step everything is right,
# and so are the loss and all other weights' gradients at any number. Nothing is reported.
# Who meets it: training with `tp_plan="auto"` and several micro-batches a step (gradient accumulation) of models with norms of
# heads: Qwen3, Qwen3-MoE, Gemma 3, EXAONE 4, dots.llm1, Apertus and others. Llama has none.
#
# Output of 2026-11-30 (norm of the gradient over that of one micro-batch in one process; equal micro-batches; all in one norm):
#   llama, ranks 2, micro-batches 1: norms of heads none, others 1, all 1
#   llama, ranks 2, micro-batches 2: norms of heads none, others 2, all 2
#   llama, ranks 2, micro-batches 4: norms of heads none, others 4, all 4
#   llama, ranks 2, micro-batches 8: norms of heads none, others 8, all 8
#   qwen3, ranks 2, micro-batches 1: norms of heads 1, others 1, all 1
#   qwen3, ranks 2, micro-batches 2: norms of heads 3, others 2, all 2
#   qwen3, ranks 2, micro-batches 4: norms of heads 15, others 4, all 4
#   qwen3, ranks 2, micro-batches 8: norms of heads 255, others 8, all 8
#   gemma3_text, ranks 2, micro-batches 1: norms of heads 1, others 1, all 1
#   gemma3_text, ranks 2, micro-batches 2: norms of heads 3, others 2, all 2
#   gemma3_text, ranks 2, micro-batches 4: norms of heads 15, others 4, all 4
#   gemma3_text, ranks 2, micro-batches 8: norms of heads 255, others 8, all 8
#   llama, ranks 4, micro-batches 1: norms of heads none, others 1, all 1
#   llama, ranks 4, micro-batches 2: norms of heads none, others 2, all 2
#   llama, ranks 4, micro-batches 4: norms of heads none, others 4, all 4
#   llama, ranks 4, micro-batches 8: norms of heads none, others 8, all 8
#   qwen3, ranks 4, micro-batches 1: norms of heads 1, others 1, all 1
#   qwen3, ranks 4, micro-batches 2: norms of heads 5, others 2, all 2
#   qwen3, ranks 4, micro-batches 4: norms of heads 85, others 4, all 4
#   qwen3, ranks 4, micro-batches 8: norms of heads 21845, others 8, all 131
#   gemma3_text, ranks 4, micro-batches 1: norms of heads 1, others 1, all 1
#   gemma3_text, ranks 4, micro-batches 2: norms of heads 5, others 2, all 2
#   gemma3_text, ranks 4, micro-batches 4: norms of heads 85, others 4, all 4
#   gemma3_text, ranks 4, micro-batches 8: norms of heads 21845, others 8, all 38
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.2.6 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

folder = sys.argv[1]
dist.init_process_group("gloo")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
tokens = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norms(model, micro_batches):
    """Norm of each weight's gradient after equal micro-batches."""
    model.zero_grad()
    for _ in range(micro_batches):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: whole(weight.grad).norm() for name, weight in model.named_parameters()}


def counted(found, one, of_heads):
    """As how many micro-batches they count, in the gradients of norms of heads or in those of all other weights."""
    ratios = [found[name] / one[name] for name in one if ("q_norm" in name or "k_norm" in name) == of_heads]
    return f"{max(ratios):.0f}" if ratios else "none"


def together(found, one):
    """As how many micro-batches the norm of all gradients counts."""
    return f"{torch.stack(list(found.values())).norm() / torch.stack(list(one.values())).norm():.0f}"


for name in ("llama", "qwen3", "gemma3_text"):
    path = f"{folder}/{name}"
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **sizes, **heads)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    dist.barrier()
    one = norms(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), 1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, tp_plan="auto")
    for micro_batches in (1, 2, 4, 8):
        found = norms(model, micro_batches)
        if dist.get_rank() == 0:
            print(
                f"{name}, ranks {dist.get_world_size()}, micro-batches {micro_batches}: "
                f"norms of heads {counted(found, one, True)}, others {counted(found, one, False)}, all {together(found, one)}",
                flush=True,
            )
dist.destroy_process_group()
PYTHON
for ranks in 2 4; do
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node="$ranks" "$folder/ranks.py" "$folder/models" 2>/dev/null
done | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
llama, ranks 2, micro-batches 1: norms of heads none, others 1, all 1
llama, ranks 2, micro-batches 2: norms of heads none, others 2, all 2
llama, ranks 2, micro-batches 4: norms of heads none, others 4, all 4
llama, ranks 2, micro-batches 8: norms of heads none, others 8, all 8
qwen3, ranks 2, micro-batches 1: norms of heads 1, others 1, all 1
qwen3, ranks 2, micro-batches 2: norms of heads 3, others 2, all 2
qwen3, ranks 2, micro-batches 4: norms of heads 15, others 4, all 4
qwen3, ranks 2, micro-batches 8: norms of heads 255, others 8, all 8
gemma3_text, ranks 2, micro-batches 1: norms of heads 1, others 1, all 1
gemma3_text, ranks 2, micro-batches 2: norms of heads 3, others 2, all 2
gemma3_text, ranks 2, micro-batches 4: norms of heads 15, others 4, all 4
gemma3_text, ranks 2, micro-batches 8: norms of heads 255, others 8, all 8
llama, ranks 4, micro-batches 1: norms of heads none, others 1, all 1
llama, ranks 4, micro-batches 2: norms of heads none, others 2, all 2
llama, ranks 4, micro-batches 4: norms of heads none, others 4, all 4
llama, ranks 4, micro-batches 8: norms of heads none, others 8, all 8
qwen3, ranks 4, micro-batches 1: norms of heads 1, others 1, all 1
qwen3, ranks 4, micro-batches 2: norms of heads 5, others 2, all 2
qwen3, ranks 4, micro-batches 4: norms of heads 85, others 4, all 4
qwen3, ranks 4, micro-batches 8: norms of heads 21845, others 8, all 131
gemma3_text, ranks 4, micro-batches 1: norms of heads 1, others 1, all 1
gemma3_text, ranks 4, micro-batches 2: norms of heads 5, others 2, all 2
gemma3_text, ranks 4, micro-batches 4: norms of heads 85, others 4, all 4
gemma3_text, ranks 4, micro-batches 8: norms of heads 21845, others 8, all 38
EXPECTED
