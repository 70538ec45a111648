"""``explain``: prints everything known about one point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from results.errors import UltrasweepError
from results.tables.store import sweep_dirs
from results.text.numbers import byte_unit, format_bytes, format_percent, name_routing
from results.text.terminal import plain_table
from sweep.composing.conffiles import ConfFolders
from sweep.inspecting.explain_groups import group_lines
from sweep.inspecting.explain_host import host_lines
from sweep.inspecting.lookup import Record
from sweep.inspecting.measured_values import MEASURED, formatted, named
from sweep.inspecting.planned_cluster import find_cluster
from workloads.costs.memory.estimate import MemoryEstimate, estimate_memory
from workloads.costs.shape.flops import flops_per_token, hardware_flops_per_token
from workloads.costs.shape.params import (
    active_params_with_embedding,
    active_params_without_embedding,
    num_params,
)
from workloads.costs.shape.partition import experiment_layers
from workloads.costs.shape.schedule import stage_at
from workloads.costs.time.pipeline import pipeline_time_s
from workloads.costs.time.timeline import estimate_idle
from workloads.rules.captured_steps import not_captured
from workloads.rules.engine_support import is_own
from workloads.rules.layout_rules import layout_violations
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.model_layers import routed_layers
from workloads.spec.model_spec import ModelSpec


def print_explanation(record: Record, results: Path, folders: ConfFolders, console: Console) -> None:
    """Print configuration, verdicts, predicted memory by stage, and every attempt. ``results``: the folder searched.
    ``folders``: with files of the user's own clusters."""
    experiment = record.experiment
    console.print(f"[bold]{record.id}[/]", highlight=False)
    cluster, why_not = find_cluster(record, folders)
    console.print(_configuration(experiment, cluster.backend if cluster is not None else "cuda"), highlight=False)
    for line in group_lines(experiment, cluster):
        console.print(line, highlight=False, markup=False)
    if why_not is not None:
        console.print(f"cluster    not known: {why_not}", highlight=False, markup=False, soft_wrap=True)
    for row in record.ledger:
        rule = f" ({row['rule']})" if row["rule"] else ""
        detail = f": {escape(row['detail'])}" if row["detail"] else ""
        verdict = f"verdict in sweep {row['sweep']}, grid {row['grid']}: [bold]{row['verdict']}[/]{rule}{detail}"
        console.print(verdict, highlight=False)
        step, rate = row["predicted_step_time_s"], row["predicted_tokens_per_s_per_gpu"]
        if step is not None and rate is not None:
            between = _between(row["predicted_step_time_low_s"], row["predicted_step_time_high_s"])
            lean = f"; {row['predicted_with']}" if row["predicted_with"] else ""
            prediction = f"predicted step: {step * 1e3:,.1f} ms{between}, {rate:,.0f} tokens/s/GPU{lean}"
            console.print(prediction, highlight=False, markup=False, soft_wrap=True)
    if not is_own(experiment):
        peaks = [row["predicted_peak_bytes"] for row in record.ledger if row["predicted_peak_bytes"]]
        if peaks:
            console.print(
                f"predicted peak with engine={experiment.engine}: {format_bytes(peaks[0], 2)}", highlight=False
            )
        else:
            what = "memory is not" if any(row["predicted_step_time_s"] for row in record.ledger) else "nothing is"
            console.print(
                f"{what} predicted for engine={experiment.engine}: its closed form does not cover this layout"
            )
    elif memory_is_known(record):
        limit = next((row["limit_bytes"] for row in record.ledger if row["limit_bytes"]), None)
        memory = estimate_memory(experiment)
        console.print(_memory_table(memory, limit))
        if cluster is not None and (workspace_bytes := cluster.device.workspace_bytes):
            whole = format_bytes(memory.peak_bytes + workspace_bytes, 2)
            console.print(
                f"with {format_bytes(workspace_bytes)} for matrix products on {cluster.name}: {whole}", highlight=False
            )
        for line in host_lines(experiment, cluster):
            console.print(line, highlight=False, markup=False)
        if text := _idle_text(experiment, cluster):
            console.print(text, highlight=False)
    if not record.attempts:
        cached = any(row["verdict"] == "cached" for row in record.ledger)
        where = "in these files: the finished one belongs to the sweep named above" if cached else "yet"
        console.print(f"no attempt {where}", highlight=False)
    for row in record.attempts:
        _print_attempt(row, results, console)


def memory_is_known(record: Record) -> bool:
    """Whether the closed form says what the layout needs: it is of our engine, and no rule of the layout forbids it."""
    allowed = all(row["verdict"] != "invalid" or row["predicted_peak_bytes"] for row in record.ledger)
    return is_own(record.experiment) and allowed


def _between(low_s: float | None, high_s: float | None) -> str:
    """Text of a prediction's interval; empty for an old ledger without intervals."""
    return f" (90 %: {low_s * 1e3:,.1f} to {high_s * 1e3:,.1f})" if low_s is not None and high_s is not None else ""


