#!/usr/bin/env bash
# accelerate 1.15.0, torch 2.13.0. With `mixed_precision: bf16` and FSDP2 the loss that a model returns is rounded to bf16.
#
# Expected: mixed precision computes matrix products in bf16, and a loss that the model computes in fp32 (every model of
# transformers does: `logits.float()`) comes back in fp32, as it does from accelerate's DDP and FSDP1.
# Behaviour: the policy that accelerate makes for FSDP2 has `output_dtype=torch.bfloat16`, and `fully_shard` of the whole
# model casts everything that the model returns, the loss too. Between 8 and 16, where a language model starts, a logged
# loss is then a multiple of 1/16, between 2 and 4 one of 1/64: curves show steps, and two runs whose losses differ by
# less look equal. The same policy reduces gradients in bf16 (`reduce_dtype`), where FSDP2 is otherwise given fp32. A
# configuration file can change neither; `mixed_precision_policy` of the plugin in Python can.
# The script does what `Accelerator.prepare` does in `fsdp2_prepare_model`: on a CPU accelerate leaves FSDP out in silence.
#
# Output of 2026-11-27:
#   param_dtype=torch.bfloat16 reduce_dtype=torch.bfloat16 output_dtype=torch.bfloat16
#   computed torch.float32 (10.510761), a multiple of 1/16: False
#   returned torch.bfloat16 (10.500000), a multiple of 1/16: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 accelerate==1.15.0
cat >"$folder/loss.py" <<'PYTHON'
import torch
import torch.distributed as dist
from accelerate import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


def told(how, loss):
    print(how, loss.dtype, f"({loss.item():.6f}), a multiple of 1/16: {loss.item() * 16 % 1 == 0}")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32_000, 16)
        self.head = nn.Linear(16, 32_000, bias=False)

    def forward(self, tokens):
        logits = self.head(self.embedding(tokens)).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        told("computed", loss)
        return loss


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
plugin.set_mixed_precision("bf16")  # what Accelerator(mixed_precision="bf16") calls
policy = plugin.mixed_precision_policy
print(f"param_dtype={policy.param_dtype} reduce_dtype={policy.reduce_dtype} output_dtype={policy.output_dtype}")
torch.manual_seed(0)
model = fully_shard(Model(), mp_policy=policy)
loss = model(torch.arange(256).view(1, 256))
told("returned", loss)
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/loss.py" 2>"$folder/errors" | tee "$folder/output"
sed -E 's/\([0-9.]+\)/(LOSS)/' "$folder/output" | diff - /dev/fd/3 3<<'EXPECTED'
param_dtype=torch.bfloat16 reduce_dtype=torch.bfloat16 output_dtype=torch.bfloat16
computed torch.float32 (LOSS), a multiple of 1/16: False
returned torch.bfloat16 (LOSS), a multiple of 1/16: True
EXPECTED
