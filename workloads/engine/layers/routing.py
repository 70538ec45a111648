"""Chooses the experts of each token: the router, and forced choices that depend only on a token's position.

Shapes: T tokens, E experts, k experts a token, B sequences of a micro-batch.

balanced  copy j of the token at position p visits expert (p k + j) mod E: every expert gets equally many
skewed    experts' loads fall geometrically from the first, whose load is a given multiple of the mean. The copies of a
          token are k equally spaced points of the cumulated loads, so no expert gets two of them
learned   the k largest scores of the router (plus a bias, if that balances the load)

The weight of a copy is always the router's score of its expert, so forced runs train their router too.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from workloads.engine.collectives.communication import Axis, all_reduce_async, wait
from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.collectives.dispatch import Dispatch, Orders, capacity_of, orders_with
from workloads.engine.collectives.groups import Groups
from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.layers.recompute import is_recomputing
from workloads.engine.ops.backend import accumulation_dtype
from workloads.engine.ops.linear import DeferredGradients, linear
from workloads.spec import mesh as ranks
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec
from workloads.spec.weights import Weight

_GOLDEN = 0.6180339887498949
"""Golden ratio minus 1. Its multiples, modulo 1, are spread evenly for any number of them."""


def forced_choice(positions_T: Tensor, moe: MoESpec, imbalance: float | None) -> Tensor:
    """Experts [T, k] of the tokens at these positions. ``imbalance``: largest over mean load if skewed; None:
    balanced."""
    experts, copies = moe.num_experts, moe.experts_per_token
    if imbalance is None:
        return (positions_T[:, None] * copies + torch.arange(copies)) % experts
    loads = _geometric_loads(experts, imbalance)
    offset = (positions_T.double() * _GOLDEN) % 1.0
    points = (offset[:, None] + torch.arange(copies)) / copies
    return torch.searchsorted(loads.cumsum(0), points, right=True).clamp(max=experts - 1)


def _geometric_loads(experts: int, imbalance: float) -> Tensor:
    """Loads that add up to 1, each a fixed ratio of the previous one; the first is ``imbalance / experts``."""
    low, high = 0.0, 1.0
    for _ in range(100):  # the first load falls as the ratio rises
        ratio = (low + high) / 2
        first = 1.0 / sum(ratio**i for i in range(experts))
        low, high = (ratio, high) if first * experts > imbalance else (low, ratio)
    loads = torch.tensor([high**i for i in range(experts)], dtype=torch.float64)
    return loads / loads.sum()


class Routing:
    """Routing of one rank's tokens; all layers of a rank share it."""

    def __init__(self, experiment: Experiment, groups: Groups) -> None:
        moe = experiment.model.moe
        assert moe is not None
        self.experiment, self.moe, self.groups = experiment, moe, groups
        kind = experiment.routing
        if kind == "learned" and groups.is_rehearsal:
            kind = "skewed"  # the other ranks' choices are unknown: the assumed imbalance stands for them
        self.is_learned = kind == "learned"
        skewed = kind == "skewed" and experiment.routing_imbalance > 1
        self.imbalance = experiment.routing_imbalance if skewed else None
        self.ep: Axis = groups.axes["ep"]
        self._forced: tuple[torch.device, Tensor, Dispatch] | None = None
        self._orders: Orders | None = None

    @property
    def own_tokens(self) -> int:
        """Tokens that this rank's router scores."""
        e = self.experiment
        tokens = e.micro_batch_size * e.seq_len // e.cp
        return tokens // e.tp if e.sequence_parallel else tokens

    @cached_property
    def capacity(self) -> int | None:
        """Copies that an expert takes from this rank; None: no limit."""
        e = self.experiment
        if e.capacity_factor is None:
            return None
        tokens = e.micro_batch_size * e.seq_len // e.cp // (e.tp // e.etp)
        return capacity_of(e.capacity_factor, tokens, self.moe.experts_per_token, self.moe.num_experts)

    def orders(self, device: torch.device) -> Orders | None:
        """`orders_with` this rank's capacity; None without one."""
        if self._orders is None and self.capacity is not None:
            self._orders = orders_with(self.capacity, self.moe.num_experts, self.ep, device)
        return self._orders

    def forced(self, device: torch.device) -> tuple[Tensor, Dispatch]:
        """(choice of the router's tokens, dispatch of the copies that this rank sends), the same in every layer and
        step."""
        if self._forced is None or self._forced[0] != device:
            with _disable_current_modes():  # real indices, even while everything else is traced on FakeTensors
                self._forced = device, *self._make_forced(device)
        return self._forced[1:]

    def _make_forced(self, device: torch.device) -> tuple[Tensor, Dispatch]:
        e, groups = self.experiment, self.groups
        first = groups.rank - self.ep.rank * e.etp
        choices = [self._sent_choice(first + peer * e.etp) for peer in range(self.ep.size)]
        dispatch = Dispatch.forced(choices, self.moe.num_experts, self.ep, device)
        return self._choice(groups.position, shared_out=e.sequence_parallel).to(device), dispatch

    def forced_loads(self) -> Tensor:
        """Copies of each expert [E], over all positions of a sequence."""
        choice = forced_choice(torch.arange(self.experiment.seq_len), self.moe, self.imbalance)
        return torch.bincount(choice.flatten(), minlength=self.moe.num_experts)

    def _sent_choice(self, rank: int) -> Tensor:
        return self._choice(ranks.coordinates(self.experiment, rank), shared_out=self.experiment.etp == 1)

    def _choice(self, position: dict[str, int], *, shared_out: bool) -> Tensor:
        """Choice of a rank's tokens. ``shared_out``: only of its part of the tokens of its tensor-parallel group.
        Packed documents change no choice: the n-th token of a rank chooses as the n-th without them."""
        e = self.experiment
        tokens = local_positions(e.seq_len, e.cp, position["cp"], e.cp_kind).repeat(e.micro_batch_size)
        if shared_out:
            tokens = tokens.view(e.tp, -1)[position["tp"]]
        return forced_choice(tokens, self.moe, self.imbalance)


