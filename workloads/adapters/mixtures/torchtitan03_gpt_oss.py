"""torchtitan 0.3's gpt-oss in our shape, of the parts of its own flavors but for the backend of attention: flex, as the
adapter asks of every model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchtitan.models.common import CosSinRoPE, Linear, RMSNorm
from torchtitan.models.common.attention import FusedQKVLinear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_router_config,
    make_token_dispatcher_config,
)
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.models.gpt_oss.parallelize import parallelize_gptoss

from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds import attention as kinds
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.layer_kinds.spans import Window
from workloads.spec.model_spec import layers_of

_INIT: Mapping[str, Any] = {"weight": skip_param_init, "bias": skip_param_init}
_SINKS: Mapping[str, Any] = {"sinks": skip_param_init}
_EXPERTS: Mapping[str, Any] = dict.fromkeys(
    ("mlp1_weight_EGD", "mlp1_bias_EG", "mlp2_weight_EDF", "mlp2_bias_ED"), skip_param_init
)
MODEL, PARALLELIZE = GptOssModel, parallelize_gptoss


def layers(e: Experiment) -> list[Any]:
    """Configurations of all layers."""
    listed, h = layers_of(e.model), e.model.hidden_size

    def norm() -> Any:
        return RMSNorm.Config(normalized_shape=h, eps=e.model.norm_eps, param_init={"weight": skip_param_init})

    made = []
    for at in listed.order:
        mixer, routed = listed.kinds[at].mixer, listed.kinds[at].mlp
        assert isinstance(mixer, kinds.Attention) and isinstance(routed, RoutedMLP)
        made.append(
            GptOssTransformerBlock.Config(
                attention_norm=norm(), ffn_norm=norm(), attention=_attention(e, mixer), moe=_experts(h, routed)
            )
        )
    return made


def _attention(e: Experiment, mixer: kinds.Attention) -> Any:
    h = e.model.hidden_size
    assert mixer.rope is not None
    columns = (mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim
    return Attention.Config(
        n_heads=mixer.heads,
        n_kv_heads=mixer.kv_heads,
        head_dim=mixer.head_dim,
        dim=h,
        qkv_linear=FusedQKVLinear.Config(
            head_dim=mixer.head_dim,
            n_heads=mixer.heads,
            n_kv_heads=mixer.kv_heads,
            wqkv=Linear.Config(in_features=h, out_features=columns, bias=True, param_init=_INIT),
        ),
        wo=ScaledBiasRowwiseLinear.Config(
            in_features=mixer.heads * mixer.head_dim, out_features=h, bias=True, param_init=_INIT
        ),
        sliding_window_size=mixer.span.size if isinstance(mixer.span, Window) else None,
        inner_attention=get_attention_config("flex"),
        param_init=_SINKS,
        rope=CosSinRoPE.Config(dim=mixer.head_dim, max_seq_len=e.seq_len, theta=mixer.rope.theta),
    )


def _experts(hidden: int, routed: RoutedMLP) -> Any:
    dispatcher = make_token_dispatcher_config(
        num_experts=routed.experts, top_k=routed.chosen, comm_backend="standard", hidden_dim=hidden
    )
    experts = GptOssGroupedExperts.Config(
        dim=hidden,
        hidden_dim=routed.expert.width,
        num_experts=routed.experts,
        swiglu_limit=routed.expert.limit,
        param_init=_EXPERTS,
    )
    router = make_router_config(
        dim=hidden,
        num_experts=routed.experts,
        gate_param_init=dict(_INIT),
        top_k=routed.chosen,
        score_func="softmax",
        route_norm=routed.normalize or routed.score == "softmax_of_chosen",
        route_scale=routed.scale,
        bias=True,
    )
    return GptOssMoE.Config(
        num_experts=routed.experts,
        load_balance_coeff=None,
        router=router,
        routed_experts=RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher),
    )
