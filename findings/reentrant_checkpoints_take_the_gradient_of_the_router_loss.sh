#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. Reentrant checkpointing takes the gradient of the router's loss and leaves the loss in the log.
#
# Expected: gradient checkpointing changes memory and time, and no gradient. Its reentrant kind has known limits and says so: a
# warning where no input needs a gradient, an error in `torch.autograd.grad`.
# Behaviour: the balancing loss of a mixture of experts is computed from the routers' logits, which transformers collects by the
# way while the layers run. In a reentrant checkpoint that forward has no graph, so the collected logits are constants. The loss has
# its value, is multiplied by its coefficient, added to the cross entropy and logged, and trains nothing: the routers have the
# gradient of the cross entropy alone, for any `router_aux_loss_coef`, as if it were 0. Nothing is reported.
# The kind that is not reentrant, the default of transformers 5, is right.
# Who meets it: mixtures with `output_router_logits=True` under `gradient_checkpointing_kwargs={"use_reentrant": True}`, which older
# configurations carry on, and which TRL 1.16.0 sets by itself for adapters under ZeRO-3.
#
# Output of 2026-11-30 (norms of gradients at the routers' weights, of the balancing loss with a coefficient of 1):
#   mixtral, no checkpoints: balancing loss 2.01, its gradient 0.349, that of the cross entropy 0.013
#   mixtral, not reentrant: balancing loss 2.01, its gradient 0.349, that of the cross entropy 0.013
#   mixtral, reentrant: balancing loss 2.01, its gradient 0.000, that of the cross entropy 0.013
#   qwen3_moe, no checkpoints: balancing loss 2.01, its gradient 0.336, that of the cross entropy 0.005
#   qwen3_moe, not reentrant: balancing loss 2.01, its gradient 0.336, that of the cross entropy 0.005
#   qwen3_moe, reentrant: balancing loss 2.01, its gradient 0.000, that of the cross entropy 0.005
#   gpt_oss, no checkpoints: balancing loss 2.03, its gradient 0.507, that of the cross entropy 0.062
#   gpt_oss, not reentrant: balancing loss 2.03, its gradient 0.507, that of the cross entropy 0.062
#   gpt_oss, reentrant: balancing loss 2.03, its gradient 0.000, that of the cross entropy 0.062
#   olmoe, no checkpoints: balancing loss 2.01, its gradient 0.331, that of the cross entropy 0.008
#   olmoe, not reentrant: balancing loss 2.01, its gradient 0.331, that of the cross entropy 0.008
#   olmoe, reentrant: balancing loss 2.01, its gradient 0.000, that of the cross entropy 0.008
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.2.6 2>/dev/null
cat >"$folder/router.py" <<'PYTHON'
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
tokens = torch.randint(3, 128, (2, 24), generator=torch.Generator().manual_seed(0))
MODELS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
WAYS = {"no checkpoints": None, "not reentrant": False, "reentrant": True}


def gradient(model, coefficient):
    """The routers' gradients, in one vector, and the balancing loss."""
    model.zero_grad()
    model.router_aux_loss_coef = coefficient
    out = model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=True)
    out.loss.backward()
    routers = ("gate.weight", "router.weight")
    found = [weight.grad.flatten() for name, weight in model.named_parameters() if name.endswith(routers)]
    return torch.cat(found), out.aux_loss.item()


for name, experts in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes, **heads, **experts)).train()
    for kind, given in WAYS.items():
        model.gradient_checkpointing_disable()
        if given is not None:
            model.gradient_checkpointing_enable({"use_reentrant": given})
        without, _ = gradient(model, 0.0)
        with_loss, value = gradient(model, 1.0)
        norms = f"its gradient {(with_loss - without).norm():.3f}, that of the cross entropy {without.norm():.3f}"
        print(f"{name}, {kind}: balancing loss {value:.2f}, {norms}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/router.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
mixtral, no checkpoints: balancing loss 2.01, its gradient 0.349, that of the cross entropy 0.013
mixtral, not reentrant: balancing loss 2.01, its gradient 0.349, that of the cross entropy 0.013
mixtral, reentrant: balancing loss 2.01, its gradient 0.000, that of the cross entropy 0.013
qwen3_moe, no checkpoints: balancing loss 2.01, its gradient 0.336, that of the cross entropy 0.005
qwen3_moe, not reentrant: balancing loss 2.01, its gradient 0.336, that of the cross entropy 0.005
qwen3_moe, reentrant: balancing loss 2.01, its gradient 0.000, that of the cross entropy 0.005
gpt_oss, no checkpoints: balancing loss 2.03, its gradient 0.507, that of the cross entropy 0.062
gpt_oss, not reentrant: balancing loss 2.03, its gradient 0.507, that of the cross entropy 0.062
gpt_oss, reentrant: balancing loss 2.03, its gradient 0.000, that of the cross entropy 0.062
olmoe, no checkpoints: balancing loss 2.01, its gradient 0.331, that of the cross entropy 0.008
olmoe, not reentrant: balancing loss 2.01, its gradient 0.331, that of the cross entropy 0.008
olmoe, reentrant: balancing loss 2.01, its gradient 0.000, that of the cross entropy 0.008
EXPECTED