class Router(nn.Module):
    """Scores every expert for every token."""

    weight: nn.Parameter
    logit_bias: nn.Parameter | None
    """Learned, and added to the logits, [E]: it counts for the weights, too (gpt-oss)."""
    scales: nn.Parameter | None
    """Learned factors of the weights, one for each expert, [E] (Gemma 4)."""
    bias: Tensor
    """Added to the scores before the choice, fp32 [E]; stays 0 unless it balances the load."""
    load: Tensor
    """Copies that this rank's tokens have sent to each expert so far in this step, int64 [E]."""
    total: Tensor
    """Copies sent to each expert in all completed steps, int64 [E]."""
    balance_loss: Tensor
    """This rank's share of the balance term of the loss in all steps."""
    dropped: Tensor
    """Copies dropped in all steps, int64 scalar."""

    def __init__(self, parts: dict[str, Weight], routing: Routing, norm: nn.Module | None = None) -> None:
        """``norm``: of the input, None if that is normed already."""
        super().__init__()
        self.routing, moe = routing, routing.moe
        self.deferred: DeferredGradients | None = None
        self.host_waits = 0
        """Device-to-host syncs so far in this step, including those during recomputation. `host_waits_of_step` is the
        same for the last completed step."""
        self.host_waits_of_step = 0
        self.loss_scale: Tensor | None = None
        """Factor on gradients from the loss on; None: 1."""
        self.norm = norm
        add_parameter(self, "weight", [parts["router"]], {})
        for name, part in (("logit_bias", "router_bias"), ("scales", "router_scales")):
            if part in parts:
                add_parameter(self, name, [parts[part]], {})
            else:
                self.register_parameter(name, None)
        experts = moe.num_experts
        for name, shape, dtype in (
            ("bias", (experts,), torch.float32),
            ("load", (experts,), torch.int64),
            ("total", (experts,), torch.int64),
            ("balance_loss", (), torch.float32),
            ("dropped", (), torch.int64),
        ):
            self.register_buffer(name, torch.zeros(shape, dtype=dtype), persistent=False)

    @torch.no_grad()
    def fill(self) -> None:
        """Zero the buffers."""
        for buffer in (self.bias, self.load, self.total, self.balance_loss, self.dropped):
            buffer.zero_()

    def forward(self, x_TD: Tensor, choice_Tk: Tensor | None) -> tuple[Tensor, Tensor]:
        """(weights [T, k] in the dtype of sums, experts [T, k]). ``choice_Tk``: a forced choice; None: the router's
        own."""
        moe = self.routing.moe
        logits = linear(x_TD if self.norm is None else self.norm(x_TD), self.weight, self.deferred)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias
        logits = logits.to(accumulation_dtype(logits.dtype))
        scores_TE = logits.softmax(-1) if moe.gate == "softmax" else logits.sigmoid()
        forced = choice_Tk is not None
        if choice_Tk is None:
            chosen_by = scores_TE.detach()
            if moe.balance == "bias":
                chosen_by = chosen_by + self.bias
            choice_Tk = chosen_by.topk(moe.experts_per_token, dim=-1).indices
        weights_Tk = scores_TE.gather(1, choice_Tk)
        if moe.normalize_weights:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        if moe.weight_scale != 1.0:
            weights_Tk = weights_Tk * moe.weight_scale
        if self.scales is not None:
            weights_Tk = weights_Tk * self.scales.to(weights_Tk.dtype)[choice_Tk]
        if not forced and moe.balance == "aux_loss":
            weights_Tk = self._with_balance_term(weights_Tk, scores_TE, choice_Tk)
        return weights_Tk, choice_Tk

    def _with_balance_term(self, weights_Tk: Tensor, scores_TE: Tensor, choice_Tk: Tensor) -> Tensor:
        """Returns the weights unchanged; their backward adds the gradient of the balance term to that of the scores.

        The term is the mean over the sequences of the global batch of ``c sum_e f_e P_e``: f_e is E / (k S) times the
        copies of the sequence's S tokens that visit expert e, P_e the mean of their scores (which add up to 1). It is
        linear in the scores, and f_e has no gradient, so a rank needs only the counts from other ranks.
        """
        e, moe = self.routing.experiment, self.routing.moe
        shares_TE = scores_TE if moe.gate == "softmax" else scores_TE / scores_TE.sum(-1, keepdim=True)
        with torch.no_grad():
            sequence_T = self._sequences(len(choice_Tk), choice_Tk.device)
            counts_BE = shares_TE.new_zeros(e.micro_batch_size * moe.num_experts)
            place = (sequence_T[:, None] * moe.num_experts + choice_Tk).flatten()
            counts_BE.scatter_add_(0, place, torch.ones_like(place, dtype=counts_BE.dtype))
            for name in ("tp", "cp"):
                axis = self.routing.groups.axes[name]
                if axis.size > 1 and (name == "cp" or e.sequence_parallel):
                    counts_BE = wait(all_reduce_async(counts_BE, axis))
            factor = moe.balance_coefficient * moe.num_experts / (moe.experts_per_token * e.seq_len)
            slope = counts_BE.view(-1, moe.num_experts)[sequence_T] * (factor / (e.seq_len * e.global_batch_size))
            if not is_recomputing():
                self.balance_loss += (slope * shares_TE).sum().to(self.balance_loss.dtype)
        if self.loss_scale is not None:
            slope = slope * self.loss_scale
        return _AddGradient.apply(weights_Tk, shares_TE, slope)

    def _sequences(self, tokens: int, device: torch.device) -> Tensor:
        """Index, within the micro-batch, of the sequence of each of this rank's tokens: [T]."""
        e = self.routing.experiment
        first = self.routing.groups.position["tp"] * tokens if e.sequence_parallel else 0
        return torch.arange(first, first + tokens, device=device) // (e.seq_len // e.cp)

    @torch.no_grad()
    def note(self, counts_E: Tensor, dropped: Tensor | None) -> None:
        """Add to the counts of copies by expert, unless this forward is a recomputation."""
        if is_recomputing():
            return
        self.load += counts_E
        if dropped is not None:
            self.dropped += dropped


class _AddGradient(torch.autograd.Function):
    """Identity on the first input; the second gets ``slope`` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad, slope, None
