"""Example lines of YAML for the fields that a user must give. No torch here."""

from __future__ import annotations

from collections.abc import Mapping

_EXAMPLES: Mapping[str, str] = {
    # a model: Llama 3.1 8B, Mixtral 8x7B, DeepSeek-V2-Lite
    "num_layers": "32",
    "hidden_size": "4096",
    "num_heads": "32",
    "num_kv_heads": "8",
    "ffn_hidden_size": "14336",
    "vocab_size": "128256",
    "num_experts": "8",
    "experts_per_token": "2",
    "expert_hidden_size": "14336",
    "kv_lora_rank": "512",
    "qk_nope_head_dim": "128",
    "qk_rope_head_dim": "64",
    "v_head_dim": "128",
    # a cluster: HGX H100
    "name": "ours",
    "backend": "cuda",
    "devices_per_node": "8",
    "intra_node": "{bandwidth: 360 GB/s, latency_s: 4 us}",
    "bandwidth": "50 GB/s",
    "latency_s": "5 us",
    "memory_bytes": "80 GiB",
}


def example_line(name: str) -> str | None:
    """The line that gives a field a plausible value; None if the field has no example."""
    if name == "device":
        return "defaults: [/device@device: h200, _self_]"
    return f"{name}: {_EXAMPLES[name]}" if name in _EXAMPLES else None
