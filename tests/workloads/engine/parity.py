"""What the parity tests are made of: train one layout on all its ranks, and compare it with the unsharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import device_count
from tests.pool import Pool
from tests.workloads.engine import reference
from tests.workloads.engine.kind_models import kind_model
from tests.workloads.engine.traffic_checks import Count, check_counts, counting
from workloads.engine.collectives.groups import Groups
from workloads.engine.training import optimizer
from workloads.engine.training.build import Engine, build
from workloads.parity import training
from workloads.parity.shards import Shard, put_together
from workloads.parity.training import RankTrace
from workloads.spec.experiment import Experiment
from workloads.spec.model_layers import with_modules
from workloads.spec.model_spec import MLASpec, ModelSpec, MoESpec

STEPS = 2
TOLERANCE = 1e-12
MTP_WEIGHT = 0.7


def train_rank(
    rank: int,
    case: Experiment,
    steps: int,
    device: str = "cpu",
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
    **how: Any,
) -> RankTrace:
    """``gradient_scale``: multiplies gradients before they are clipped. ``clip_at``: a largest norm for this test."""
    largest_norm = optimizer.MAX_GRAD_NORM
    if clip_at is not None:
        optimizer.MAX_GRAD_NORM = clip_at
    try:
        return training.train_rank(rank, case, steps, device, gradient_scale=gradient_scale, **how)
    finally:
        optimizer.MAX_GRAD_NORM = largest_norm


@contextmanager
def compiled_by(backend: str) -> Iterator[None]:
    """Compile blocks by this backend of dynamo. ``aot_eager`` traces and differentiates ahead of time and executes op
    by op, without a compiler and exactly; ``aot_eager_decomp_partition`` also divides a block between forward and
    backward as Inductor does."""
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(compile_module, backend=backend)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
        torch._dynamo.reset()


def train_compiled_rank(rank: int, case: Experiment, steps: int, device: str, *how: Any) -> RankTrace:
    with compiled_by("aot_eager"):
        return train_rank(rank, case, steps, device, *how)


def train_inductor_rank(rank: int, *args: Any) -> RankTrace:
    try:
        return train_rank(rank, *args)
    finally:
        torch._dynamo.reset()


def train_prepared_rank(rank: int, case: Experiment, steps: int, device: str, *how: Any) -> RankTrace:
    """With what GPUs do before the first step: connect the stages and run one micro-batch alone."""

    def build_and_prepare(experiment: Experiment, groups: Groups) -> Engine:
        engine = build(experiment, groups)
        engine.pipeline.prepare()
        return engine

    return train_rank(rank, case, steps, device, *how, builder=build_and_prepare)


def train_and_count(rank: int, body: Callable[..., RankTrace], *args: Any) -> tuple[RankTrace, Count]:
    """``body(rank, *args)``, which trains, and what this rank has sent in the second step."""
    with counting() as counts:
        trace = body(rank, *args)
    return trace, counts[0]


def whole(case: Experiment, ranks: list[list[Shard]], spread: float = TOLERANCE) -> dict[str, Tensor]:
    """The whole tensors; copies of one tensor must agree to ``spread``."""
    together = put_together(case, ranks)
    for name, tensor in together.items():
        assert tensor.spread < spread, f"copies of {name} differ by {tensor.spread:.1e}"
    return {name: tensor.value for name, tensor in together.items()}


def model(**changes: Any) -> ModelSpec:
    shape: dict[str, Any] = {
        "name": "parity",
        "num_layers": 5,  # not a multiple of 2 or 4: stages differ
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 48,
        "vocab_size": 96,
    }
    return ModelSpec(**{**shape, **changes})


def mla(q_lora_rank: int) -> MLASpec:
    """Every size is another one, so that none can stand for another."""
    return MLASpec(q_lora_rank=q_lora_rank, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)


def experts(**changes: Any) -> MoESpec:
    shape: dict[str, Any] = {
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_hidden_size": 24,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
    }
    return MoESpec(**{**shape, **changes})


def experiment(
    tie: bool = False,
    qk_norm: bool = False,
    num_kv_heads: int = 2,
    rounds: int | None = None,
    latent: int | None = None,
    moe: MoESpec | None = None,
    layers: str | None = None,
    modules: int = 0,
    **layout: Any,
) -> Experiment:
    """A small case in float64. ``rounds``: micro-batches of one sequence, instead of a global batch of 8 in two or more
    micro-batches. ``latent``: with latent attention, and a latent of so many numbers for queries. Where layers need not
    differ by their stage or their number, there are three: a first, a last and one between them. ``layers``: a model of
    `tests.workloads.engine.kind_models` by its name, instead. ``modules``: of multi-token prediction, with a weight of
    their loss that is no default."""
    ranks = layout.get("dp") or layout.get("dp_replicate", 1) * layout.get("dp_shard", 1)
    fields = {"global_batch_size": 8, "seq_len": 16, "precision": "fp64", **layout}
    if "global_batch_size" not in layout and ranks < 4:
        fields.setdefault("micro_batch_size", 2)
    if rounds is not None:
        fields |= {"global_batch_size": rounds * ranks, "micro_batch_size": 1}
    if layers is not None:
        return Experiment.canonical(model=with_modules(kind_model(layers, tie=tie), modules, MTP_WEIGHT), **fields)
    shape: dict[str, Any] = {"qk_norm": qk_norm, "num_kv_heads": num_kv_heads}
    if latent is not None:
        shape = {"num_kv_heads": 4, "mla": mla(latent)}
    if layout.get("pp", 1) == 1 and "recompute_every" not in layout:
        shape["num_layers"] = 3
    plain = model(tie_embeddings=tie, moe=moe, **shape)
    return Experiment.canonical(model=with_modules(plain, modules, MTP_WEIGHT), **fields)


@cache
def trained_reference(
    pool: Pool,
    device: str,
    model: ModelSpec,
    global_batch_size: int,
    seq_len: int = 16,
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
    steps: int = STEPS,
    routing: str = "balanced",
    routing_imbalance: float = 1.0,
    capacity_factor: float | None = None,
    sent_tokens: int | None = None,
    documents: str | None = None,
    optimizer: str = "adamw",
    dealt: tuple[int, str] | None = None,
) -> reference.Trace:
    case = Experiment.canonical(
        model=model,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        precision="fp64",
        routing=routing,
        routing_imbalance=routing_imbalance,
        capacity_factor=capacity_factor,
        documents=documents,
        optimizer=optimizer,
        **({} if dealt is None else {"cp": dealt[0], "cp_kind": "allgather", "document_balance": dealt[1]}),
    )
    (weights,) = pool.run(reference.draw_weights, 1, case, device)
    return reference.train(case, weights, steps, gradient_scale, clip_at, sent_tokens)


def recipe_of(case: Experiment) -> dict[str, Any]:
    """How a layout's reference routes and packs tokens and updates weights: arguments of `trained_reference`. With a
    capacity, a rank must send whole runs of tokens, so no context parallelism."""
    routed: dict[str, Any] = {
        "routing": case.routing,
        "routing_imbalance": case.routing_imbalance,
        "optimizer": case.optimizer,
    }
    if case.capacity_factor is not None:
        assert case.cp == 1
        sent = case.micro_batch_size * case.seq_len // (case.tp // case.etp)
        routed |= {"capacity_factor": case.capacity_factor, "sent_tokens": sent}
    if case.documents is not None:
        routed["documents"] = case.documents
        if case.model.moe is not None and case.cp > 1:  # experts are chosen by the places of tokens on their ranks
            assert case.cp_kind == "allgather"
            routed["dealt"] = case.cp, case.document_balance
    return routed


def check(
    pool: Pool,
    case: Experiment,
    device: str = "cpu",
    body: Callable[..., RankTrace] = train_rank,
    gradient_scale: float = 1.0,
    clip_at: float | None = None,
    counts: bool = False,
    steps: int = STEPS,
) -> None:
    """Train the layout and the reference, and compare losses, gradient norms, gradients and the final weights.

    ``counts``: in the same run, what every rank sends in the second step is counted and compared with the closed form.
    """
    how = gradient_scale, clip_at
    batch = case.global_batch_size, case.seq_len
    expected = trained_reference(pool, device, case.model, *batch, *how, steps, **recipe_of(case))
    arguments = (case, steps, device, *how)
    if counts:
        ranks = pool.run(train_and_count, case.world_size, body, *arguments, timeout_s=150)
        check_traces(case, [trace for trace, _ in ranks], expected)
        check_counts(case, [count for _, count in ranks])
    else:
        check_traces(case, pool.run(body, case.world_size, *arguments, timeout_s=150), expected)


def on_backends(gloo: Iterable[Any], nccl: Iterable[Experiment]) -> list[Any]:
    """Parameters (backend, case) of a test, of experiments or of parameters of them (`tests.sampling.sampled`). Those
    on NCCL are collected only where there are devices for their ranks, two or more."""
    devices, parameters = device_count(), []
    for case in gloo:
        (value,), marks = ((case,), ()) if isinstance(case, Experiment) else (case.values, case.marks)
        parameters.append(pytest.param("gloo", value, id=f"gloo-{value.id}", marks=(pytest.mark.slow, *marks)))
    for value in nccl:
        if value.world_size <= devices > 1:
            marks = (pytest.mark.gpu, pytest.mark.multi_gpu)
            parameters.append(pytest.param("nccl", value, id=f"nccl-{value.id}", marks=marks))
    return parameters


def check_on(request: pytest.FixtureRequest, backend: str, case: Experiment, clip_at: float) -> None:
    """`check` on the pool of a backend: on gloo with what is sent, on NCCL on GPUs."""
    pool = request.getfixturevalue(f"{backend}_pool")
    # With the plain formula of attention, latents that the closed form expects twice are gathered once.
    counts = backend == "gloo" and case.attention != "math"
    check(pool, case, "cpu" if backend == "gloo" else "cuda", clip_at=clip_at, counts=counts)


def check_traces(case: Experiment, traces: list[RankTrace], expected: reference.Trace) -> None:
    """Losses, gradient norms, gradients of every step and the last weights are those of the reference."""
    for trace in traces:
        torch.testing.assert_close(trace.losses, expected.losses, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(trace.mtp_losses, expected.mtp_losses, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(trace.grad_norms, expected.grad_norms, rtol=TOLERANCE, atol=0)
    for step in range(len(expected.losses)):
        gradients = [trace.steps[step].gradients for trace in traces]
        compare(case, gradients, expected.gradients[step], f"gradient, step {step}")
    compare(case, [trace.steps[-1].weights for trace in traces], expected.weights, "weight after the last step")


def compare(case: Experiment, ranks: list[list[Shard]], expected: dict[str, Tensor], what: str) -> None:
    tensors = whole(case, ranks)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        error = ((tensor - expected[name]).abs().max() / expected[name].abs().max()).item()
        assert error < TOLERANCE, f"{what}, {name}: relative error {error:.1e}"
