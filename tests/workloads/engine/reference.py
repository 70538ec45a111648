"""The unsharded model, written down a second time in the plainest way, and the comparison with it.

Only the initial weights come from the engine (`parameters.initial_part`); all else does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.workloads.engine import kind_reference, recurrent_reference
from tests.workloads.engine.optimizer_reference import optimizer_for
from workloads.engine.collectives.parameters import initial_part
from workloads.engine.layers.routing import forced_choice
from workloads.engine.training.data import step_batches
from workloads.spec import kind_weights
from workloads.spec import weights as table
from workloads.spec.documents.lengths import packed
from workloads.spec.documents.shares import shares
from workloads.spec.experiment import Experiment
from workloads.spec.layer_kinds.attention import Attention
from workloads.spec.layer_kinds.mlp import DenseMLP, RoutedMLP
from workloads.spec.layer_kinds.recurrent import Recurrent
from workloads.spec.weights import Weight

# The recipe of every run, written down here and in `optimizer_reference` a second time: a wrong constant in the engine
# must not be a wrong one here.
MAX_GRAD_NORM = 1.0


@dataclass
class Trace:
    losses: list[float]
    mtp_losses: list[float]
    grad_norms: list[float]
    gradients: list[dict[str, Tensor]]
    """Of each step, before clipping."""
    weights: dict[str, Tensor]
    """After the last step."""


def draw_weights(rank: int, experiment: Experiment, device: str) -> dict[str, Tensor]:
    """The initial weights, drawn where the engine draws them (a GPU's random numbers are not a CPU's), on the CPU."""
    parts = _parts(experiment)
    return {part.name: initial_part(part, experiment.seed, torch.device(device), {}).cpu() for part in parts}


def train(
    experiment: Experiment,
    weights: dict[str, Tensor],
    steps: int,
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
    sent_tokens: int | None = None,
) -> Trace:
    """Train on one process in float64 on the whole global batch at once. ``gradient_scale``: multiplies gradients
    before they are clipped. ``clip_at``: a largest norm instead of every run's. ``sent_tokens``: with a capacity, how
    many tokens in a row a rank of the layout sends at once, of which each expert takes the first copies."""
    assert experiment.precision == "fp64"
    weights = {name: weight.double() for name, weight in weights.items()}
    for weight in weights.values():
        weight.requires_grad_()
    optimizer = optimizer_for(experiment.optimizer, weights)
    trace = Trace([], [], [], [], {})
    routing: dict[str, Tensor] = {}
    whole = Experiment.canonical(
        model=experiment.model,
        global_batch_size=experiment.global_batch_size,
        micro_batch_size=experiment.global_batch_size,
        seq_len=experiment.seq_len,
        precision="fp64",
        seed=experiment.seed,
    )
    for step in range(steps):
        ((tokens, targets, *_),) = step_batches(whole, step, 0, torch.device("cpu"))
        places = None
        if experiment.documents is not None:
            tokens, targets, places = _alone(experiment, tokens.view(-1, experiment.seq_len), targets)
        rows = tokens.view(-1, experiment.seq_len)
        loss, of_modules, balance = _loss(experiment, weights, rows, targets, routing, sent_tokens, places)
        for weight in weights.values():
            weight.grad = None
        (gradient_scale * (loss + experiment.model.mtp_loss_weight * of_modules + balance)).backward()
        trace.gradients.append({name: weight.grad.clone() for name, weight in weights.items()})
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), clip_at or MAX_GRAD_NORM)
        optimizer.step()
        trace.losses.append(loss.item())
        trace.mtp_losses.append(of_modules.item())
        trace.grad_norms.append(norm.item())
    trace.weights = {name: weight.detach() for name, weight in weights.items()}
    return trace


def _alone(experiment: Experiment, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every document in a row of its own, padded: (tokens, targets of which those of padding are not counted, index of
    each token by which forced routing chooses experts). The last token of a document predicts token 0."""
    assert experiment.documents is not None
    batch, seq = tokens.shape
    rows = []
    for index, lengths in enumerate(packed(experiment.documents, seq, batch)):
        start, chosen_by = 0, _chosen_by(experiment, lengths)
        for length in lengths:
            row = torch.zeros(3, seq, dtype=torch.int64)
            row[1] = -100
            row[0, :length] = tokens[index, start : start + length]
            row[1, : length - 1] = tokens[index, start + 1 : start + length]
            row[1, length - 1] = 0
            row[2, :length] = chosen_by[start : start + length]
            rows.append(row)
            start += length
    of_rows = torch.stack(rows, 1)
    return of_rows[0].flatten(), of_rows[1].flatten(), of_rows[2]


