"""Small models whose layers differ by kind, each with what one published family has."""

from __future__ import annotations

from typing import Any

from workloads.spec.model_spec import ModelSpec, model_from_dict

Part = dict[str, Any]
DENSE: Part = {"kind": "dense", "width": 48, "activation": "silu"}
RELU2: Part = {"kind": "dense", "width": 40, "activation": "relu2", "gated": False}
GELU: Part = {"kind": "dense", "width": 48, "activation": "gelu_tanh"}
ROUTED: Part = {
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {"kind": "dense", "width": 24, "activation": "silu"},
    "shared": {"kind": "dense", "width": 24, "activation": "silu"},
    "shared_experts": 1,
}
CLAMPED: Part = {  # gpt-oss, with a limit that many numbers pass
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {
        "kind": "dense",
        "width": 24,
        "activation": "clamped_silu",
        "bias": True,
        "limit": 0.08,
        "slope": 1.702,
        "offset": 1.0,
    },
    "score": "softmax_of_chosen",
    "router_bias": True,
}
SQUARED: Part = {  # Nemotron 3
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {"kind": "dense", "width": 24, "activation": "relu2", "gated": False},
    "shared": {"kind": "dense", "width": 40, "activation": "relu2", "gated": False},
    "shared_experts": 1,
    "score": "sigmoid",
    "scale": 2.5,
    "correction": True,
}
SIGMOID: Part = {**ROUTED, "score": "sigmoid", "scale": 2.5, "correction": True}  # Kimi Linear
LATENT: Part = {**SQUARED, "latent": 20}  # Nemotron 3 Super and Ultra
LATENT_SILU: Part = {**ROUTED, "latent": 12, "shared_gate": True}
GELU_EXPERTS: Part = {
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {"kind": "dense", "width": 24, "activation": "gelu_tanh", "bias": True},
}
BESIDE: Part = {  # Gemma 4
    "kind": "routed",
    "experts": 8,
    "chosen": 2,
    "expert": {"kind": "dense", "width": 24, "activation": "gelu_tanh"},
    "shared": {"kind": "dense", "width": 40, "activation": "gelu_tanh"},
    "router_scales": True,
}
WEIGHTED: Part = {
    **ROUTED,
    "chosen": 1,
    "score": "sigmoid",
    "normalize": False,
    "weights_inputs": True,
}
ROPE: Part = {"kind": "rope", "theta": 500_000.0}
LOCAL_ROPE: Part = {"kind": "rope", "theta": 10_000.0}


def window(size: int) -> Part:
    return {"kind": "window", "size": size}


def chunk(size: int) -> Part:
    return {"kind": "chunk", "size": size}


