#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0, torch 2.13.0. A GGUF file read by transformers loses the scaling of its positions.
#
# Expected: `from_pretrained(folder, gguf_file=...)`, which is there to go on training a model of which one has the GGUF file,
# gives the model that the file describes, or says which of its keys are not read.
# Behaviour: the base of the rotary embedding is read and its scaling is not: `rope.scaling.type` and `.factor` (linear, YaRN) are
# dropped, and so is the tensor `rope_freqs.weight`, in which llama.cpp's converter puts the scaling of Llama 3.1 and later. The
# model has `rope_type` "default", the positions of a model that was never extended, and other logits, although every weight is
# right. Nothing is reported, and `save_pretrained` writes the loss into config.json. Of all architectures only gpt-oss has code for
# these keys.
# Who meets it: fine-tuning, evaluation and conversion back from GGUF, at long contexts above all.
#
# Output of 2026-11-30 (relative difference of logits from the model with the scaling that the file has, 192 tokens):
#   llama, none: read as default, difference 0.00
#   llama, linear: read as default, difference above 0.1, logits as without scaling: True
#   llama, yarn: read as default, difference above 0.1, logits as without scaling: True
#   llama, llama3: read as default, difference above 0.1, logits as without scaling: True
#   qwen2, yarn: read as default, difference above 0.1, logits as without scaling: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0 2>/dev/null
cat >"$folder/read.py" <<'PYTHON'
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM

HEADS, HEAD, VOCABULARY, WIDTH, CONTEXT, BASE = 2, 16, 64, 32, 256, 10000.0
ORIGINAL = CONTEXT // 4
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
}
TYPES = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}


def write(path, kind, scaling, frequencies=None):
    """A model of one layer with the keys and tensors of llama.cpp's converter."""
    file = gguf.GGUFWriter(path, kind)
    file.add_context_length(CONTEXT)
    file.add_block_count(1)
    file.add_embedding_length(WIDTH)
    file.add_feed_forward_length(WIDTH)
    file.add_head_count(HEADS)
    file.add_head_count_kv(HEADS)
    file.add_key_length(HEAD)
    file.add_value_length(HEAD)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_rope_dimension_count(HEAD)
    file.add_rope_freq_base(BASE)
    file.add_vocab_size(VOCABULARY)
    if scaling in TYPES:
        file.add_rope_scaling_type(TYPES[scaling])
        file.add_rope_scaling_factor(SCALINGS[scaling]["factor"])
        file.add_rope_scaling_orig_ctx_len(ORIGINAL)
    if frequencies is not None:
        file.add_tensor("rope_freqs.weight", frequencies)
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (VOCABULARY, WIDTH), "output": (VOCABULARY, WIDTH), "output_norm": (WIDTH,)}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{part}": (WIDTH, WIDTH) for part in parts}
    shapes |= {"blk.0.attn_norm": (WIDTH,), "blk.0.ffn_norm": (WIDTH,)}
    if kind == "qwen2":
        shapes |= {f"blk.0.{part}.bias": (WIDTH,) for part in parts[:3]}
    for name, shape in shapes.items():
        value = np.ones(shape) if len(shape) == 1 else draw.standard_normal(shape) * (0.5 if "blk" in name else 1.0)
        file.add_tensor(name if name.endswith(".bias") else f"{name}.weight", value.astype(np.float32))
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def read(kind, scaling, frequencies=None):
    folder = Path(sys.argv[1]) / f"{kind}_{scaling}"
    folder.mkdir(exist_ok=True)
    write(folder / "model.gguf", kind, scaling, frequencies)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()


def meant(model, scaling):
    """The same weights with the scaling in the configuration."""
    configuration = model.config.__class__.from_dict(model.config.to_dict())
    if SCALINGS[scaling]:
        configuration.rope_parameters = {"rope_theta": BASE, **SCALINGS[scaling]}
    other = model.__class__(configuration).eval()
    other.load_state_dict(model.state_dict())
    return other


@torch.no_grad()
def logits(model):
    return model(torch.arange(192)[None] * 7 % VOCABULARY).logits


for kind, scaling in (("llama", "none"), ("llama", "linear"), ("llama", "yarn"), ("llama", "llama3"), ("qwen2", "yarn")):
    plain = read(kind, "none")
    frequencies = None
    if scaling == "llama3":
        frequencies = (plain.model.rotary_emb.inv_freq / meant(plain, scaling).model.rotary_emb.inv_freq).numpy()
        assert frequencies.max() == SCALINGS[scaling]["factor"] and frequencies.min() == 1
    model = read(kind, scaling, frequencies)
    got, wanted = logits(model), logits(meant(model, scaling))
    difference = ((got - wanted).norm() / wanted.norm()).item()
    told = "difference above 0.1" if difference > 0.1 else f"difference {difference:.2f}"
    same = f", logits as without scaling: {torch.equal(got, logits(plain))}" if SCALINGS[scaling] else ""
    print(f"{kind}, {scaling}: read as {model.config.rope_parameters['rope_type']}, {told}{same}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
llama, none: read as default, difference 0.00
llama, linear: read as default, difference above 0.1, logits as without scaling: True
llama, yarn: read as default, difference above 0.1, logits as without scaling: True
llama, llama3: read as default, difference above 0.1, logits as without scaling: True
qwen2, yarn: read as default, difference above 0.1, logits as without scaling: True
EXPECTED
