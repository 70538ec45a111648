#!/usr/bin/env bash
# megatron-core 0.19.2. The TFLOP/s that Megatron logs counts sliding-window layers as full attention.
#
# Expected: the formula behind the logged throughput knows the model: it counts the causal mask, latent attention, gated
# delta rule, experts, multi-token prediction and packed sequences, and `--window-size` is a flag beside them.
# Behaviour: neither `--window-size` nor `--window-attn-skip-freq` enters. A model of the shape of gpt-oss-20b (every other
# layer sees 128 tokens) has 1.64 x the FLOPs that it computes at 131,072 tokens and 1.05 x at 4,096, and its logged MFU is
# too high by that. Two runs that differ in the window alone differ in logged TFLOP/s by their time alone.
# Who meets it: whoever compares logged TFLOP/s of a model with windows to one without, or to another framework's.
#
# Output of 2026-11-28:
#   4096 tokens: counted with a window / without 1.00, counted / computed 1.05
#   131072 tokens: counted with a window / without 1.00, counted / computed 1.64
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
  --dest "$folder" megatron-core==0.19.2 2>/dev/null
python3 -m zipfile -e "$folder"/*.whl "$folder/site"
# The function alone: its module imports torch.
cat >"$folder/count.py" <<'PYTHON'
import ast
import sys
import types

tree = ast.parse(open(sys.argv[1]).read())
wanted = [node for node in tree.body if getattr(node, "name", "") == "num_floating_point_operations"]
names = {"is_linear_attention_variant": lambda variant: False, "is_hybrid_model": lambda args: False}
exec(compile(ast.Module(wanted, []), "training.py", "exec"), names)


class Flags(types.SimpleNamespace):
    def __getattr__(self, name):
        return None  # a flag that is not given


SHAPE = dict(num_layers=24, hidden_size=2880, num_attention_heads=64, num_query_groups=8, group_query_attention=True)
SHAPE |= dict(kv_channels=64, ffn_hidden_size=2880, moe_ffn_hidden_size=2880, num_experts=32, moe_router_topk=4)
SHAPE |= dict(moe_layer_freq=1, swiglu=True, padded_vocab_size=201088)


def counted(length, **window):
    return names["num_floating_point_operations"](Flags(**SHAPE, seq_length=length, **window), 1)


for length in (4096, 131072):
    full, windows = counted(length), counted(length, window_size=(127, 0), window_attn_skip_freq=2)
    pairs_full, pairs_window = length * length / 2, 128 * length - 128 * 127 / 2
    one_pair = 3 * 2 * 2 * 64 * 64  # forward and backward, two products, multiply and add, heads x size
    computed = full - 12 * one_pair * (pairs_full - pairs_window)
    print(f"{length} tokens: counted with a window / without {windows / full:.2f}, counted / computed {windows / computed:.2f}")
PYTHON
python3 "$folder/count.py" "$folder/site/megatron/training/training.py" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
4096 tokens: counted with a window / without 1.00, counted / computed 1.05
131072 tokens: counted with a window / without 1.00, counted / computed 1.64
EXPECTED