def _schedule(e: Experiment) -> str:
    """Text of a pipeline's schedule, its chunks, and its idle share if all actions (F, I and W) took equally long on
    all
    ranks.
    """
    text: str = e.pp_schedule
    if e.virtual_stages > 1:
        text += f", {e.virtual_stages} chunks of the model on each of {e.pp} pipeline ranks"
    if layout_violations(e):
        return text
    times = [1.0] * e.pp, [2.0] * e.pp, e.num_microbatches
    total = pipeline_time_s(e.pp_schedule, *times, virtual_stages=e.virtual_stages)
    return f"{text}, {100 * (1 - 3 * e.num_microbatches / total):.1f} % idle if all ranks took equally long"


def _active(model: ModelSpec) -> str:
    """Text of the parameters of a token's path; empty without routed experts."""
    if model.moe is None:
        return ""
    counted, without = active_params_with_embedding(model), active_params_without_embedding(model)
    same = f", {without / 1e6:,.1f} M without the input embedding" if without != counted else ""
    return f"; active for a token: {counted / 1e6:,.1f} M{same}"


def _held(e: Experiment) -> str:
    """Text of the layers of each pipeline rank, counted from 0; empty if there are no stages."""
    if e.pp == 1 or layout_violations(e):
        return ""
    stages, routed = experiment_layers(e), routed_layers(e.model)
    texts = []
    for rank in range(e.pp):
        chunks = [stages[stage_at(e.pp_schedule, rank, chunk, e.pp)] for chunk in range(e.virtual_stages)]
        layers = [layer for chunk in chunks for layer in chunk]
        ranges = " and ".join(f"{c[0]}-{c[-1]}" if len(c) > 1 else f"{c[0]}" if c else "none" for c in chunks)
        dense = sum(not routed[layer] for layer in layers) if e.model.moe is not None else 0
        texts.append(f"rank {rank} {ranges} ({len(layers)}{f', {dense} dense' if dense else ''})")
    return f"\nlayers     by pipeline rank: {'; '.join(texts)}"


def _graph(e: Experiment, backend: str) -> str:
    """Text of whether steps are captured, or why they are not."""
    if e.cuda_graph == "none" or e.engine != ENGINE:
        return ""
    reason = not_captured(e, backend)
    return f"CUDA graph {e.cuda_graph}, " if reason is None else f"CUDA graph {e.cuda_graph} (eager steps: {reason}), "


def _updates(e: Experiment) -> str:
    return "".join(f"{word}, " for word in e.update_words)


def _every(e: Experiment) -> str:
    every = f" in 1 layer of {e.recompute_every}" if e.recompute != "none" and e.recompute_every > 1 else ""
    return every + (f", activation_offload {e.activation_offload}" if e.activation_offload != "none" else "")


def _documents(e: Experiment) -> list[str]:
    """The line on packed documents; none without them."""
    if e.documents is None:
        return []
    dealt = "in order" if e.document_balance == "none" else "greedily by their attention"
    line = f"documents  {e.documents}, dealt {dealt}"
    if (imbalance := e.attention_imbalance) is not None:
        line += (
            f": attention as of sequences of {e.attended_length:,.0f} tokens, {imbalance:.3f} times the mean on the "
            "most loaded rank"
        )
    return [line]


def _configuration(experiment: Experiment, backend: str = "cuda") -> str:
    e = experiment
    degrees = f"dp {e.dp_replicate}x{e.dp_shard} (replicas x shards), tp {e.tp}, cp {e.cp}, pp {e.pp}, ep {e.ep}"
    degrees += f", etp {e.etp}" if e.etp > 1 else ""
    routing = name_routing(e.routing, e.routing_imbalance, e.capacity_factor)
    routed = f"{routing or 'balanced routing'}, " if e.model.moe is not None else ""
    schedule = f"; {_schedule(e)}" if e.pp > 1 else ""
    ranks = "rank" if e.world_size == 1 else "ranks"
    return "\n".join(
        (
            f"model      {e.model.name}: {num_params(e.model) / 1e6:,.1f} M parameters, {e.model.num_layers} layers, "
            f"hidden {e.model.hidden_size}{_active(e.model)}",
            f"layout     {e.world_size} {ranks}: {degrees}; ZeRO {e.zero_stage}{schedule}{_held(e)}",
            f"batch      {e.global_batch_size} sequences of {e.seq_len} tokens = {e.tokens_per_step:,} tokens: "
            f"{e.num_microbatches} micro-batch(es) of {e.micro_batch_size} on each of {e.dp} data-parallel ranks",
            *_documents(e),
            f"choices    {e.precision}, {_updates(e)}{routed}recompute {e.recompute}{_every(e)}, "
            f"attention {e.attention}, compile {e.compile}, "
            f"sequence parallel {'on' if e.sequence_parallel else 'off'}, seed {e.seed}, "
            f"{_graph(e, backend)}engine {e.engine} {e.engine_version}",
            f"FLOPs      {flops_per_token(e.model, e.attended_length, 'palm'):.3e} a token (PaLM), "
            f"{hardware_flops_per_token(e):.3e} on the device",
        )
    )


