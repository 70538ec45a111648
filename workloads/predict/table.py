"""Parsing of a table into `Points`: meaning of each column, defaults of missing values, and reasons to refuse a row.

A value that is not understood refuses its row (`workloads.predict.cells.words`); a default of a missing value is noted.

A row is predicted if its device, the model's size, the sequence, the layout and the batch are known or follow from each
other (``gpus = dp tp pp cp``, ``gbs_seqs = dp mbs grad_accum``). Missing degrees are 1 if the others multiply to the
number of devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from workloads.predict.cells.degrees import fill_batch, layout_of
from workloads.predict.cells.deterministic import kernel_and_kind
from workloads.predict.cells.numbers import count_of, not_missing, positive_of
from workloads.predict.cells.shapes import attention_of, groups_of
from workloads.predict.cells.words import (
    FLASH2_ON_HOPPER,
    Refused,
    dispatched_of,
    kernel_of,
    learned_of,
    precision_of,
    recomputed_of,
    sequence_parallel_of,
    text_of,
    truth_of,
    zero_of,
)
from workloads.predict.experts.columns import EXPERT_COLUMNS, Experts, dispatched_by, experts_of
from workloads.predict.hardware import cluster_of, library_factor, note_links, power_factor
from workloads.predict.network_terms import network_columns
from workloads.predict.parameters import TIME
from workloads.predict.points import CAPTURED, RATE_NAMES, UNLIKE, Points, tier_table
from workloads.predict.profiles import Profile, find_profile
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import ENGINE

COLUMNS = (
    "gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tie_embeddings", "seq", "gbs_seqs", "mbs",
    "grad_accum", "dp", "tp", "pp", "vpp", "cp", "ep", "sharding", "recompute", "precision", "codebase", "code_version",
    "allreduce_gb_s", "allreduce_intra_gb_s", "host_launch_s", *EXPERT_COLUMNS, "gated_mlp", "attention_kernel",
    "power_w", "cluster", "head_dim", "routing", "dispatcher", "sequence_parallel",
    "gradient_accumulation_fusion", "deterministic",
)  # fmt: skip
"""Columns of a table. Each may be missing, or empty in a row: then it is unknown."""
MEASURED = ("status", "step_time_s", "reserved_gib")
"""Additional columns of rows to calibrate with."""
_COUNTS = ("gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gbs_seqs", "mbs", "grad_accum",
           "dp", "tp", "pp", "vpp", "cp", "ep", "head_dim", *EXPERT_COLUMNS)  # fmt: skip
_LONGEST_REASON = 300
_HOPPER = re.compile(r"\b(?:H100|H200|GH200|H800|H20)\b")
_BLACKWELL = re.compile(r"\bG?B[23]00\b")
_DEFAULT_VOCAB = 50_000.0
"""Vocabulary if a table does not state it: between those of GPT-2 and Llama 2."""


@dataclass(frozen=True, slots=True)
class Table:
    points: Points
    """Points of the rows that can be predicted."""
    rows: np.ndarray[Any, np.dtype[np.int64]]
    """Indices of these rows in the table."""
    reasons: tuple[str, ...]
    """Reason of refusal by row of the table; empty if the row can be predicted."""
    notes: tuple[str, ...]
    """Assumed defaults by row of the table; empty if none."""
    clusters: tuple[ClusterSpec, ...]
    """Cluster of each point."""
    experts: tuple[Experts | None, ...]
    """Routed experts of each point; None: a dense model, or experts that no column describes."""


def read_points(
    frame: pd.DataFrame,
    clusters: Mapping[str, ClusterSpec],
    profiles: Mapping[str, Profile],
    general: Profile,
    *,
    routed: bool = True,
) -> Table:
    """``frame``: any table with some of `COLUMNS`; other columns are ignored. No content of a row raises an error.

    ``routed``: whether rows with expert parallelism are accepted if no column describes their experts. They are only
    useful together with measured ones.
    """
    columns = {name: frame[name].tolist() if name in frame else [None] * len(frame) for name in COLUMNS}
    fields_of_rows: list[dict[str, Any]] = []
    rows: list[int] = []
    places: list[tuple[ClusterSpec, Experts | None]] = []
    reasons: list[str] = []
    notes: list[str] = []
    for row in range(len(frame)):
        values = {name: columns[name][row] for name in COLUMNS}
        note: list[str] = []
        try:
            row_fields, cluster, experts = _row(values, clusters, profiles, general, note, routed)
        except Refused as refused:
            reason = str(refused)
            reasons.append(reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…")
        else:
            fields_of_rows.append(row_fields)
            places.append((cluster, experts))
            rows.append(row)
            reasons.append("")
        notes.append("; ".join(note))
    fields: dict[str, Any] = {}
    for name in Points.__dataclass_fields__:
        texts, values_of_rows = name in ("codebase", "version", "device"), [one[name] for one in fields_of_rows]
        tiers = name in ("inner", "outer")
        fields[name] = tier_table(values_of_rows) if tiers else np.array(values_of_rows, np.str_ if texts else float)
    return Table(
        points=Points(**fields),
        rows=np.array(rows, dtype=np.int64),
        reasons=tuple(reasons),
        notes=tuple(notes),
        clusters=tuple(cluster for cluster, _ in places),
        experts=tuple(experts for _, experts in places),
    )


def _row(
    values: Mapping[str, Any],
    clusters: Mapping[str, ClusterSpec],
    profiles: Mapping[str, Profile],
    general: Profile,
    note: list[str],
    routed: bool,
) -> tuple[dict[str, Any], ClusterSpec, Experts | None]:
    """Fields of `Points`, the cluster and the experts of one row."""
    n = {name: count_of(name, values[name]) for name in _COUNTS}
    gpu, name = text_of(values["gpu"]), text_of(values["cluster"])
    if not gpu and not name:
        raise Refused("gpu is not given; give it or the cluster")
    if gpu in clusters and not name:
        gpu, name = "", gpu
    cluster = cluster_of(gpu, name, clusters, note)
    device = cluster.device
    code = text_of(values["codebase"])
    profile = find_profile(code, profiles.values(), general)
    if profile is general:
        note.append(f"no profile of code base {code!r}: taken as {general.name}" if code else "codebase not given")
    layout = layout_of(n, cluster, note)
    if not text_of(values["cluster"]):
        note_links(layout["gpus"], cluster, clusters, note)
    fill_batch(n, layout, note)
    model = _model(values, n, layout, profile, note)
    model["queries"], mla = attention_of(n, model, profile.name != ENGINE, note)
    experts = experts_of(n, model, layout["ep"], routed, note)
    fp8, fp16 = precision_of(values["precision"], note)
    if experts is not None:
        experts = experts._replace(mla=mla, groups=groups_of(n, model))
        sent = dispatched_of(values["dispatcher"])
        experts = dispatched_by(profile, experts, fp8, sent, learned_of(values["routing"]))
        model["ffn"] = experts.used_columns(model["layers"])
    recomputed = recomputed_of(values["recompute"], note)
    split = sequence_parallel_of(values["sequence_parallel"], values["recompute"])
    adds = truth_of("gradient_accumulation_fusion", values["gradient_accumulation_fusion"])
    clock = power_factor(positive_of("power_w", values["power_w"], note), cluster, note) * library_factor(cluster, note)
    peak = device.peak_of("bf16")
    low = device.peak_of(RATE_NAMES[int(fp8)])
    if peak is None or device.memory_bandwidth is None:
        raise Refused(f"gpu {gpu or name!r}: its rates are not known")
    if low is None:
        raise Refused(f"gpu {gpu or name!r} has no rate for precision {text_of(values['precision'])!r}")
    fields = {
        **model,
        **layout,
        "mbs": not_missing(n["mbs"]),
        "micro_batches": not_missing(n["grad_accum"]),
        "zero": zero_of(values["sharding"], profile.sharding, note),
        "recompute": recomputed.kind,
        "fp8": fp8,
        "fp16": fp16,
        **UNLIKE,
        "captured": float(
            text_of(values["code_version"]).endswith(CAPTURED) or (experts is not None and experts.fused)
        ),
        "again": recomputed.again,
        "recomputed": recomputed.share,
        "split": math.nan if split is None else float(split),
        "adds": math.nan if adds is None else float(adds and not fp8),  # fp8 products cannot add to fp32
        "ends": _ends(model["layers"], layout, profile, note),
        **_attention(values, device.name, profile, clock * peak, note),
        "clock": clock,
        "launch": _launch(values["host_launch_s"], profile, note),
        "codebase": profile.name,
        "version": text_of(values["code_version"]),
        "device": cluster.name,
        "peak": peak,
        "peak_matmul": low,
        "memory_bandwidth": device.memory_bandwidth,
        "capacity": float(device.memory_bytes or math.nan),
        **network_columns(cluster),
        "world_measured": 1e9 * positive_of("allreduce_gb_s", values["allreduce_gb_s"], note),
        "intra_measured": 1e9 * positive_of("allreduce_intra_gb_s", values["allreduce_intra_gb_s"], note),
    }
    return fields, cluster, experts


def _model(
    values: Mapping[str, Any],
    n: Mapping[str, float | None],
    layout: Mapping[str, float],
    profile: Profile,
    note: list[str],
) -> dict[str, float]:
    """Fields of `Points` about the model. Its feed-forward size is that of the dense layers."""
    for name in ("layers", "hidden", "seq"):
        if n[name] is None:
            raise Refused(f"{name} is not given")
    layers, hidden, seq = not_missing(n["layers"]), not_missing(n["hidden"]), not_missing(n["seq"])
    heads, kv_heads = n["heads"], n["kv_heads"]
    if heads is None:
        heads = max(1.0, round(hidden / 128))
        note.append("heads not given: heads of 128")
    if kv_heads is None:
        kv_heads = heads
        note.append(f"kv_heads not given: {heads:g}, as many as heads")
    if heads % kv_heads:
        raise Refused(f"kv_heads {kv_heads:g} does not divide heads = {heads:g}")
    if layout["tp"] > heads:
        raise Refused(f"tp {layout['tp']:g} is more than the {heads:g} heads")
    gated = truth_of("gated_mlp", values["gated_mlp"])
    if gated is None:
        gated = profile.gated
    if gated is None:
        gated, why = _usually_gated(kv_heads < heads, n["ffn"], hidden)
        note.append(f"gated_mlp not given: {str(gated).lower()}, since {why}")
    ffn = n["ffn"]
    if ffn is None:
        ffn = 8 * hidden / 3 if gated else 4 * hidden
        if not n["num_experts"] or n["dense_layers"]:
            note.append(f"ffn not given: {ffn:.0f}")
    vocab = n["vocab"]
    if vocab is None:
        vocab = _DEFAULT_VOCAB
        note.append(f"vocab not given: {vocab:.0f}")
    tied = truth_of("tie_embeddings", values["tie_embeddings"])
    if tied is None:
        note.append("tie_embeddings not given: false")
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": ffn,
        "matrices": 3.0 if gated else 2.0,
        "vocab": vocab,
        "tied": float(tied or False),
        "seq": seq,
    }


def _usually_gated(grouped: bool, ffn: float | None, hidden: float) -> tuple[bool, str]:
    """Whether models of this shape mostly have gated feed-forward layers, and what speaks for it."""
    if grouped:
        return True, "kv_heads < heads"
    if ffn is None:
        return False, "kv_heads = heads and ffn is not given"
    return ffn != 4 * hidden, f"ffn is {'' if ffn == 4 * hidden else 'not '}4 x hidden"


def _ends(layers: float, layout: Mapping[str, float], profile: Profile, note: list[str]) -> float:
    """`Points.ends` of a row: whether its chunks come out even only if the embedding and the loss count as layers."""
    pp, vpp = layout["pp"], layout["vpp"]
    chunks, most = pp * vpp, layers + 2 if profile.ends_as_layers else layers
    if chunks > most and profile.partition != "greedy":  # which leaves stages without a layer
        what = f"pp {pp:g}" if vpp == 1 else f"pp x vpp = {pp:g} x {vpp:g} = {chunks:g}"
        counted = ", with embedding and loss counted as layers" if profile.ends_as_layers else ""
        raise Refused(f"{what} is more than the {most:g} layers{counted}")
    if pp == 1 or not profile.ends_as_layers or layers % chunks == 0 or (chunks <= layers and (layers + 2) % chunks):
        return 0.0
    note.append(f"{layers:g} layers on {chunks:g} chunks: embedding and loss counted as layers")
    return 1.0


def _attention(
    values: Mapping[str, Any], device: str, profile: Profile, peak: float, note: list[str]
) -> dict[str, float]:
    """`Points.unfused`, `Points.kernel` and `Points.deterministic` of the cells ``attention_kernel`` and
    ``deterministic``. FlashAttention-2 is slower than the newest kernels on Hopper, as far as is known here only there.
    ``peak``: FLOP/s of which attention reaches a share."""
    value = values["attention_kernel"]
    kind = kernel_of(value)
    usual = profile.time.get("attention", TIME["attention"].value)
    deterministic = bool(truth_of("deterministic", values["deterministic"]))
    if kind == "unfused":
        return {"unfused": 1.0, "deterministic": float(deterministic)}
    if deterministic:
        generation = "hopper" if _HOPPER.search(device) else "blackwell" if _BLACKWELL.search(device) else ""
        if generation == "blackwell" and not kind:
            note.append("deterministic attention: FlashAttention-2, as with cuDNN before 9.18.1")
        kernel, stored = kernel_and_kind(generation, kind, usual, peak)
        return {"unfused": 0.0 if kind else math.nan, "kernel": kernel, "deterministic": stored}
    if not kind:
        return {"unfused": math.nan}
    share = {"newest": TIME["attention"].value, "flash2": FLASH2_ON_HOPPER}.get(kind, usual)
    if _HOPPER.search(device) is None and kind != "flash":
        note.append(f"attention_kernel {value!r}: its rate on {device} is not known, that of flash is taken")
        share = usual
    return {"unfused": 0.0, "kernel": share / usual}


def _launch(value: Any, profile: Profile, note: list[str]) -> float:
    """`Points.launch` of a row."""
    seconds = positive_of("host_launch_s", value, note)
    return seconds / profile.host_launch_s if profile.host_launch_s and math.isfinite(seconds) else UNLIKE["launch"]
