"""Attempts that look like a real sweep: plausible times and memory from a few formulas, failures included.

The formulas are rough on purpose; what matters is that every column has the shape that real rows have.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from results.tables import store
from results.tables.schema import ATTEMPTS, MEASUREMENT_VERSION, SCHEMA_VERSION
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.record import config_columns

GIB = 2**30
H200_BYTES = 150_120_955_904
H200_FLOPS = 989e12


def llama(name: str, layers: int, hidden: int, heads: int, ffn: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=hidden // heads,
        ffn_hidden_size=ffn,
        vocab_size=128_256,
        tie_embeddings=tied,
    )


MODELS = (
    llama("llama1b", 16, 2048, 32, 8192, tied=True),
    llama("llama3b", 28, 3072, 24, 8192, tied=True),
    llama("llama8b", 32, 4096, 32, 14336),
)


def num_params(model: ModelSpec) -> int:
    width = model.hidden_size
    attention = width * model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    return (
        model.num_layers * (attention + 3 * width * model.ffn_hidden_size)
        + (1 if model.tie_embeddings else 2) * model.vocab_size * width
    )


def experiments(
    models: Sequence[ModelSpec] = MODELS,
    world_sizes: Sequence[int] = (1, 2, 4, 8),
    micro_batch_sizes: Sequence[int] = (1, 2, 4, 8),
    seq_len: int = 4096,
) -> Iterator[Experiment]:
    for model, world, tp, pp, mbs, zero, recompute in itertools.product(
        models, world_sizes, (1, 2, 4, 8), (1, 2, 4), micro_batch_sizes, (0, 1, 3), ("none", "full")
    ):
        dp, rest = divmod(world, tp * pp)
        if rest or dp == 0 or 64 % (dp * mbs) or (dp == 1 and zero):
            continue
        yield Experiment.canonical(
            model=model,
            dp=dp,
            tp=tp,
            pp=pp,
            micro_batch_size=mbs,
            global_batch_size=64,
            seq_len=seq_len,
            zero_stage=zero,
            recompute=recompute,
        )


def attempt(
    experiment: Experiment, index: int = 0, *, rng: random.Random | None = None, **columns: Any
) -> dict[str, Any]:
    """One row. ``columns`` replace what the formulas say; an outcome other than ok empties what it cannot have."""
    rng = rng or random.Random(f"{experiment.id}{index}")
    model, world = experiment.model, experiment.world_size
    params = num_params(model)
    memory = _memory(experiment, params)
    peak = sum(memory.values())
    outcome = columns.get("outcome") or ("oom" if peak > H200_BYTES - 4 * GIB else _luck(rng))
    flops = 6 * params + 12 * model.num_layers * model.hidden_size * experiment.seq_len
    mfu = 0.58 * 0.86 ** (experiment.tp.bit_length() - 1) * min(1.0, 0.62 + 0.13 * experiment.micro_batch_size)
    mfu *= experiment.num_microbatches / (experiment.num_microbatches + experiment.pp - 1)
    mfu *= (0.78 if experiment.recompute == "full" else 1.0) * rng.uniform(0.96, 1.04) * (1 - 0.04 * (world > 1))
    rate = mfu * H200_FLOPS / flops
    step = experiment.tokens_per_step / rate / world
    start = datetime(2026, 3, 2, 9, 0, tzinfo=UTC) + timedelta(seconds=40 * index)
    overhead = {
        "spawn_s": rng.uniform(0.2, 0.4),
        "rendezvous_s": rng.uniform(1.6, 2.4),
        "build_s": rng.uniform(0.5, 1.5),
    }
    predicted_peak, predicted_step = int(peak * rng.uniform(0.93, 1.1)), step * rng.uniform(0.8, 1.1)
    row: dict[str, Any] = dict.fromkeys(ATTEMPTS.names) | config_columns(experiment)
    row |= {
        "attempt_id": f"{index:06d}-{experiment.hash}",
        "schema_version": SCHEMA_VERSION,
        "measurement_version": MEASUREMENT_VERSION,
        "sweep": "h200",
        "grid": "llama_8gpu",
        "method": "measured",
        "attempt_number": 1,
        "started_at": start,
        "warmup_steps": 3,
        "timed_steps": 5,
        "outcome": outcome,
        "will_retry": False,
        "cluster": "h200",
        "backend": "cuda",
        "launcher": "local",
        "num_params": params,
        "flops_per_token_palm": flops,
        "predicted_peak_bytes": predicted_peak,
        "predicted_step_time_s": predicted_step,
        "predicted_step_time_low_s": 0.85 * predicted_step,
        "predicted_step_time_high_s": 1.2 * predicted_step,
        "git_commit": "3f0c" * 10,
        "git_dirty": False,
        "torch_version": "2.11.0",
        "log_dir": f"attempts/{index:06d}",
        "duration_s": 12.0,
    } | overhead
    if outcome == "ok":
        timed, teardown = 5 * step, rng.uniform(0.4, 0.9)
        row |= {
            "phase": "done",
            "step_time_s": step,
            "step_time_min_s": step * 0.99,
            "step_time_max_s": step * rng.uniform(1.005, 1.03),
            "tokens_per_s": rate * world,
            "tokens_per_s_per_gpu": rate,
            "time_source": "measured",
            "peak_flops": H200_FLOPS,
            "mfu_palm": mfu,
            "mfu_causal": 0.93 * mfu,
            "mfu_playbook": 1.05 * mfu,
            "hfu": mfu * (4 / 3 if experiment.recompute == "full" else 1),
            "losses": [11.76, 11.5, 11.1],
            "loss_agrees": True,
            "peak_allocated_bytes": peak,
            "peak_reserved_bytes": int(1.04 * peak),
            "warmup_s": 3.3 * step + rng.uniform(0.5, 1.5),
            "timed_s": timed,
            "teardown_s": teardown,
            "gap_s": sum(overhead.values()) + teardown + 0.3,
            "duration_s": sum(overhead.values()) + 8.3 * step + teardown,
            "device_name": "NVIDIA H200",
            "device_memory_bytes": H200_BYTES,
            "power_w": rng.uniform(520, 690),
            "sm_clock_mhz": 1980.0 - 5 * (index % 7),
            "temperature_c": 55.0 + index % 11,
            "throttle_reasons": "sw_power_cap" if index % 5 == 0 else "",
        }
        row |= memory | _parts(experiment, step) | _kinds(experiment, step)
    else:
        row |= {"phase": rng.choice(["warmup", "build"]) if outcome == "oom" else "step", "failed_rank": 0}
        row["evidence"] = "torch.OutOfMemoryError: CUDA out of memory" if outcome == "oom" else f"{outcome} at step 2"
        row["device_memory_bytes"] = H200_BYTES if outcome == "oom" else None
    row |= columns
    row["ended_at"] = row["started_at"] + timedelta(seconds=row["duration_s"])
    return row


def attempts(points: Sequence[Experiment], *, seed: int = 0, **columns: Any) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [attempt(experiment, index, rng=rng, **columns) for index, experiment in enumerate(points)]


def make_sweep(folder: Path, rows: Sequence[dict[str, Any]], waiting: Sequence[Experiment] = ()) -> Path:
    """A sweep folder with these attempts (compacted) and a ledger that also plans ``waiting`` and two bad points."""
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text("{}")
    rows = [row | {"sweep": folder.name} for row in rows]
    for row in rows:
        store.write_attempt(folder, row, [])
    store.compact(folder)
    planned = [{name: row[name] for name in ("experiment_id", "model", "config_json")} for row in rows]
    planned += [config_columns(experiment) for experiment in waiting]
    ledger = [entry | {"verdict": "run"} for entry in planned]
    ledger += [
        {"verdict": "invalid", "rule": "heads", "detail": "tp=16 does not divide 24 heads", "experiment_id": "bad1"},
        {"verdict": "predicted_oom", "detail": "201 GiB of 139 GiB", "experiment_id": "bad2"},
    ]
    store.write_ledger(folder, [entry | {"sweep": folder.name, "point": i} for i, entry in enumerate(ledger)])
    return folder


def _memory(experiment: Experiment, params: int) -> dict[str, int]:
    local = params / (experiment.tp * experiment.pp)
    shards = experiment.dp_shard
    tokens = experiment.micro_batch_size * experiment.seq_len
    layers = experiment.model.num_layers
    activations = tokens * experiment.model.hidden_size * layers * (2.2 if experiment.recompute == "full" else 36)
    in_flight = min(experiment.pp, experiment.num_microbatches)
    return {
        "memory_parameters_bytes": int(6 * local / (shards if experiment.zero_stage == 3 else 1)),
        "memory_gradients_bytes": int(4 * local / (shards if experiment.zero_stage >= 2 else 1)),
        "memory_optimizer_bytes": int(8 * local / (shards if experiment.zero_stage >= 1 else 1)),
        "memory_activations_bytes": int(activations * in_flight / experiment.tp / experiment.pp + tokens * 128_256 * 2),
    }


def _parts(experiment: Experiment, step: float) -> dict[str, float]:
    """The step's parts: what a pipeline waits by the closed form, 3 % and 2 % of the step, and 0.2 % left over."""
    p, m = experiment.pp, experiment.num_microbatches
    idle, reduction, optimizer = step * (p - 1) / (m + p - 1), 0.03 * step * (experiment.dp > 1), 0.02 * step
    return {
        "forward_backward_s": 0.998 * step - idle - reduction - optimizer,
        "reduce_exposed_s": reduction,
        "optimizer_s": optimizer,
        "pipeline_idle_s": idle,
    }


def _kinds(experiment: Experiment, step: float) -> dict[str, Any]:
    """A profiled step: 3 % exposed on each axis of more than one rank, the rest is compute and gaps of the host."""
    e = experiment
    axes = [axis for axis in ("tp", "cp", "dp_shard", "dp_replicate") if getattr(e, axis) > 1]
    bubble = _parts(e, step)["pipeline_idle_s"]
    compute = step - bubble - 0.03 * step * len(axes)
    shares = {"matmul": 0.7, "attention": 0.1, "memory_bound": 0.15, "optimizer": 0.02, "launch_gaps": 0.03}
    return {
        **{f"breakdown_{name}_s": share * compute for name, share in shares.items()},
        "breakdown_step_time_s": step,
        "breakdown_bubble_s": bubble,
        "breakdown_comm_exposed_s": 0.03 * step * len(axes),
        "breakdown_comm_hidden_s": 0.05 * step * len(axes),
        "breakdown_comm_by_axis": [{"axis": axis, "exposed_s": 0.03 * step, "hidden_s": 0.05 * step} for axis in axes],
    }


def _luck(rng: random.Random) -> str:
    return rng.choices(["ok", "hang", "crash", "timeout"], [0.96, 0.015, 0.015, 0.01])[0]