def _memory_table(memory: MemoryEstimate, limit: int | None) -> Table:
    """Predicted memory by stage. Neighbouring stages with the same numbers share a row."""
    size, unit = byte_unit(memory.peak_bytes)
    title = f"predicted memory of a rank, {unit}" + (f" (limit {limit / size:,.1f})" if limit else "")
    table = plain_table(title=title)
    for name in ("stage", "parameters", "gradients", "optimizer", "activations", "peak"):
        table.add_column(name, justify="right")
    rows: list[tuple[list[int], tuple[str, ...]]] = []
    for stage in memory.stages:
        parts = (stage.parameters_bytes, stage.gradients_bytes, stage.optimizer_bytes, stage.activations_bytes)
        cells = tuple(f"{part / size:.2f}" for part in (*parts, stage.peak_bytes))
        if rows and rows[-1][1] == cells:
            rows[-1][0].append(stage.stage)
        else:
            rows.append(([stage.stage], cells))
    for stages, cells in rows:
        table.add_row(f"{stages[0]}" if len(stages) == 1 else f"{stages[0]}-{stages[-1]}", *cells)
    return table


def predicted_idle(e: Experiment, cluster: ClusterSpec | None) -> Sequence[float] | None:
    """The share of a step that each pipeline rank is predicted to wait; None on a cluster that is not known or whose
    speed is not known, and for a layout that breaks a rule."""
    if cluster is None or e.pp == 1 or layout_violations(e):
        return None
    try:
        return estimate_idle(e, cluster)
    except UltrasweepError:
        return None


def _idle_text(e: Experiment, cluster: ClusterSpec | None) -> str | None:
    """Text of `predicted_idle`."""
    if (shares := predicted_idle(e, cluster)) is None or cluster is None:
        return None
    mean = format_percent(sum(shares) / len(shares))
    return f"predicted waiting for other stages, share of a step on {cluster.name}: {mean}; {_by_rank(shares)}"


def _by_rank(shares: Sequence[float]) -> str:
    """Text of the shares by rank; neighbouring ranks with equal shares are joined."""
    runs: list[tuple[int, int, str]] = []
    for rank, share in enumerate(shares):
        text = format_percent(share)
        if runs and runs[-1][2] == text:
            runs[-1] = (runs[-1][0], rank, text)
        else:
            runs.append((rank, rank, text))
    return ", ".join(
        f"rank {first} {text}" if first == last else f"ranks {first}-{last} {text}" for first, last, text in runs
    )


def _print_attempt(row: Mapping[str, Any], results: Path, console: Console) -> None:
    began = row["started_at"].strftime("%Y-%m-%d %H:%M:%S") if row["started_at"] else "?"
    phase = f" in {row['phase']}" if row["phase"] and row["outcome"] != "ok" else ""
    step = f" {row['phase_step']}" if row["phase_step"] is not None and row["outcome"] != "ok" else ""
    rank = f", rank {row['failed_rank']}" if row["failed_rank"] is not None else ""
    retried = "; tried again" if row["will_retry"] else ""
    console.print(
        f"attempt {row['attempt_id']} ({row['method']}, {began}): [bold]{row['outcome']}[/]"
        f"{phase}{step}{rank}{retried}",
        highlight=False,
    )
    measured = [
        f"{named(name, row)} {text}"
        for name, column, factor, form in MEASURED
        if column and (text := formatted(row, column, factor, form))
    ]
    source = row.get("peak_flops_source") or ""
    if measured and row["mfu_palm"] is None and source.startswith("none: "):
        measured.append(f"no MFU: {source.removeprefix('none: ')}")
    if measured:
        console.print("  " + ", ".join(measured), highlight=False, markup=False)
    if row.get("nccl_transports"):
        console.print(f"  NCCL's transports: {', '.join(row['nccl_transports'])}", highlight=False, markup=False)
    if row["evidence"] and row["outcome"] != "ok":
        console.print(f"  evidence: {row['evidence']}", highlight=False, markup=False)
    if (folder := log_folder(row, results)) is not None:
        console.print(f"  logs: {folder}", highlight=False, markup=False, soft_wrap=True)


def log_folder(row: Mapping[str, Any], results: Path) -> Path | None:
    """Folder of the attempt's logs; None if they are not kept."""
    if not row["log_dir"] or not results.is_dir():
        return None
    places = (folder / row["log_dir"] for folder in sweep_dirs(results) if folder.resolve().name == row["sweep"])
    return next((place for place in places if place.is_dir()), None)
