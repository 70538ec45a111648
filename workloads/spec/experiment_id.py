"""The readable id of an experiment: words for its layout and its unusual choices, and its hash."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from results.shared_filesystem.whole_files import shortened
from workloads.spec.engine_versions import ENGINE, capture_word
from workloads.spec.updates.words import update_words

_IN_AN_ID = str.maketrans({"+": ".", "/": "_", ":": None, "*": "x"})
"""What a label has instead of the signs of ``recompute``, because file names are made of it."""
LONGEST_ID = 110
"""Limit in bytes of UTF-8. The name of a queue file is composed of a point, a pilot and an attempt, and file systems
allow 255 bytes, which are 85 Chinese characters."""


def new_id(fields: Mapping[str, Any], fusion_word: str, hash: str) -> str:
    """The id of an experiment with these fields, by name, in at most `LONGEST_ID` bytes. ``fusion_word`` and ``hash``:
    its properties of these names."""
    f = fields
    parts = [_slug(f["model"].name)]
    replicas, shards = f["dp_replicate"], f["dp_shard"]
    dp = f"dp{replicas * shards}" if replicas == 1 or shards == 1 else f"dp{replicas}x{shards}"
    parts.append(f"{dp}z{f['zero_stage']}")
    parts += [f"{axis}{f[axis]}" for axis in ("tp", "cp", "pp", "ep", "etp") if f[axis] > 1]
    if f["pp"] > 1:
        parts.append(f["pp_schedule"] + (f"v{f['virtual_stages']}" if f["virtual_stages"] > 1 else ""))
    parts += [f"mbs{f['micro_batch_size']}", f"gbs{f['global_batch_size']}", f"s{f['seq_len']}"]
    if f["recompute"] != "none":
        parts.append(f"rc{f['recompute'].translate(_IN_AN_ID)}")
        if f["recompute_every"] > 1:
            parts[-1] += f".every{f['recompute_every']}"
    if f["activation_offload"] != "none":
        parts.append(f"off{f['activation_offload'].translate(_IN_AN_ID)}")
    if f["documents"] is not None:
        parts.append("packed" + (".greedy" if f["document_balance"] == "greedy" else ""))
    if f["routing"] != "balanced":
        parts.append(f["routing"])
    if f["precision"] != "bf16":
        parts.append(f["precision"])
    if f["attention"] == "flash4":
        parts.append(f["attention"])
    if f["recurrence"] != "torch":
        parts.append(f["recurrence"])
    if f["compile"] != "none":
        parts.append("compiled")
    if word := capture_word(f["cuda_graph"], f["engine"], f["engine_version"]):
        parts.append(word)
    if fusion_word:
        parts.append(fusion_word)
    parts += [word.replace(" ", "") for word in update_words(f)]
    if f["engine"] != ENGINE:
        parts.append(_slug(f["engine"]))
    return shortened_id("-".join([*parts, hash]), LONGEST_ID)


def shortened_id(id: str, most: int) -> str:
    """An experiment's id in at most ``most`` bytes: the beginning of its label, and its whole hash."""
    if len(id.encode(errors="replace")) <= most:
        return id
    return shortened(id, most - 9).rstrip("-.") + id[-9:]


@lru_cache(maxsize=256)
def _slug(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "" for c in name.lower()) or "model"
