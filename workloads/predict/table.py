"""Parsing of a table into `Points`: meaning of each column, defaults of missing values, and reasons to refuse a row.

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

from workloads.predict.hardware import LINKED, device_of, like_another
from workloads.predict.points import UNLIKE, Points, fp8_kind
from workloads.predict.profiles import Profile, find_profile
from workloads.spec.checks import MOST, shown
from workloads.spec.cluster import ClusterSpec
from workloads.spec.recomputation import SELECTIVE, operations_of

COLUMNS = (
    "gpu", "gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tie_embeddings", "seq", "gbs_seqs", "mbs",
    "grad_accum", "dp", "tp", "pp", "vpp", "cp", "ep", "sharding", "recompute", "precision", "codebase", "code_version",
    "allreduce_gb_s", "allreduce_intra_gb_s", "host_launch_s",
)  # fmt: skip
"""Columns of a table. Each may be missing, or empty in a row: then it is unknown."""
MEASURED = ("status", "step_time_s", "reserved_gib")
"""Additional columns of rows to calibrate with."""
_COUNTS = ("gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gbs_seqs", "mbs", "grad_accum",
           "dp", "tp", "pp", "vpp", "cp", "ep")  # fmt: skip
_LONGEST_REASON = 300
_DEFAULT_VOCAB = 50_000.0
"""Vocabulary if a table does not state it: between those of GPT-2 and Llama 2."""
_UNKNOWN = ("", "nan", "none", "null", "na", "n/a", "unknown", "?", "-")


class Refused(Exception):
    """Reason why a row cannot be predicted, in words."""


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


def read_points(
    frame: pd.DataFrame,
    clusters: Mapping[str, ClusterSpec],
    profiles: Mapping[str, Profile],
    general: Profile,
    *,
    routed: bool = True,
) -> Table:
    """``frame``: any table with some of `COLUMNS`; other columns are ignored. No content of a row raises an error.

    ``routed``: whether rows with expert parallelism are accepted. No column describes their experts, so they are only
    useful together with measured ones.
    """
    columns = {name: frame[name].tolist() if name in frame else [None] * len(frame) for name in COLUMNS}
    fields_of_rows: list[dict[str, Any]] = []
    rows: list[int] = []
    reasons: list[str] = []
    notes: list[str] = []
    for row in range(len(frame)):
        values = {name: columns[name][row] for name in COLUMNS}
        note: list[str] = []
        try:
            fields_of_rows.append(_row(values, clusters, profiles, general, note, routed))
        except Refused as refused:
            reason = str(refused)
            reasons.append(reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 1]}…")
        else:
            rows.append(row)
            reasons.append("")
        notes.append("; ".join(note))
    fields: dict[str, Any] = {}
    for name in Points.__dataclass_fields__:
        texts = name in ("codebase", "version", "device")
        fields[name] = np.array([one[name] for one in fields_of_rows], dtype=np.str_ if texts else float)
    return Table(Points(**fields), np.array(rows, dtype=np.int64), tuple(reasons), tuple(notes))


def _row(
    values: Mapping[str, Any],
    clusters: Mapping[str, ClusterSpec],
    profiles: Mapping[str, Profile],
    general: Profile,
    note: list[str],
    routed: bool,
) -> dict[str, Any]:
    n = {name: _count(name, values[name]) for name in _COUNTS}
    gpu = _text(values["gpu"])
    if not gpu:
        raise Refused("gpu is not given")
    cluster = device_of(gpu, clusters)
    if cluster is None:
        raise Refused(f"gpu {gpu!r} is not known; known: A100, H100, H200, B200, GB200, B300, GB300")
    if like_another(gpu):
        note.append(f"gpu {gpu!r}: taken as {cluster.device.name}")
    code = _text(values["codebase"])
    profile = find_profile(code, profiles.values(), general)
    if profile is general and code:
        note.append(f"no profile of code base {code!r}: taken as {general.name}")
    layout = _layout(n, cluster, note)
    if layout["ep"] > 1:
        if not routed:
            raise Refused(f"ep {layout['ep']:g}: no column describes the experts; calibrate with rows that have ep > 1")
        note.append("experts are in no column: taken as a dense model, and corrected by the calibration")
    _batch(n, layout, note)
    for name in ("layers", "hidden", "seq"):
        if n[name] is None:
            raise Refused(f"{name} is not given")
    layers, hidden, seq = _known(n["layers"]), _known(n["hidden"]), _known(n["seq"])
    heads = n["heads"]
    if heads is None:
        heads = max(1.0, round(hidden / 128))
        note.append("heads not given: heads of 128")
    if layout["pp"] > layers:
        raise Refused(f"pp {layout['pp']:g} is more than the {layers:g} layers")
    if layout["tp"] > heads:
        raise Refused(f"tp {layout['tp']:g} is more than the {heads:g} heads")
    if layout["pp"] * layout["vpp"] > layers:
        raise Refused(f"pp x vpp = {layout['pp'] * layout['vpp']:g} is more than the {layers:g} layers")
    gated = profile.gated
    if gated is None:
        gated = (n["kv_heads"] is not None and n["kv_heads"] < heads) or n["ffn"] not in (None, 4 * hidden)
    ffn = n["ffn"]
    if ffn is None:
        ffn = 8 * hidden / 3 if gated else 4 * hidden
        note.append(f"ffn not given: {ffn:.0f}")
    vocab = n["vocab"]
    if vocab is None:
        vocab = _DEFAULT_VOCAB
        note.append(f"vocab not given: {vocab:.0f}")
    precision = _text(values["precision"]).lower()
    fp8 = fp8_kind(precision)
    peak = cluster.device.peak_of("bf16")
    low = cluster.device.peak_of("fp8") if fp8 else peak
    if peak is None or cluster.device.memory_bandwidth is None:
        raise Refused(f"gpu {gpu!r}: its rates are not known")
    if low is None:
        raise Refused(f"gpu {gpu!r} has no rate for precision {precision!r}")
    if re.search(r"fp32|float32|fp64|float64|tf32", precision) and not re.search("16|8", precision):
        raise Refused(f"precision {precision!r} is not supported; supported: 16 bits, fp8")
    if not fp8 and not re.search(r"16|half|mixed|amp", precision):
        note.append(_taken_as("precision", precision, "16 bits"))
    inter = cluster.inter_node.bandwidth if cluster.inter_node is not None else math.nan
    return {
        "gpus": layout["gpus"],
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": n["kv_heads"] or heads,
        "ffn": ffn,
        "matrices": 3.0 if gated else 2.0,
        "vocab": vocab,
        "tied": float(_truth(values["tie_embeddings"]) or False),
        "seq": seq,
        "mbs": _known(n["mbs"]),
        "micro_batches": _known(n["grad_accum"]),
        **{name: layout[name] for name in ("dp", "tp", "pp", "vpp", "cp", "ep")},
        "zero": _zero(values["sharding"], profile, note),
        "recompute": _recompute(values["recompute"], note),
        "fp8": fp8,
        "fp16": float(re.search(r"fp16|float16|half", precision.replace("bfloat16", "")) is not None),
        **UNLIKE,
        **_again(values["recompute"], note),
        "launch": _launch(values["host_launch_s"], profile),
        "codebase": profile.name,
        "version": _text(values["code_version"]),
        "device": cluster.name,
        "peak": peak,
        "peak_matmul": low,
        "memory_bandwidth": cluster.device.memory_bandwidth,
        "capacity": float(cluster.device.memory_bytes or math.nan),
        "node": LINKED.get(cluster.name, float(cluster.devices_per_node)),
        "intra": cluster.intra_node.bandwidth,
        "inter": inter,
        "world_measured": 1e9 * _positive(values["allreduce_gb_s"]),
        "intra_measured": 1e9 * _positive(values["allreduce_intra_gb_s"]),
    }


def _layout(n: Mapping[str, float | None], cluster: ClusterSpec, note: list[str]) -> dict[str, float]:
    degrees = {name: n[name] for name in ("dp", "tp", "pp", "cp")}
    known = math.prod(value for value in degrees.values() if value is not None)
    gpus = n["gpus"]
    if gpus is None:
        if degrees["dp"] is None or degrees["tp"] is None or degrees["pp"] is None:
            raise Refused("gpus is not given; give it, or all of dp, tp and pp")
        gpus = known
    missing = [name for name, value in degrees.items() if value is None]
    if missing:
        if gpus % known:
            raise Refused(f"{_product(degrees)} does not divide gpus = {gpus:g}")
        rest = gpus / known
        open_name = "dp" if "dp" in missing else missing[0] if len(missing) == 1 else None
        if rest != 1 and open_name is None:
            raise Refused(
                f"{' and '.join(missing)} not given, and {_product(degrees)} does not multiply to gpus = {gpus:g}"
            )
        for name in missing:
            degrees[name] = rest if name == open_name else 1.0
    dp, tp, pp, cp = (_known(degrees[name]) for name in ("dp", "tp", "pp", "cp"))
    if dp * tp * pp * cp != gpus:
        if cp > 1 and dp % cp == 0 and dp * tp * pp == gpus:
            dp /= cp
            note.append("dp included the context-parallel ranks: divided by cp")
        else:
            raise Refused(
                f"dp x tp x pp x cp = {dp:g} x {tp:g} x {pp:g} x {cp:g} = {dp * tp * pp * cp:g}, gpus = {gpus:g}"
            )
    if gpus > cluster.devices_per_node and cluster.inter_node is None:
        raise Refused(f"{gpus:g} devices need several nodes, and cluster {cluster.name} has no link between nodes")
    vpp, ep = n["vpp"] or 1.0, n["ep"] or 1.0
    if vpp > 1 and pp == 1:
        vpp = 1.0
    return {"gpus": gpus, "dp": dp, "tp": tp, "pp": pp, "cp": cp, "vpp": vpp, "ep": ep}


def _batch(n: dict[str, float | None], layout: Mapping[str, float], note: list[str]) -> None:
    """Fills in values that follow from the others. Raises `Refused` if they disagree or too few are known."""
    dp, mbs, m, gbs = layout["dp"], n["mbs"], n["grad_accum"], n["gbs_seqs"]
    if gbs is not None and m is None and mbs is not None:
        m = gbs / dp / mbs
    elif gbs is not None and mbs is None and m is not None:
        mbs = gbs / dp / m
    elif gbs is not None and mbs is None and m is None:
        m, mbs = 1.0, gbs / dp
        note.append("mbs and grad_accum not given: one micro-batch")
        if layout["pp"] > 1:
            m, mbs = gbs / dp, 1.0
            note[-1] = "mbs and grad_accum not given: micro-batches of one sequence"
    elif gbs is None and mbs is not None and m is None:
        m = 1.0 if layout["pp"] == 1 else None
        note.append("grad_accum not given: 1")
    if mbs is None or m is None:
        raise Refused("the batch is not known: give two of gbs_seqs, mbs and grad_accum")
    if gbs is not None and abs(dp * mbs * m - gbs) > 1e-6 * gbs:
        raise Refused(f"dp x mbs x grad_accum = {dp:g} x {mbs:g} x {m:g} = {dp * mbs * m:g}, gbs_seqs = {gbs:g}")
    if mbs <= 0 or m <= 0 or m != round(m):
        raise Refused(f"gbs_seqs = {gbs or 0:g} is not a multiple of dp x mbs = {dp * mbs:g}")
    n["mbs"], n["grad_accum"] = mbs, m


def _product(degrees: Mapping[str, float | None]) -> str:
    given = [f"{name} {value:g}" for name, value in degrees.items() if value is not None]
    return " x ".join(given) or "no degree"


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NA:
        return ""
    text = str(value).strip()
    return "" if text.lower() in _UNKNOWN else text


def _count(name: str, value: Any) -> float | None:
    text = _text(value)
    if not text:
        return None
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        raise Refused(f"{name} = {shown(text)} is not a number") from None
    if not math.isfinite(number) or number < 0 or (number != round(number) and name not in ("mbs", "ffn", "vocab")):
        raise Refused(f"{name} = {number:g} is not a whole number above 0")
    if number > MOST:
        raise Refused(f"{name} = {number:g} is above {MOST:,}")
    if number == 0:
        if name in ("vpp", "cp", "ep", "tp", "pp", "kv_heads"):
            return None
        raise Refused(f"{name} = 0")
    return number


def _positive(value: Any) -> float:
    """``value`` as a positive number; NaN if it is none."""
    text = _text(value)
    try:
        number = float(text) if text else math.nan
    except ValueError:
        return math.nan
    return number if 0 < number < math.inf else math.nan


def _launch(value: Any, profile: Profile) -> float:
    """`Points.launch` of a row."""
    seconds = _positive(value)
    return seconds / profile.host_launch_s if profile.host_launch_s and math.isfinite(seconds) else UNLIKE["launch"]


def _truth(value: Any) -> bool | None:
    text = _text(value).lower()
    if text in ("true", "1", "1.0", "yes", "y", "t"):
        return True
    return False if text else None


def _zero(value: Any, profile: Profile, note: list[str]) -> float:
    text = _word(value)
    if stage := re.search(r"(?:zero|stage)[ _-]*([0-3])", text):
        return float(stage[1])
    if re.fullmatch(r"[0-3](\.0)?", text):
        return float(text[0])
    if "fsdp" in text or "full_shard" in text or "hsdp" in text:
        return 3.0
    if "distributed" in text or "dist_opt" in text:
        return 1.0
    if text not in ("none", "no", "ddp", "dp"):
        note.append(_taken_as("sharding", text, f"zero{profile.sharding}"))
        return float(profile.sharding)
    return 0.0


def _recompute(value: Any, note: list[str]) -> float:
    text = _word(value)
    if re.match(r"(no|none|not|off|false|without|disabled|0|0\.0)($|[^a-z])", text):  # e.g. "no checkpointing"
        return 0.0
    if re.search(r"select|sac|norm|rope|swiglu|experts|core_attn|partial", text):
        return 1.0
    if re.search(r"full|block|uniform|^true$|^1(\.0)?$|^ac$|checkpoint|^yes$", text):
        return 2.0
    note.append(_taken_as("recompute", text, "none"))
    return 0.0


def _again(value: Any, note: list[str]) -> dict[str, float]:
    """Values of ``full.every2``, ``norm+swiglu`` and the like: share of the layers that recompute, and host work for
    it, relative to ``full`` or ``selective`` in every layer."""
    kind, _, every = _word(value).partition(".every")
    share = 1.0 / int(every) if re.fullmatch(r"[1-9]\d*", every) else 1.0
    if every and share == 1.0 and every != "1":
        note.append(f"recompute {_word(value)!r} is not known: taken as {kind} in every layer")
    named = len(operations_of(kind)) or len(SELECTIVE)
    return {"recomputed": share, "again": share * named / len(SELECTIVE)}


def _word(value: Any) -> str:
    """Cell in lower case. ``none`` is a word here; an empty cell gives an empty string."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(value).strip().lower()


def _taken_as(column: str, text: str, what: str) -> str:
    return f"{column} {text!r} is not known: taken as {what}" if text else f"{column} not given: {what}"
