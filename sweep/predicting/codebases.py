"""Reads what `predict` needs to know beside a table: profiles of code bases, and the clusters of devices."""

from __future__ import annotations

from functools import lru_cache

from sweep.composing.conffiles import PACKAGED, ConfFolders
from sweep.composing.yaml_files import read_yaml
from workloads.predict.profiles import Profile
from workloads.spec.checks import build
from workloads.spec.cluster import ClusterSpec, cluster_from_dict

FOLDER = PACKAGED / "codebase"
GENERAL = "general"
"""The profile of code bases of which nothing is known."""
_LISTS = ("also", "slow_message_versions")


@lru_cache(maxsize=1)
def read_profiles() -> dict[str, Profile]:
    """Every shipped profile by its file's name."""
    found = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        fields = {"name": path.stem, **read_yaml(path)}
        fields.update({name: tuple(str(one) for one in fields[name]) for name in _LISTS if name in fields})
        found[path.stem] = build(Profile, f"code base {path.stem}", fields)
    return found


@lru_cache(maxsize=1)
def read_clusters() -> dict[str, ClusterSpec]:
    """Every shipped cluster by its file's name, with its device."""
    folders, found = ConfFolders(), {}
    for name in folders.names("cluster"):
        fields: dict[str, object] = {}
        for file in folders.lineage("cluster", name):
            if file.group == "device":
                fields["device"] = file.fields
            else:
                fields.update(file.fields)
        found[name] = cluster_from_dict(fields)
    return found
