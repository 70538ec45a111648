"""torchtitan 0.2.2's gpt-oss and Llama 4 in our shapes.

Three things of its gpt-oss are corrected: its layers have their weights in 16 bits, whatever the trainer is asked for,
so that the optimizer would keep no 32-bit ones; it does not read ``debug.moe_force_load_balance``, which the shape says
here; and it scales rotary positions, which a factor of 1 switches off.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torchtitan.models.moe import MoEArgs
from torchtitan.protocols.train_spec import TrainSpec

from workloads.rules.torchtitan_kinds import Family, positionless_step, routed_step
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.model_spec import layers_of


def kinds_spec(e: Experiment, family: Family, flavor: str) -> TrainSpec:
    """The specification of ``family`` with our shape as its one flavor."""
    spec: TrainSpec = importlib.import_module(f"torchtitan.models.{family}").get_train_spec()
    if family == "gpt_oss":
        spec.model_cls = _in_32_bits(spec.model_cls)
    spec.model_args = {flavor: _gpt_oss(e) if family == "gpt_oss" else _llama4(e)}
    return spec


def _in_32_bits(model: Any) -> Any:
    """A class of torchtitan's whose weights are in fp32 from the start."""

    def make(*args: Any) -> nn.Module:
        made: nn.Module = model(*args)
        return made.float()

    return make


def _parts(e: Experiment) -> tuple[Attention, RoutedMLP]:
    """The first attention with positions, and the experts of all layers."""
    kinds = layers_of(e.model).kinds
    mixers = [kind.mixer for kind in kinds if isinstance(kind.mixer, Attention)]
    return (
        next((mixer for mixer in mixers if mixer.rope is not None), mixers[0]),
        next(kind.mlp for kind in kinds if isinstance(kind.mlp, RoutedMLP)),
    )


def _experts(e: Experiment, routed: RoutedMLP) -> MoEArgs:
    return MoEArgs(
        num_experts=routed.experts,
        num_shared_experts=routed.shared_experts,
        score_func="sigmoid" if routed.score == "sigmoid" else "softmax",
        route_norm=routed.normalize or routed.score == "softmax_of_chosen",
        route_scale=routed.scale,
        gate_bias=routed.router_bias,
        score_before_experts=routed.weights_inputs,
        top_k=routed.chosen,
        load_balance_coeff=None,
        _debug_force_load_balance=e.routing == "balanced",
    )


def _gpt_oss(e: Experiment) -> Any:
    from torchtitan.models.gpt_oss.model.args import GptOssModelArgs

    m, (attention, routed) = e.model, _parts(e)
    spans = [kind.mixer.span for kind in layers_of(m).kinds if isinstance(kind.mixer, Attention)]
    assert attention.rope is not None
    return GptOssModelArgs(
        max_seq_len=e.seq_len,
        vocab_size=m.vocab_size,
        dim=m.hidden_size,
        moe_inter_dim=routed.expert.width,
        n_layers=m.num_layers,
        norm_eps=m.norm_eps,
        moe_args=_experts(e, routed),
        swiglu_limit=routed.expert.limit,
        head_dim=attention.head_dim,
        n_heads=attention.heads,
        n_kv_heads=attention.kv_heads,
        sliding_window_size=next((span.size for span in spans if isinstance(span, Window)), e.seq_len),
        rope_theta=attention.rope.theta,
        rope_factor=1.0,
    )


def _llama4(e: Experiment) -> Any:
    from torchtitan.models.llama4.model.args import TransformerModelArgs

    m, (attention, routed) = e.model, _parts(e)
    listed = layers_of(m)
    layers = [listed.kinds[at] for at in listed.order]
    return TransformerModelArgs(
        dim=m.hidden_size,
        n_layers=m.num_layers,
        n_heads=attention.heads,
        n_kv_heads=attention.kv_heads,
        vocab_size=m.vocab_size,
        # It rounds 2/3 of 4 h, times the factor, up to a multiple of this: here to one multiple, the width.
        multiple_of=routed.expert.width,
        ffn_dim_multiplier=routed.expert.width / (8 * m.hidden_size),
        norm_eps=m.norm_eps,
        rope_theta=attention.rope.theta if attention.rope is not None else 10_000.0,
        max_seq_len=e.seq_len,
        every_n_layers_nope=positionless_step(layers) or None,
        moe_args=_experts(e, routed),
        auto_scale_hidden_dim=False,
        interleave_moe_layer_step=routed_step(layers) or 1,
    )
