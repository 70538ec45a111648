#!/usr/bin/env bash
# transformers 4.57.6 and 5.24.0. A config.json that 5 has saved is another model when 4 reads it, without a word.
#
# Expected: a file with the same `model_type` is the same model, or the older version says that it is too new for it; 5 reads
# the files of 4.
# Behaviour: 5 writes the base and the scaling of positions as `rope_parameters` alone. 4 keeps that field as an attribute
# that nothing reads, and takes its default for `rope_theta`, 10,000, and no scaling: Llama 3.1 with 500,000 and a factor of 8
# becomes a model with other positions, whose weights load without a complaint. The number of experts of Qwen3-MoE, which 5
# writes as `num_local_experts`, becomes the default of 128.
# Who meets it: whoever fine-tunes with 5 and goes on with a training or serving framework that is pinned to 4; and each
# reader of config.json that looks up `rope_theta` with a default.
#
# Output of 2026-11-28:
#   written by 5.24.0: llama rope_theta 500000.0 factor 8.0; qwen3_moe experts 60
#   read by 4.57.6: llama rope_theta 10000.0 scaling None; qwen3_moe experts 128
#   read by 5.24.0: llama rope_theta 500000.0 factor 8.0; qwen3_moe experts 60
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 4.57.6 5.24.0; do
  python3 -m venv "$folder/$version"
  "$folder/$version/bin/pip" install --quiet "transformers==$version" numpy==2.2.6
done
cat >"$folder/both.py" <<'PYTHON'
import sys

import transformers
from transformers import AutoConfig, LlamaConfig, Qwen3MoeConfig

step, folder = sys.argv[1:]
if step == "written":
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    LlamaConfig(
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **scaling}, max_position_embeddings=131072
    ).save_pretrained(f"{folder}/llama")
    Qwen3MoeConfig(num_experts=60).save_pretrained(f"{folder}/qwen3_moe")
llama, routed = (AutoConfig.from_pretrained(f"{folder}/{name}") for name in ("llama", "qwen3_moe"))
if hasattr(llama, "rope_theta"):
    positions = f"rope_theta {llama.rope_theta} scaling {llama.rope_scaling}"
else:
    positions = f"rope_theta {llama.rope_parameters['rope_theta']} factor {llama.rope_parameters['factor']}"
print(f"{step} by {transformers.__version__}: llama {positions}; qwen3_moe experts {routed.num_experts}")
PYTHON
{
  "$folder/5.24.0/bin/python" "$folder/both.py" written "$folder" 2>/dev/null
  "$folder/4.57.6/bin/python" "$folder/both.py" read "$folder" 2>/dev/null
  "$folder/5.24.0/bin/python" "$folder/both.py" read "$folder" 2>/dev/null
} | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
written by 5.24.0: llama rope_theta 500000.0 factor 8.0; qwen3_moe experts 60
read by 4.57.6: llama rope_theta 10000.0 scaling None; qwen3_moe experts 128
read by 5.24.0: llama rope_theta 500000.0 factor 8.0; qwen3_moe experts 60
EXPECTED
