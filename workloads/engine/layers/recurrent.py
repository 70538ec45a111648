"""Recurrent mixers, in the place of a block's attention.

Shapes as in `workloads.engine.layers.block`; C columns of the projection, O channels of the output.

    projection  one column-parallel product [T, C] of everything that has heads or groups
    recurrence  convolution, recurrence, gate and norm: `workloads.engine.kind_ops.fused_scan`. It saves its inputs
                only, so a layer keeps the projection and the input of the output projection
    out         [T_s, D], row-parallel

A rank has whole heads and groups of all tokens of its sequences, so no state leaves it. With context parallelism it
has them for the recurrence alone: `workloads.engine.collectives.head_exchange`.
"""

from __future__ import annotations

from torch import Tensor, nn

from workloads.engine.collectives.context_parallel import ContextParallel
from workloads.engine.collectives.head_exchange import exchanged_recurrence
from workloads.engine.collectives.tensor_parallel import ColumnParallelLinear, RowParallelLinear, WholeLinear
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.kind_ops.delta_steps import GatedDeltaStep, KimiDeltaStep
from workloads.engine.kind_ops.mamba_scan import MambaStep
from workloads.engine.layers.vector import Vector
from workloads.spec import recurrent_weights
from workloads.spec.layer_kinds.recurrent import GatedDeltaRule, KimiDelta, Mamba2, Recurrent
from workloads.spec.model_spec import ModelSpec


