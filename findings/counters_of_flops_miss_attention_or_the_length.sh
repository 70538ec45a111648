#!/usr/bin/env bash
# calflops 0.3.2, thop 0.1.1, torchinfo 1.8.0, torch 2.13.0, transformers 5.24.0. One forward, four counts of its FLOPs.
#
# Expected: counters of FLOPs agree on the matrix products of a Llama to a percent; those that are older than fused attention
# say what they could not count, or count it as the two products that it is, whichever kernel computes it.
# Behaviour: with `attn_implementation="sdpa"`, the default of transformers, calflops and torch.profiler (`with_flops=True`)
# count the linear layers and no attention, and with "eager" both: of the same products 1.7 times as many are counted, at 1024
# tokens of this model. thop counts modules, so attention never, whatever the kernel. torchinfo's mult-adds are parameters times
# rows: a linear layer that is applied to each of 1024 tokens counts once, a thousandth of its work. All are silent. The
# profiler of deepspeed 0.19.8 counts both kernels.
# Who meets it: an MFU from a counted forward, and comparisons of models by such counts.
#
# Output of 2026-11-29 (counted / computed, multiply and add as two, one row of 1024 tokens, causal mask not credited):
#   linear layers alone: 0.60
#   calflops: sdpa 0.600, eager 1.002
#   torch.profiler: sdpa 0.601, eager 1.004
#   thop: sdpa 0.600, eager 0.600
#   torchinfo: sdpa 0.001, eager 0.001
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 transformers==5.24.0 calflops==0.3.2 torchinfo==1.8.0 \
  thop==0.1.1.post2209072238 2>/dev/null
cat >"$folder/count.py" <<'PYTHON'
import thop
import torch
import torchinfo
from calflops import calculate_flops
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, WIDTH, LAYERS, VOCABULARY = 1024, 256, 2, 1024
tokens = torch.arange(TOKENS)[None]
sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
layer = 4 * WIDTH * WIDTH + 3 * 2 * WIDTH * WIDTH
linear = 2 * TOKENS * (LAYERS * layer + WIDTH * VOCABULARY)
attention = LAYERS * 2 * 2 * TOKENS * TOKENS * WIDTH


def profiled(model):
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as seen, torch.no_grad():
        model(tokens)
    return sum(event.flops for event in seen.key_averages())


COUNTERS = {
    "calflops": lambda model: calculate_flops(
        model, kwargs={"input_ids": tokens}, print_results=False, output_as_string=False
    )[0],
    "torch.profiler": profiled,
    "thop": lambda model: 2 * thop.profile(model, inputs=(tokens,), verbose=False)[0],
    "torchinfo": lambda model: 2 * torchinfo.summary(model, input_data=tokens, verbose=0).total_mult_adds,
}
print(f"linear layers alone: {linear / (linear + attention):.2f}")
for name, counted in COUNTERS.items():
    shares = []
    for kernel in ("sdpa", "eager"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attn_implementation=kernel)).eval()
        shares.append(f"{kernel} {counted(model) / (linear + attention):.3f}")
    print(f"{name}: {', '.join(shares)}")
PYTHON
"$folder/venv/bin/python" "$folder/count.py" 2>/dev/null | grep 'sdpa\|alone' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
linear layers alone: 0.60
calflops: sdpa 0.600, eager 1.002
torch.profiler: sdpa 0.601, eager 1.004
thop: sdpa 0.600, eager 0.600
torchinfo: sdpa 0.001, eager 0.001
EXPECTED
