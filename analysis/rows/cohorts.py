"""Which rows may be compared in one figure or ranking, and what else differs between them.

Rows are never pooled across method (measured, rehearsed), cluster, engine, or measurement version. Rehearsed rows of
different tp or cp share a cohort but are ranked separately. `mixtures` names everything else that differs within a
cohort and can move a number.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import cast

import pandas as pd

from analysis.rows.labels import add_labels, tell_collectives_apart
from results.text.numbers import format_setting, listed, plural
from workloads.spec.engine_versions import ENGINE, limits_of

METHOD_NAMES = {
    "measured": "Measured",
    "rehearsed": "Rehearsed on one device",
    "rehearsed_fake": "Estimated without a device",
}
METHOD_MEANING = {
    "measured": "Every rank ran.",
    "rehearsed": "Single ranks of each layout ran on one device under a fake process group: memory and compute time "
    "are measured, communication is modelled. These are not measurements of a whole run: steps with tensor or context "
    "parallelism mostly come out too short, which would rank both too high. Times are ranked only between layouts of "
    "equal tp and equal cp.",
    "rehearsed_fake": "Single ranks were traced without a device: memory is traced and times are estimates. These are "
    "not measurements.",
}
METHOD_STAMPS = {
    "rehearsed": "rehearsed: communication is modelled, no whole run was measured",
    "rehearsed_fake": "traced without a device: times are estimates, nothing was measured",
}
"""Stamp on every figure of a cohort that was not measured."""
_LONGEST_SLUG = 80
_OTHER_DEVICE = re.compile(r"^none: ran on (.+), cluster (.+) describes (.+)$")
"""Pattern of ``peak_flops_source`` in rows that ran on a device other than their cluster's."""
_MIXABLE = {
    "device_name": "devices",
    "driver_version": "drivers",
    "torch_version": "PyTorch versions",
    "cuda_version": "CUDA versions",
    "nccl_version": "NCCL versions",
    "engine_version": "engine versions",
    "schema_version": "schema versions",
    "git_commit": "commits",
    "timed_steps": "numbers of timed steps",
}
"""Columns that should have one value in a cohort, each with a plural noun for several values."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """Rows that may be compared with each other. ``frame`` is labelled (see `analysis.rows.labels.add_labels`)."""

    slug: str
    """Name that is safe in a file name, e.g. ``measured-h200``."""
    title: str
    meaning: str
    frame: pd.DataFrame
    stamp: str = ""
    """One line for every figure; empty for measured rows."""


def split(attempts: pd.DataFrame) -> list[Cohort]:
    """Cohorts of a frame of attempts: measured ones first, then by number of rows, largest first."""
    versions = attempts["measurement_version"].nunique(dropna=False) > 1
    keyed = attempts.assign(
        _cluster=attempts["cluster"].fillna("unknown cluster"),
        _engine=attempts["engine"].fillna(ENGINE),
        _version=attempts["measurement_version"].fillna(-1),
    )
    cohorts = []
    groups = keyed.groupby(["method", "_cluster", "_engine", "_version"], sort=True)
    for key, rows in groups:
        if len(rows) == len(keyed):
            rows = keyed  # shares the values of ``attempts`` instead of a copy
        method, cluster, engine, version = cast("tuple[str, str, str, float]", key)
        title, slug = f"{METHOD_NAMES.get(method, method)}: {cluster}", f"{method}-{cluster}"
        limits = engine_limits(rows)
        if engine != ENGINE:
            title, slug = f"{title}, by {engine} {limits}".rstrip(), f"{slug}-{engine}"
        if versions:
            label = "unknown" if version < 0 else f"{int(version)}"
            title, slug = f"{title}, measurement version {label}", f"{slug}-v{label}"
        frame = add_labels(rows.drop(columns=["_cluster", "_engine", "_version"]).reset_index(drop=True))
        if method == "rehearsed":
            frame = tell_collectives_apart(frame)
        meaning = METHOD_MEANING.get(method, "")
        stamp = METHOD_STAMPS.get(method, "")
        if limits:
            stamp = "; ".join(filter(None, (f"{engine} {limits}", stamp)))
        cohorts.append(Cohort(slug=_slug(slug), title=title, meaning=meaning, frame=frame, stamp=stamp))
    return sorted(cohorts, key=lambda c: (list(METHOD_NAMES).index(c.frame["method"].iloc[0]), -len(c.frame), c.slug))


def engine_limits(frame: pd.DataFrame) -> str:
    """What the engine of these rows ran without, as its versions say; empty if they name nothing, and ``partly`` if
    only some do."""
    limits = {limits_of(str(version)) for version in frame["engine_version"].dropna().unique()}
    named = listed(sorted(limits - {""}))
    return f"partly {named}" if named and "" in limits else named


def mixtures(frame: pd.DataFrame) -> list[str]:
    """One sentence for each column that should have one value in ``frame`` but has several."""
    sentences = []
    for column, name in _MIXABLE.items():
        counts = frame[column].dropna().value_counts()
        if len(counts) > 1:
            shown = [f"{_short(column, value)} ({count:,} rows)" for value, count in counts.items()]
            sentences.append(f"The rows mix {len(counts)} {name}: {listed(shown)}.")
    return sentences


def cautions(frame: pd.DataFrame) -> list[str]:
    """Warnings that apply to every time of these rows: rows that ran on a device other than their cluster's."""
    other_device = (
        frame["peak_flops_source"].where(frame["peak_flops"].isna()).astype("string").str.extract(_OTHER_DEVICE)
    )
    counts: dict[tuple[str, str, str], int] = {}
    for ran, cluster, meant in other_device.dropna().itertuples(index=False, name=None):
        counts[ran, cluster, meant] = counts.get((ran, cluster, meant), 0) + 1
    return [
        f"{plural(count, 'row')} ran on {ran} for cluster {cluster}, whose devices are {meant}: compute times are "
        f"{ran}'s under the network of {cluster}, and no MFU is given. Take the memory from here, not the times."
        for (ran, cluster, meant), count in counts.items()
    ]


def _short(column: str, value: object) -> str:
    text = format_setting(value)
    return text[:10] if column == "git_commit" else text


def _slug(text: str) -> str:
    """Part of a file's name. A text that is long, or has letters that a slug lacks, keeps its difference from others by
    a hash."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if text.isascii() and len(slug) <= _LONGEST_SLUG:
        return slug
    return f"{slug[:_LONGEST_SLUG]}-{hashlib.sha256(text.encode(errors='replace')).hexdigest()[:8]}".lstrip("-")
