#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0. Its memory estimators take a model on the meta device for one of its weights.
#
# Expected: `estimate_zero3_model_states_mem_needs_all_live(model)` and the one of ZeRO-2 read the shapes of the parameters, so a
# model on `torch.device("meta")`, as one makes it when it does not fit the machine, has the figures of the same model in memory.
# Behaviour: parameters are told apart by the address of their data, so that shared ones count once. On the meta device every
# address is 0, and only the last parameter is counted: the head, or the last norm where the head is tied. The shape of Llama 3
# 70B is estimated as 1.05 billion parameters and 4 GB a GPU of 64 where the formula gives 22. Nothing is reported.
# Who meets it: whoever sizes a cluster or the host's memory for a model before it is loaded.
#
# Output of 2026-11-29 (millions of parameters; GB a GPU under ZeRO-3 on 8 x 8 GPUs, nothing offloaded):
#   small in memory: 138 million, 0.07 GB
#   small on meta: 8 million, 0.03 GB
#   Llama 3 70B on meta: 1050 million, 4.19 GB
#   Llama 3 70B by its number of parameters: 70552 million, 22.39 GB
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 deepspeed==0.19.8 2>/dev/null
cat >"$folder/estimate.py" <<'PYTHON'
import contextlib
import io
import re

import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as by_number
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live as by_model
from torch import nn


class Layer(nn.Module):
    def __init__(self, hidden, key_value, wide):
        super().__init__()
        for name, rows, columns in (
            ("query", hidden, hidden),
            ("key", key_value, hidden),
            ("value", key_value, hidden),
            ("out", hidden, hidden),
            ("gate", wide, hidden),
            ("up", wide, hidden),
            ("down", hidden, wide),
        ):
            setattr(self, name, nn.Linear(columns, rows, bias=False))


class Model(nn.Module):
    def __init__(self, layers, hidden, key_value, wide, vocabulary):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Layer(hidden, key_value, wide) for _ in range(layers))
        self.head = nn.Linear(hidden, vocabulary, bias=False)


def estimated(function, *sizes):
    """(Millions of parameters that it names, GB a GPU without offload) of what the estimator prints."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        function(*sizes, num_gpus_per_node=8, num_nodes=8)
    parameters = re.search(r"(\d+)M total params", text.getvalue()).group(1)
    plain = re.search(r"\|\s*([\d.]+)GB \| offload_param=none, offload_optimizer=none", text.getvalue()).group(1)
    return f"{parameters} million, {plain} GB"


small = {"layers": 8, "hidden": 1024, "key_value": 256, "wide": 4096, "vocabulary": 8192}
llama = {"layers": 80, "hidden": 8192, "key_value": 1024, "wide": 28672, "vocabulary": 128256}
print(f"small in memory: {estimated(by_model, Model(**small))}")
with torch.device("meta"):
    print(f"small on meta: {estimated(by_model, Model(**small))}")
    model = Model(**llama)
print(f"Llama 3 70B on meta: {estimated(by_model, model)}")
number, largest = sum(p.numel() for p in model.parameters()), model.head.weight.numel()
print(f"Llama 3 70B by its number of parameters: {estimated(by_number, number, largest)}")
PYTHON
"$folder/venv/bin/python" "$folder/estimate.py" 2>/dev/null | grep -v WARNING | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
small in memory: 138 million, 0.07 GB
small on meta: 8 million, 0.03 GB
Llama 3 70B on meta: 1050 million, 4.19 GB
Llama 3 70B by its number of parameters: 70552 million, 22.39 GB
EXPECTED