class Mamba(nn.Module):
    """Mamba-2 (arXiv:2405.21060), as Nemotron-H has it."""

    def __init__(
        self,
        prefix: str,
        model: ModelSpec,
        mixer: Mamba2,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.batch, self.cp = batch, cp
        held = recurrent_weights.mamba(model, mixer, prefix)
        products, convolved = recurrent_weights.MAMBA_PRODUCTS, ("x", "b", "c")
        self.projection = ColumnParallelLinear([held[name] for name in products], tp)
        self.bias = Vector([held[f"{name}_bias"] for name in products], tp) if mixer.bias else None
        self.kernel = Vector([held[f"{name}_kernel"] for name in convolved], tp)
        self.kernel_bias = (
            Vector([held[f"{name}_kernel_bias"] for name in convolved], tp) if mixer.convolution_bias else None
        )
        self.of_heads = Vector([held[name] for name in ("decay", "step_bias", "skip")], tp)
        self.norm = Vector([held["norm"]], tp)
        self.out = RowParallelLinear(held["out"], tp, "recurrence")
        self.out_bias = Vector([held["out_bias"]], tp) if mixer.bias else None
        self.step = MambaStep(
            heads=mixer.heads // tp.size,
            head_dim=mixer.head_dim,
            groups=mixer.groups // tp.size,
            state=mixer.state,
            kernel=mixer.kernel,
            eps=model.norm_eps,
            bias=mixer.convolution_bias,
        )

    def forward(self, x_TD: Tensor, cos_SR: Tensor, sin_SR: Tensor, seen: None = None) -> Tensor:
        vectors = (self.kernel, self.kernel_bias, self.of_heads, self.norm)
        parameters = [one.weight for one in vectors if one is not None]
        y_BSO = exchanged_recurrence(self.step, self._sequences(x_TD), parameters, self.cp)
        y_TD: Tensor = self.out(y_BSO.flatten(0, 1))
        return y_TD if self.out_bias is None else y_TD + self.out_bias.weight

    def _sequences(self, x_TD: Tensor) -> list[Tensor]:
        projected_TC: Tensor = self.projection(x_TD)
        if self.bias is not None:
            projected_TC = projected_TC + self.bias.weight
        return [projected_TC.unflatten(0, (self.batch, -1))]


class GatedDelta(nn.Module):
    """Gated DeltaNet (arXiv:2412.06464), as Qwen3.5 has it."""

    def __init__(
        self,
        prefix: str,
        model: ModelSpec,
        mixer: GatedDeltaRule,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.batch, self.cp = batch, cp
        held = recurrent_weights.gated_delta(model, mixer, prefix)
        self.projection = ColumnParallelLinear([held[name] for name in recurrent_weights.DELTA_PRODUCTS], tp)
        self.kernel = Vector([held[f"{name}_kernel"] for name in "qkv"], tp)
        self.of_heads = Vector([held["log_rate"], held["decay_bias"]], tp)
        self.norm = Vector([held["norm"]], tp)
        self.out = RowParallelLinear(held["out"], tp, "recurrence")
        self.step = GatedDeltaStep(
            key_heads=mixer.key_heads // tp.size,
            value_heads=mixer.value_heads // tp.size,
            key_dim=mixer.key_dim,
            value_dim=mixer.value_dim,
            kernel=mixer.kernel,
            eps=model.norm_eps,
        )

    def forward(self, x_TD: Tensor, cos_SR: Tensor, sin_SR: Tensor, seen: None = None) -> Tensor:
        parameters = [one.weight for one in (self.kernel, self.of_heads, self.norm)]
        sequences = [self.projection(x_TD).unflatten(0, (self.batch, -1))]
        y_BSO = exchanged_recurrence(self.step, sequences, parameters, self.cp)
        y_TD: Tensor = self.out(y_BSO.flatten(0, 1))
        return y_TD


class KimiDeltaAttention(nn.Module):
    """KDA (arXiv:2510.26692), as Kimi Linear has it. Decays, and gates unless they have full rank, come from latents:
    every rank projects its own tokens to them, and all tokens' latents to its own heads."""

    def __init__(
        self,
        prefix: str,
        model: ModelSpec,
        mixer: KimiDelta,
        batch: int,
        tp: TensorParallel,
        cp: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        self.batch, self.cp, self.size = batch, cp, mixer.head_dim
        held = recurrent_weights.kimi_delta(model, mixer, prefix)
        products = [held[name] for name in recurrent_weights.DELTA_PRODUCTS if name in held]
        self.projection = ColumnParallelLinear(products, tp, shares_input=True)
        self.down = WholeLinear([held[name] for name in ("decay_down", "gate_down") if name in held], shares_input=True)
        self.decay_up = ColumnParallelLinear([held["decay_up"]], tp)
        self.gate_up = None if mixer.full_rank_gate else ColumnParallelLinear([held["gate_up"]], tp)
        self.kernel = Vector([held[f"{name}_kernel"] for name in "qkv"], tp)
        self.of_decays = Vector([held["decay_bias"], held["log_rate"]], tp)
        self.norm = Vector([held["norm"]], tp)
        self.out = RowParallelLinear(held["out"], tp, "recurrence")
        self.step = KimiDeltaStep(
            heads=mixer.heads // tp.size, head_dim=mixer.head_dim, kernel=mixer.kernel, eps=model.norm_eps
        )

    def forward(self, x_TD: Tensor, cos_SR: Tensor, sin_SR: Tensor, seen: None = None) -> Tensor:
        parameters = [one.weight for one in (self.kernel, self.of_decays, self.norm)]
        y_BSO = exchanged_recurrence(self.step, self._sequences(x_TD), parameters, self.cp)
        y_TD: Tensor = self.out(y_BSO.flatten(0, 1))
        return y_TD

    def _sequences(self, x_TD: Tensor) -> list[Tensor]:
        width = self.step.outputs
        projected_TC, latents = self.projection(x_TD), self.down(x_TD).split(self.size, 1)
        decay_TW = self.decay_up(latents[0].contiguous())
        if self.gate_up is None:
            qkv, gate_TW, rate = projected_TC.split([3 * width, width, self.step.heads], 1)
            inputs = [qkv, rate, decay_TW, gate_TW]
        else:
            qkv, rate = projected_TC.split([3 * width, self.step.heads], 1)
            inputs = [qkv, rate, decay_TW, self.gate_up(latents[1].contiguous())]
        return [x.unflatten(0, (self.batch, -1)) for x in inputs]


def recurrent(
    prefix: str, model: ModelSpec, mixer: Recurrent, batch: int, tp: TensorParallel, cp: ContextParallel | None = None
) -> nn.Module:
    """The module of a recurrent mixer."""
    if isinstance(mixer, GatedDeltaRule):
        return GatedDelta(prefix, model, mixer, batch, tp, cp)
    if isinstance(mixer, KimiDelta):
        return KimiDeltaAttention(prefix, model, mixer, batch, tp, cp)
    assert isinstance(mixer, Mamba2), "refused by the rules"
    return Mamba(prefix, model, mixer, batch, tp, cp)