def _chosen_by(experiment: Experiment, lengths: tuple[int, ...]) -> Tensor:
    """The index by which each token of a sequence chooses experts: that of the token that its rank would hold at this
    place without documents."""
    seq, cp = experiment.seq_len, experiment.cp
    if cp == 1 or experiment.cp_kind == "ulysses":
        return torch.arange(seq)
    size, chunks = shares(lengths, cp, experiment.document_balance)
    found = torch.empty(seq, dtype=torch.int64)
    part = seq // (2 * cp)
    for rank, of_rank in enumerate(chunks):
        held = [chunk * size + token for chunk in of_rank for token in range(size)]
        usual = [first * part + token for first in (rank, 2 * cp - 1 - rank) for token in range(part)]
        found[held] = torch.tensor(usual)
    return found


def _parts(experiment: Experiment) -> list[Weight]:
    model = experiment.model
    ends = [table.embedding(model), table.final_norm(model), table.head(model)]
    layers = [kind_weights.block(model, layer) for layer in range(model.num_layers)]
    return list({part.name: part for part in [*ends, *(part for layer in layers for part in layer)]}.values())


def _loss(
    experiment: Experiment,
    w: dict[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    routing: dict[str, Tensor],
    sent_tokens: int | None,
    places: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(cross-entropy, mean cross-entropy of modules of multi-token prediction, terms that balance experts).
    ``routing`` holds biases of experts from step to step. ``places``:
    indices by which forced routing chooses experts, if a row is not a sequence."""
    model = experiment.model
    balance = torch.zeros((), dtype=torch.float64)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + model.norm_eps).sqrt() * w[name]

    def rotate(x: Tensor) -> Tensor:  # [B, S, N, H]
        half = x.shape[-1] // 2
        frequency = model.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos()[:, None, :], angle.sin()[:, None, :]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def project(x: Tensor, name: str, heads: int = 1) -> Tensor:
        return (x @ w[name].t()).view(batch, seq, heads, -1)

    def latent_heads(h: Tensor, p: str) -> tuple[Tensor, Tensor, Tensor]:  # as written in arXiv:2405.04434, 2.1
        kind = kind_weights.kind_of(model, int(p.split(".")[1]))
        turned = rotate if kind is None or kind_weights.rotation(kind) is not None else torch.clone
        mla, heads = model.mla, model.num_heads
        assert mla is not None
        nope, rope = mla.qk_nope_head_dim, mla.qk_rope_head_dim
        if mla.q_lora_rank:
            q = project(norm(h @ w[f"{p}.q_down"].t(), f"{p}.q_norm"), f"{p}.q_up", heads)
        else:
            q = project(h, f"{p}.q", heads)
        latent, shared = (h @ w[f"{p}.kv_down"].t()).split([mla.kv_lora_rank, rope], -1)
        k, v = project(norm(latent, f"{p}.kv_norm"), f"{p}.kv_up", heads).split([nope, mla.v_head_dim], -1)
        shared = turned(shared.view(batch, seq, 1, rope)).repeat(1, 1, heads, 1)
        return torch.cat([q[..., :nope], turned(q[..., nope:])], -1), torch.cat([k, shared], -1), v

    def grouped_heads(h: Tensor, p: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            project(h, f"{p}.{n}", c) for n, c in zip("qkv", (model.num_heads, *2 * (model.num_kv_heads,)), strict=True)
        )
        if model.qk_norm:
            q, k = norm(q, f"{p}.q_norm"), norm(k, f"{p}.k_norm")
        repeats = model.num_heads // model.num_kv_heads
        return rotate(q), rotate(k).repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)

    batch, seq = tokens.shape
    x = w["embedding"][tokens]
    if model.layers is not None and model.layers.scaled_embedding:
        x = x * model.hidden_size**0.5
    mask = torch.full((seq, seq), -torch.inf, dtype=torch.float64).triu(1)

    def run(x: Tensor, layer: int) -> tuple[Tensor, Tensor | float]:
        """(output of a layer, its balance term)."""
        p, term = f"layers.{layer}", 0.0
        kind = kind_weights.kind_of(model, layer)
        h = norm(x, f"{p}.attention_norm") if f"{p}.attention_norm" in w else x
        if kind is not None and kind.mixer is None:
            out = torch.zeros_like(x)
        elif kind is not None and isinstance(kind.mixer, Attention):
            out = kind_reference.attend(h, w, f"{p}.attention", kind.mixer, model.norm_eps)
        elif kind is not None and isinstance(kind.mixer, Recurrent):
            out = recurrent_reference.mix(h, w, f"{p}.attention", kind.mixer, model.norm_eps)
        else:
            q, k, v = (grouped_heads if model.mla is None else latent_heads)(h, f"{p}.attention")
            scores = torch.einsum("bsnh,btnh->bnst", q, k) / q.shape[-1] ** 0.5 + mask
            o = torch.einsum("bnst,btnh->bsnh", scores.softmax(-1), v).reshape(batch, seq, -1)
            out = o @ w[f"{p}.attention.o"].t()
        x = x + (norm(out, f"{p}.attention_out_norm") if f"{p}.attention_out_norm" in w else out)
        if kind is not None and kind.mlp is None:
            return x, term
        h = norm(x, f"{p}.ffn_norm") if f"{p}.ffn_norm" in w else x
        if table.routed(model, layer):
            out, term = _experts(experiment, w, p, h, x, routing, sent_tokens, places)
        elif kind is not None and isinstance(kind.mlp, DenseMLP):
            out = kind_reference.feed(h, w, f"{p}.ffn", kind.mlp)
        else:
            out = _swiglu(h, w[f"{p}.ffn.gate"], w[f"{p}.ffn.up"]) @ w[f"{p}.ffn.down"].t()
        return x + (norm(out, f"{p}.ffn_out_norm") if f"{p}.ffn_out_norm" in w else out), term

    def cross_entropy(normed: Tensor, of: Tensor) -> Tensor:
        logits = normed @ w["embedding" if model.tie_embeddings else "head"].t()
        if model.layers is not None and model.layers.logit_cap:
            logits = model.layers.logit_cap * torch.tanh(logits / model.layers.logit_cap)
        total = torch.nn.functional.cross_entropy(logits.view(-1, model.vocab_size), of.flatten(), reduction="sum")
        return total / experiment.tokens_per_step

    modules = 0 if model.layers is None else sum(model.layers.kinds[at].ahead for at in model.layers.order)
    for layer in range(model.num_layers - modules):
        x, term = run(x, layer)
        balance = balance + term
    loss, of_modules = cross_entropy(norm(x, "norm"), targets), torch.zeros((), dtype=torch.float64)
    ahead = targets.view(batch, seq)  # for token i the token i + k in module k, as far as there is one
    for layer in range(model.num_layers - modules, model.num_layers):
        p = f"layers.{layer}.ahead"
        vectors = w["embedding"][ahead.clamp(min=0)]
        if model.layers is not None and model.layers.scaled_embedding:
            vectors = vectors * model.hidden_size**0.5
        both = torch.cat([norm(x, f"{p}.hidden_norm"), norm(vectors, f"{p}.embedding_norm")], -1)
        x, term = run(both @ w[f"{p}.projection"].t(), layer)
        balance = balance + term
        ahead = torch.cat([ahead[:, 1:], torch.full((batch, 1), -100)], 1)
        of_modules = of_modules + cross_entropy(norm(x, f"{p}.norm"), ahead) / modules
    return loss, of_modules, balance


def _swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return (x @ gate.t()) * (x @ gate.t()).sigmoid() * (x @ up.t())


def _experts(
    experiment: Experiment,
    w: dict[str, Tensor],
    layer: str,
    h: Tensor,
    stream: Tensor,
    routing: dict[str, Tensor],
    sent_tokens: int | None,
    places: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(output, balance term) of one layer: every expert computes all tokens, and a mask takes those that visit it."""
    moe = experiment.model.moe
    assert moe is not None
    kind = kind_weights.kind_of(experiment.model, int(layer.rpartition(".")[2]))
    mlp = kind.mlp if kind is not None and isinstance(kind.mlp, RoutedMLP) else None
    batch, seq, _ = h.shape
    count, k = moe.num_experts, moe.experts_per_token

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + experiment.model.norm_eps).sqrt() * w[f"{layer}.{name}"]

    beside, scored = h, h
    if mlp is not None and mlp.router_scales:  # Gemma4TextRouter, Gemma4TextDecoderLayer
        scored = norm(stream, "experts.router_norm") * h.shape[-1] ** -0.5
        h = norm(stream, "experts_norm")
    logits = scored @ w[f"{layer}.experts.router"].t()
    if mlp is not None and mlp.router_bias:  # gpt-oss
        logits = logits + w[f"{layer}.experts.router_bias"]
    scores = logits.softmax(-1) if moe.gate == "softmax" else logits.sigmoid()
    bias = routing.setdefault(f"{layer}.bias", torch.zeros(count, dtype=torch.float64))
    if experiment.routing == "learned":
        chosen = (scores.detach() + (bias if moe.balance == "bias" else 0)).topk(k, -1).indices
    else:
        skew = experiment.routing_imbalance if experiment.routing == "skewed" else None
        skew = None if skew == 1 else skew
        rows = torch.arange(seq).expand(batch, seq) if places is None else places
        chosen = forced_choice(rows.flatten(), moe, skew).view(batch, seq, k)
    visits = torch.nn.functional.one_hot(chosen, count).sum(2)
    weights = scores * visits
    if moe.normalize_weights:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * moe.weight_scale
    if mlp is not None and mlp.latent:  # NemotronHMoE: what the router and the shared experts see stays as it is
        h = h @ w[f"{layer}.experts.latent_down"].t()
    if mlp is not None and mlp.router_scales:
        weights = weights * w[f"{layer}.experts.router_scales"]
    if experiment.capacity_factor is not None:
        assert sent_tokens is not None
        capacity = math.ceil(experiment.capacity_factor * sent_tokens * k / count)
        taken = visits.view(-1, sent_tokens, count).cumsum(1) <= capacity
        weights = weights * taken.view(batch, seq, count)
    out = torch.zeros_like(h)
    for expert in range(count):
        if mlp is not None and (mlp.expert.bias or mlp.expert.activation != "silu"):
            own = {
                name.rpartition(".")[2]: weight[expert]
                for name, weight in w.items()
                if name.startswith(f"{layer}.experts.") and "router" not in name and "latent" not in name
            }
            out = out + weights[..., expert : expert + 1] * kind_reference.one_expert(h, own, mlp.expert)
            continue
        gate, up, down = (w[f"{layer}.experts.{name}"][expert] for name in ("gate", "up", "down"))
        weight = weights[..., expert : expert + 1]
        if mlp is not None and mlp.weights_inputs:  # Llama 4
            out = out + _swiglu(weight * h, gate, up) @ down.t()
        else:
            out = out + weight * (_swiglu(h, gate, up) @ down.t())
    if mlp is not None and mlp.router_scales:
        out = norm(out, "experts_out_norm")
    if mlp is not None and mlp.latent:
        out = out @ w[f"{layer}.experts.latent_up"].t()
    if moe.num_shared_experts or (mlp is not None and mlp.shared is not None):
        if mlp is not None and mlp.shared is not None:
            shared = kind_reference.feed(beside, w, f"{layer}.shared", mlp.shared)
        else:
            gate, up, down = (w[f"{layer}.shared.{name}"] for name in ("gate", "up", "down"))
            shared = _swiglu(h, gate, up) @ down.t()
        if mlp is not None and mlp.shared_gate:  # Qwen2-MoE
            shared = shared / (1 + torch.exp(-(beside @ w[f"{layer}.shared.scale"].t())))
        if mlp is not None and mlp.router_scales:
            shared = norm(shared, "shared_out_norm")
        out = out + shared
    term = torch.zeros((), dtype=torch.float64)
    if experiment.routing == "learned" and moe.balance == "aux_loss":
        share = scores / scores.sum(-1, keepdim=True)
        load = visits.double().mean(1) * count / k  # f of each sequence
        term = moe.balance_coefficient * (load * share.mean(1)).sum(-1).mean()
    if experiment.routing == "learned" and moe.balance == "bias":
        loads = visits.sum((0, 1)).double()
        routing[f"{layer}.bias"] = bias + moe.balance_coefficient * (loads.mean() - loads).sign()
    return out, term