def attention(**changes: Any) -> Part:
    usual = {"kind": "attention", "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 8, "rope": ROPE}
    return {**usual, **changes}


def mamba(**changes: Any) -> Part:
    usual = {"kind": "mamba2", "heads": 8, "head_dim": 4, "groups": 2, "state": 6, "kernel": 4}
    return {**usual, **changes}


def gated_delta(**changes: Any) -> Part:
    usual = {"kind": "gated_delta_rule", "key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 8, "kernel": 4}
    return {**usual, **changes}


def kimi_delta(**changes: Any) -> Part:
    return {"kind": "kimi_delta", "heads": 4, "head_dim": 6, "kernel": 4, **changes}


def latent(**changes: Any) -> Part:
    """Latent attention without positions (Kimi Linear); every size is another one."""
    usual = {"kind": "latent_attention", "heads": 4, "kv_rank": 10, "nope_dim": 6, "rope_dim": 4, "value_dim": 8}
    return {**usual, **changes}


def layer(mixer: Part | None, mlp: Part | None = DENSE, norms: int = 2, **options: Any) -> Part:
    return {"mixer": mixer, "mlp": mlp, "norms": norms, **options}


_ALTERNATING = [0, 1, 0, 1, 0]
_GEMMA4: Part = {"norm": "head", "value_norm": True, "score_scale": 0.4}
MODELS: dict[str, tuple[list[Part], list[int]]] = {
    # A window of 5 of 16 tokens, which is no multiple of a rank's or a block's tokens.
    "sliding": ([layer(attention(span=window(5))), layer(attention())], _ALTERNATING),
    "chunked": ([layer(attention(span=chunk(8))), layer(attention())], _ALTERNATING),
    "chunked_unevenly": ([layer(attention(span=chunk(6))), layer(attention())], _ALTERNATING),
    "biases": ([layer(attention(bias=True, output_bias=True)), layer(attention(bias=True))], _ALTERNATING),
    "sinks": ([layer(attention(span=window(5), sinks=True)), layer(attention(sinks=True))], _ALTERNATING),
    "gate_of_elements": ([layer(attention(gate="element", norm="head", rope={**ROPE, "rotated": 0.5}))], [0] * 5),
    "gate_of_heads": (
        [layer(attention(gate="head", span=window(4))), layer(attention(gate="head", bias=True, heads=2))],
        _ALTERNATING,
    ),
    "norm_over_heads": (  # MiniMax-M2
        [
            layer(attention(norm="all_heads", rope={**ROPE, "rotated": 0.5})),
            layer(attention(norm="all_heads", span=window(5), kv_heads=4)),
        ],
        _ALTERNATING,
    ),
    "norms_of_outputs": (  # OLMo 2 and 3
        [
            layer(attention(norm="all_heads"), outputs_normed=True),
            layer(attention(norm="all_heads", span=window(4)), outputs_normed=True),
        ],
        _ALTERNATING,
    ),
    "soft_cap": ([layer(attention(soft_cap=True, span=window(7))), layer(attention(soft_cap=True))], _ALTERNATING),
    "positions": (
        [
            layer(attention(rope=LOCAL_ROPE, norm="without_weight")),
            layer(attention(rope=None)),
            layer(attention(rope={**ROPE, "rotated": 0.3, "theta": 1_000_000.0}, head_dim=16, value_dim=16)),
        ],
        [0, 1, 2, 1, 0],
    ),
    "heads_by_kind": (
        [
            layer(attention(span=window(5), kv_heads=4, head_dim=12, value_dim=8, sinks=True, value_scale=0.7)),
            layer(attention(head_dim=12, value_dim=8, rope={**LOCAL_ROPE, "rotated": 0.34}, value_scale=0.7)),
        ],
        _ALTERNATING,
    ),
    "squared_relu": (
        [
            layer(attention(rope=None), {"kind": "dense", "width": 40, "activation": "relu2", "gated": False}),
            layer(attention(), DENSE),
        ],
        _ALTERNATING,
    ),
    "sandwich": (
        [
            layer(attention(span=window(3), norm="head", rope=LOCAL_ROPE), GELU, norms=4),
            layer(attention(norm="head"), GELU, norms=4),
        ],
        _ALTERNATING,
    ),
    "scaled_scores": (  # Gemma 2 and 3
        [
            layer(attention(span=window(3), norm="head", rope=LOCAL_ROPE, score_scale=0.3), GELU, norms=4),
            layer(attention(score_scale=0.3), GELU, norms=4),
            layer(attention(norm="without_weight", score_scale=0.3), GELU, norms=4),
        ],
        [0, 1, 2, 1, 0],
    ),
    "dense_beside_experts": (  # Gemma 4
        [
            layer(attention(span=window(5), kv_heads=4, rope=LOCAL_ROPE, **_GEMMA4), BESIDE, norms=7),
            layer(
                attention(
                    head_dim=16,
                    value_dim=16,
                    rope={**ROPE, "rotated": 0.3, "proportional": True},
                    shared_kv=True,
                    **_GEMMA4,
                ),
                BESIDE,
                norms=7,
            ),
        ],
        _ALTERNATING,
    ),
    "dense_between_experts": ([layer(attention()), layer(attention(), ROUTED)], _ALTERNATING),
    "gate_of_shared_experts": ([layer(attention(gate="head"), {**ROUTED, "shared_gate": True})], [0] * 5),
    "weighted_inputs": (
        [
            layer(attention(span=chunk(6), norm="without_weight"), WEIGHTED),
            layer(attention(rope=None), {**DENSE, "width": 32}),
        ],
        _ALTERNATING,
    ),
    "clamped_experts": (
        [
            layer(attention(span=window(5), sinks=True, bias=True, output_bias=True), CLAMPED),
            layer(attention(sinks=True, bias=True, output_bias=True), CLAMPED),
        ],
        _ALTERNATING,
    ),
    "experts_of_squared_relu": ([layer(attention(rope=None), SQUARED), layer(attention(), RELU2)], _ALTERNATING),
    "latent_experts": ([layer(attention(rope=None), LATENT), layer(attention(), RELU2)], _ALTERNATING),
    "latent_experts_with_gates": ([layer(attention(), LATENT_SILU)], [0] * 5),
    "experts_of_gelu": ([layer(attention(norm="head"), GELU_EXPERTS)], [0] * 5),
}
"""Kinds of layers and their order, by name."""
RECURRENT: dict[str, tuple[list[Part], list[int]]] = {
    "mamba": (
        [layer(mamba()), layer(attention(rope=None)), layer(mamba(bias=True, convolution_bias=False, kernel=3))],
        [0, 1, 2, 0, 2],
    ),
    "one_part": (
        [layer(mamba(), None, norms=1), layer(None, RELU2, norms=1), layer(attention(rope=None), None, norms=1)],
        [0, 1, 0, 2, 1],
    ),
    "one_part_of_experts": (
        [layer(mamba(), None, norms=1), layer(None, ROUTED, norms=1), layer(attention(), None, norms=1)],
        [0, 1, 2, 1, 0],
    ),
    "gated_delta": (
        [layer(gated_delta()), layer(attention(gate="element", rope={**ROPE, "rotated": 0.5}))],
        [0, 0, 0, 1, 0],
    ),
    "kimi_delta": (
        [layer(kimi_delta()), layer(attention(rope=None)), layer(kimi_delta(full_rank_gate=True, kernel=3))],
        [0, 1, 2, 0, 2],
    ),
    "kimi_linear": ([layer(kimi_delta()), layer(latent())], [0, 0, 1, 0, 1]),
    "kimi_linear_of_experts": (
        [layer(kimi_delta()), layer(kimi_delta(), SIGMOID), layer(latent(q_rank=12), SIGMOID)],
        [0, 1, 2, 1, 2],
    ),
}
"""The same with recurrent layers."""
DIVIDED: dict[str, tuple[list[Part], list[int]]] = {
    "divided_mamba": ([layer(mamba(groups=4, bias=True)), layer(attention(rope=None))], [0, 1, 0]),
    "divided_gated_delta": (
        [layer(gated_delta(key_heads=4, value_heads=8, value_dim=4)), layer(attention())],
        [0, 0, 1],
    ),
    "divided_kimi_delta": (
        [layer(kimi_delta()), layer(kimi_delta(full_rank_gate=True, kernel=3)), layer(attention())],
        [0, 1, 2],
    ),
}
"""Recurrent layers of which each of four ranks has a head and a group."""

OF_ENDS: dict[str, Part] = {
    "scaled_scores": {"scaled_embedding": True},
    "dense_beside_experts": {"scaled_embedding": True, "logit_cap": 0.4},
}
"""What models have beside their layers; the cap is one that many logits come near to."""


def kind_model(named: str | tuple[list[Part], list[int]], *, tie: bool = False, **sizes: int) -> ModelSpec:
    """A model of `MODELS`, `RECURRENT` or `DIVIDED` by its name, or of other kinds and their order; ``sizes`` in place
    of the small ones."""
    kinds, order = (MODELS | RECURRENT | DIVIDED)[named] if isinstance(named, str) else named
    ends = OF_ENDS.get(named, {}) if isinstance(named, str) else {}
    return model_from_dict(
        {
            "name": f"parity_{named}" if isinstance(named, str) else "kinds",
            "hidden_size": 32,
            "vocab_size": 96,
            "tie_embeddings": tie,
            "norm_eps": 1e-5,
            "layers": {"kinds": kinds, "order": order, **ends},
            **sizes,
        }
    )
