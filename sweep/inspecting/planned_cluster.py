"""The cluster of a point: that of its newest attempt, of the command that planned it, or of its grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from results.errors import UltrasweepError
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import cluster_for
from sweep.inspecting.lookup import Record
from workloads.spec.cluster import ClusterSpec


class FoundCluster(NamedTuple):
    """The cluster as its file describes it now, with the changes that the command of the point made to it."""

    cluster: ClusterSpec | None
    why_not: str | None
    """Why it is not known, in one line; None if it is."""


def find_cluster(record: Record, folders: ConfFolders) -> FoundCluster:
    """``folders``: the user's; without any, those that the command of the point names, where they still exist."""
    if not folders.own:
        folders = _named_folders(record.command)
    changes = [word for word in record.command if word.lstrip("+~").startswith("cluster.")]
    given = next((word.partition("=")[2] for word in reversed(record.command) if word.startswith("cluster=")), None)
    name = given or next((row["cluster"] for row in reversed(record.attempts) if row["cluster"]), None)
    grid = next((row["grid"] for row in record.ledger), "")
    if name is None and not grid:
        return FoundCluster(None, "no row of the point names a cluster")
    try:
        cluster = cluster_for(grid, name, folders, changes)
    except UltrasweepError as error:
        hint = "" if folders.own else "; --conf DIR gives a folder with your own cluster/ and grid/ files"
        return FoundCluster(None, f"{error}{hint}")
    return FoundCluster(cluster, None if cluster is not None else f"grid {grid} names no cluster")


def _named_folders(words: Sequence[str]) -> ConfFolders:
    """The folders of ``--conf DIR`` and ``--conf=DIR``; those that cannot be used now are left out."""
    named = [after for word, after in pairwise(words) if word == "--conf"]
    named += [word.partition("=")[2] for word in words if word.startswith("--conf=")]
    own: tuple[Path, ...] = ()
    for folder in named:
        try:
            own = ConfFolders((*own, Path(folder))).own
        except UltrasweepError:
            continue
    return ConfFolders(own)
