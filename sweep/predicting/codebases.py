"""Reads the profiles of code bases and the clusters, which `predict` needs in addition to a table."""

from __future__ import annotations

from functools import lru_cache

from sweep.composing.conffiles import PACKAGED, ConfFolders
from sweep.composing.yaml_files import read_yaml
from workloads.predict.profiles import Profile
from workloads.spec.checks import build
from workloads.spec.cluster import ClusterSpec, check_cluster, cluster_from_dict

FOLDER = PACKAGED / "codebase"
GENERAL = "general"
"""Name of the profile used for unknown code bases."""
_LISTS = ("also", "slow_message_versions")


@lru_cache(maxsize=1)
def read_profiles() -> dict[str, Profile]:
    """Every shipped profile by the name of its file."""
    profiles = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        fields = {"name": path.stem, **read_yaml(path)}
        fields.update({name: tuple(str(one) for one in fields[name]) for name in _LISTS if name in fields})
        profiles[path.stem] = build(Profile, f"code base {path.stem}", fields)
    return profiles


@lru_cache(maxsize=8)
def read_clusters(folders: ConfFolders | None = None) -> dict[str, ClusterSpec]:
    """Every shipped cluster, with its device, by the name of its file, and those of the user's ``folders``.

    Raises `InvalidSweep` for a cluster of the user that cannot be built.
    """
    folders, clusters = folders or ConfFolders(), {}
    for name in folders.names("cluster"):
        fields: dict[str, object] = {}
        for file in folders.lineage("cluster", name):
            if file.group == "device":
                fields["device"] = file.fields
            else:
                fields.update(file.fields)
        clusters[name] = check_cluster(cluster_from_dict(fields))
    return clusters
