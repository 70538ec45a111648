"""Reads the profiles of code bases and the clusters, which `predict` needs in addition to a table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from functools import lru_cache

from sweep.composing.conffiles import PACKAGED, ConfFolders
from sweep.composing.yaml_files import read_yaml
from workloads.predict.layouts import CODEBASE
from workloads.predict.profiles import ANY_ENGINE, Profile
from workloads.spec.checks import build
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import ENGINE
from workloads.spec.hardware.cluster_fields import check_cluster, cluster_from_dict

FOLDER = PACKAGED / "codebase"
GENERAL = "general"
"""Name of the profile used for unknown code bases."""
_LISTS = ("also", "slow_message_versions", "gather_keeping_versions", "fuses_experts")


@lru_cache(maxsize=1)
def read_profiles() -> dict[str, Profile]:
    """Every shipped profile by the name of its file."""
    profiles = {}
    for path in sorted(FOLDER.glob("*.yaml")):
        fields = {"name": path.stem, **read_yaml(path)}
        fields.update({name: tuple(str(one) for one in fields[name]) for name in _LISTS if name in fields})
        profiles[path.stem] = build(Profile, f"code base {path.stem}", fields)
    return profiles


def key_of_engine(engine: str, version: str) -> str:
    """Name under which the rows of one version of an engine are fitted: rows of different engines, or of different
    versions of one, are never pooled."""
    return CODEBASE if engine == ENGINE else f"{engine} {version}"


@lru_cache(maxsize=64)
def profile_of_engine(engine: str, version: str) -> Profile:
    """Profile of another engine. The rates of torch kernels are those fitted on rows of this project's engine; the
    file of the other engine overrides the values that differ."""
    profiles = read_profiles()
    matching = [one for one in profiles.values() if one.engine == engine and re.search(one.engine_version, version)]
    profile = max(matching, key=lambda one: len(one.engine_version), default=profiles[f"engine_{ANY_ENGINE}"])
    time = {**profiles[CODEBASE].time, **profile.time}
    return dataclasses.replace(profile, name=key_of_engine(engine, version), time=time)


def profiles_with(engines: Iterable[tuple[str, str]]) -> dict[str, Profile]:
    """Every shipped profile, and those of other engines: pairs of an engine and its version."""
    others = ((one, version) for one, version in engines if one != ENGINE)
    return {**read_profiles(), **{key_of_engine(*one): profile_of_engine(*one) for one in others}}


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
        with folders.named("cluster", name):
            clusters[name] = check_cluster(cluster_from_dict(fields, name))
    return clusters
