"""Families of models that no list of layers describes exactly, each with what the kinds of layers lack for it."""

from __future__ import annotations

from collections.abc import Mapping

_BIASED = "layer norms with biases"
_PARALLEL = "attention and MLP in parallel"
_MAMBA = "Mamba-1"
_CONVOLUTIONS = "short convolutions in place of attention"
_WEIGHTLESS = "norms without a weight"

REFUSED: Mapping[str, str] = {
    "axk1": "a norm of the output of experts alone",
    "bailing_hybrid": "gates of heads of latent attention",
    "bitnet": "norms inside attention and MLP",
    "bloom": _BIASED,
    "cohere": _PARALLEL,
    "cohere2": _PARALLEL,
    "cohere2_moe": _PARALLEL,
    "dbrx": "layer norms",
    "dots3_note_text": "gates of heads of latent attention",
    "falcon": _BIASED,
    "falcon_h1": "attention and Mamba-2 in parallel",
    "falcon_mamba": _MAMBA,
    "gpt2": _BIASED,
    "gpt_bigcode": _BIASED,
    "gpt_neox": _BIASED,
    "gptj": _BIASED,
    "jais2": _BIASED,
    "jamba": _MAMBA,
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
    "lfm3": _CONVOLUTIONS,
    "longcat_flash": "two blocks of attention in a layer",
    "mamba": _MAMBA,
    "mpt": _BIASED,
    "nanochat": _WEIGHTLESS,
    "nemotron": _BIASED,
    "olmo": _WEIGHTLESS,
    "opt": _BIASED,
    "phi": _BIASED,
    "phimoe": _BIASED,
    "qwen4_exp_text": "gated residuals of several streams",
    "recurrent_gemma": "gated linear recurrent units",
    "stablelm": _BIASED,
    "starcoder2": _BIASED,
    "zamba2": "layers that share their weights",
}
"""By the ``model_type`` of the language part."""
