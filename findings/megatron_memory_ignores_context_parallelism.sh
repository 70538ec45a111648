#!/usr/bin/env bash
# megatron-core 0.19.2. The memory that Megatron prints beside the measured one knows neither recomputation nor context parallelism.
#
# Expected: the "theoretical memory footprints" follow what the run was given to save memory: recomputation of all layers keeps
# their inputs alone, context parallelism of 8 keeps an eighth of the tokens, and the distributed optimizer shards its states
# over data- and context-parallel ranks together, as it does.
# Behaviour: activations have two formulas. One, for sequence parallelism with selective recomputation, has the width of the MLP;
# the other, for everything else, has not. Neither reads `--context-parallel-size`, the experts, or whether
# `--recompute-granularity` is full: full recomputation of a Llama 3 8B over two tensor-parallel ranks is printed with a third
# more than selective, and context parallelism without a saving. Optimizer states are divided by the data-parallel size that
# leaves context parallelism out: eight GPUs that split sequences are printed with 135 GiB of weights and states, and those that
# split the batch with 56 GiB, where both hold the same.
# Who meets it: whoever picks a layout, or a number of GPUs, by these lines.
#
# Output of 2026-11-29 (MB of 2^20 bytes; Llama 3 8B, 8192 tokens, distributed optimizer):
#   8 GPUs, tp 2, selective: weights and states 34463, activations 18468
#   8 GPUs, tp 2, none: weights and states 34463, activations 24807
#   8 GPUs, tp 2, full: weights and states 34463, activations 24807
#   8 GPUs, dp 8: weights and states 57437, activations 38762
#   8 GPUs, cp 8: weights and states 137849, activations 38762
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip download --quiet --no-deps --only-binary :all: --implementation cp --python-version 3.12 \
  --dest "$folder" megatron-core==0.19.2 2>/dev/null
python3 -m zipfile -e "$folder"/*.whl "$folder/site"
# The functions alone: their package imports torch.
cat >"$folder/memory.py" <<'PYTHON'
import ast
import contextlib
import math
import sys
import types

tree = ast.parse(open(sys.argv[1]).read())
wanted = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.Assign))]
names = {"math": math, "is_hybrid_model": lambda args: False, "print_rank_0": lambda text: None}
exec(compile(ast.Module(wanted, []), "theoretical_memory_usage.py", "exec"), names)


class Flags(types.SimpleNamespace):
    def __getattr__(self, name):
        return None  # a flag that is not given


SHAPE = dict(num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, group_query_attention=True)
SHAPE |= dict(kv_channels=128, ffn_hidden_size=14336, swiglu=True, padded_vocab_size=128256, normalization="RMSNorm")
SHAPE |= dict(untie_embeddings_and_output_weights=True, seq_length=8192, micro_batch_size=1)


def shown(name, gpus, tp=1, cp=1, **flags):
    flags = Flags(
        **SHAPE,
        **flags,
        world_size=gpus,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=1,
        expert_tensor_parallel_size=tp,
        expert_model_parallel_size=1,
        data_parallel_size=gpus // tp // cp,
        use_distributed_optimizer=True,
    )
    with contextlib.redirect_stdout(None):
        states, activations, _ = names["report_theoretical_memory"](flags, num_microbatches=1)
    print(f"{name}: weights and states {states:.0f}, activations {activations:.0f}")


SEQUENCE = dict(tp=2, sequence_parallel=True)
shown("8 GPUs, tp 2, selective", 8, **SEQUENCE, recompute_granularity="selective")
shown("8 GPUs, tp 2, none", 8, **SEQUENCE)
shown("8 GPUs, tp 2, full", 8, **SEQUENCE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
shown("8 GPUs, dp 8", 8)
shown("8 GPUs, cp 8", 8, cp=8)
PYTHON
python3 "$folder/memory.py" "$folder/site/megatron/training/theoretical_memory_usage.py" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
8 GPUs, tp 2, selective: weights and states 34463, activations 18468
8 GPUs, tp 2, none: weights and states 34463, activations 24807
8 GPUs, tp 2, full: weights and states 34463, activations 24807
8 GPUs, dp 8: weights and states 57437, activations 38762
8 GPUs, cp 8: weights and states 137849, activations 38762
EXPECTED
