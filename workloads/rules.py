"""Structural rules: what a layout must obey before memory or time are worth asking about. No torch here.

A rule's message says what is wrong, with the numbers, and what would work. ``engine_support`` is the one rule that is
about this version of the engine and not about the layout.

Fewer micro-batches than stages is not a rule: such a pipeline runs, mostly idle. (The Ultra-Scale Playbook's engine
needed ``num_microbatches >= pp - 1``.)
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from workloads.cluster import ClusterSpec
from workloads.costs.params import V_SHAPED
from workloads.experiment import Experiment

RUNNABLE_SCHEDULES = ("none", "gpipe", "1f1b")
"""Pipeline schedules that the engine has; `workloads.costs.schedule` has their action lists."""


class Violation(NamedTuple):
    rule: str
    message: str


def violations(experiment: Experiment, cluster: ClusterSpec) -> list[Violation]:
    """Every rule that the experiment breaks on this cluster; empty when it can run."""
    found: list[Violation] = []
    for check in (_batch, _pipeline, _tensor, _context, _experts, _zero, _device, _engine):
        found.extend(check(experiment, cluster))
    return found


def _batch(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    del cluster
    rest = e.global_batch_size % e.sequences_per_round
    if rest:
        below = e.global_batch_size - rest
        work = " or ".join(str(size) for size in (below, below + e.sequences_per_round) if size)
        yield Violation(
            "global_batch",
            f"global_batch_size={e.global_batch_size} is not a multiple of dp*micro_batch_size = {e.dp}*"
            f"{e.micro_batch_size} = {e.sequences_per_round}; {work} would be",
        )


def _pipeline(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    del cluster
    layers, chunks = e.model.num_layers, e.pp * e.virtual_stages
    if chunks > layers:
        what = f"pp={e.pp}" if e.virtual_stages == 1 else f"pp*virtual_stages = {e.pp}*{e.virtual_stages} = {chunks}"
        yield Violation(
            "pp_layers",
            f"{what} stages need as many layers, {e.model.name} has {layers}; use at most that many",
        )
    if (e.pp == 1) != (e.pp_schedule == "none"):
        yield Violation(
            "pp_schedule",
            f"pp_schedule={e.pp_schedule} with pp={e.pp}; it is none exactly when pp is 1",
        )
        return
    needed = {"interleaved_1f1b": "2 or more", **dict.fromkeys(V_SHAPED, "2")}.get(e.pp_schedule, "1")
    fits = e.virtual_stages >= 2 if needed == "2 or more" else e.virtual_stages == int(needed)
    if not fits:
        yield Violation(
            "virtual_stages",
            f"pp_schedule={e.pp_schedule} with virtual_stages={e.virtual_stages}; it needs {needed}",
        )
    if e.pp_schedule == "interleaved_1f1b" and e.num_microbatches % e.pp:
        yield Violation(
            "interleaved_microbatches",
            f"interleaved_1f1b runs micro-batches in rounds of pp={e.pp}; num_microbatches={e.num_microbatches} is "
            "not a multiple of it",
        )


def _tensor(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    """Heads, key/value heads, feed-forward columns and vocabulary rows are split; tokens too between the regions."""
    del cluster
    tp, model = e.tp, e.model
    if tp == 1:
        return
    split = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
    }
    if model.moe is not None:
        split["expert_hidden_size"] = model.moe.expert_hidden_size
    tokens = e.micro_batch_size * e.seq_len // e.cp
    uneven = [field for field, value in split.items() if value % tp]
    if uneven:
        works = _may_be("tp", gcd(*split.values()))
        for field in uneven:
            message = f"tp={tp} does not divide {field}={split[field]} of {model.name}; {works}"
            yield Violation(f"tp_{field}", message)
    if e.sequence_parallel and tokens % tp:
        yield Violation(
            "sequence_parallel",
            f"sequence parallelism splits micro_batch_size*seq_len/cp = {e.micro_batch_size}*{e.seq_len}/{e.cp} = "
            f"{tokens} tokens over tp={tp} ranks; {_may_be('tp', gcd(tokens, *split.values()))}",
        )


def _context(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    del cluster
    if e.cp > 1 and e.seq_len % (2 * e.cp):
        part = 2 * e.cp
        yield Violation(
            "cp_seq_len",
            f"cp={e.cp} balances causal attention by cutting a sequence into 2*cp = {part} equal parts; seq_len="
            f"{e.seq_len} is not a multiple of {part}, {e.seq_len // part * part + part} would be",
        )


def _experts(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    del cluster
    if e.ep == 1:
        return
    if e.model.moe is None:
        yield Violation("ep_model", f"ep={e.ep}, but {e.model.name} has no experts; ep must be 1")
        return
    if e.model.moe.num_experts % e.ep:
        yield Violation(
            "ep_num_experts",
            f"ep={e.ep} does not divide num_experts={e.model.moe.num_experts} of {e.model.name}; "
            f"{_may_be('ep', e.model.moe.num_experts)}",
        )
    if (e.dp * e.cp) % e.ep:
        yield Violation(
            "ep_ranks",
            f"ep={e.ep} borrows ranks from dp*cp = {e.dp}*{e.cp} = {e.dp * e.cp} and does not divide it; "
            f"{_may_be('ep', e.dp * e.cp)}",
        )


def _zero(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    del cluster
    if e.zero_stage == 0 and e.dp_shard > 1:
        yield Violation(
            "zero_shards",
            f"zero_stage=0 shards nothing, but dp_shard={e.dp_shard}; use dp_replicate={e.dp} with dp_shard=1",
        )
    if e.zero_stage > 0 and e.dp_shard == 1:
        yield Violation(
            "zero_shards", f"zero_stage={e.zero_stage} with dp_shard=1 has nothing to shard over; use zero_stage=0"
        )
    if e.zero_stage == 3 and e.pp_schedule in V_SHAPED:
        yield Violation(
            "zero3_zero_bubble",
            f"zero_stage=3 with pp_schedule={e.pp_schedule}: splitting the backward loses gradients of weights "
            "that are freed in between; use zero_stage 0, 1 or 2",
        )


def _device(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    if cluster.inter_node is None and e.world_size > cluster.devices_per_node:
        yield Violation(
            "single_node",
            f"{e.world_size} ranks (dp*cp*tp*pp = {e.dp}*{e.cp}*{e.tp}*{e.pp}) on cluster {cluster.name}, which is one "
            f"node of {cluster.devices_per_node}; at most {cluster.devices_per_node}",
        )
    if e.attention == "cudnn" and cluster.backend != "cuda":
        yield Violation(
            "attention", f"attention=cudnn needs CUDA devices, cluster {cluster.name} has {cluster.backend}"
        )
    if e.attention in ("cudnn", "flash") and cluster.backend == "cuda" and e.precision in ("fp32", "fp64"):
        yield Violation(
            "attention",
            f"attention={e.attention} has no {e.precision} kernels on CUDA; use attention=efficient, math or auto",
        )
    rates = cluster.device.peak_flops
    if rates and e.precision.startswith("fp8") and "fp8" not in rates:
        yield Violation(
            "precision",
            f"precision={e.precision}, but {cluster.device.name} has no fp8 matrix products; it has {', '.join(rates)}",
        )


def _engine(e: Experiment, cluster: ClusterSpec) -> Iterator[Violation]:
    """What a correct layout may ask for and this version of the engine cannot run yet."""
    del cluster
    missing = []
    if e.cp > 1:
        missing.append(f"cp={e.cp} (use 1)")
    if e.ep > 1:
        missing.append(f"ep={e.ep} (use 1)")
    if e.model.moe is not None:
        missing.append(f"routed experts ({e.model.name})")
    if e.model.mla is not None:
        missing.append(f"latent attention ({e.model.name})")
    if e.precision.startswith("fp8"):
        missing.append(f"precision={e.precision} (use bf16)")
    if e.pp_schedule not in RUNNABLE_SCHEDULES:
        missing.append(f"pp_schedule={e.pp_schedule} (use 1f1b or gpipe)")
    if missing:
        yield Violation("engine_support", f"engine version {e.engine_version} cannot run {', '.join(missing)} yet")


def _may_be(axis: str, value: int) -> str:
    """``tp may be one of 1, 2, 4, 8``: the divisors of ``value``."""
    return f"{axis} may be one of {', '.join(str(d) for d in range(1, value + 1) if value % d == 0)}"
