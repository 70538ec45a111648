"""The environment of Slurm's commands, without the variables by which a user changes their selection and output.

``SQUEUE_PARTITION`` hides jobs, ``SQUEUE_FORMAT`` changes columns, ``SCANCEL_STATE`` spares jobs, ``SBATCH_TIMELIMIT``
overrides a batch file. A submitter that does not see its jobs submits them twice, and a cancel reports success while
jobs keep running. So every call gets only the Slurm variables that are named here. The environment of ``srun`` is
different: it runs inside the job and needs the variables that Slurm has set there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

_PREFIXES = (
    *("SACCT_", "SALLOC_", "SBATCH_", "SCANCEL_", "SCONTROL_", "SINFO_", "SLURM_", "SLURMD_"),
    *("SPRIO_", "SQUEUE_", "SRUN_", "SSTAT_"),
)
CLUSTERS = "SLURM_CLUSTERS"
_TO_REACH_THE_CLUSTER = frozenset({CLUSTERS, "SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Location of the configuration, the chosen cluster, and the token of clusters that authenticate users by one."""
_WHO_PAYS: Mapping[str, str] = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_PARTITION": "partition",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_WCKEY": "wckey",
}
"""Variables that sites tell users to set once instead of naming them in every job. They reach sbatch where the
launcher's option is null, and change nothing else about a job."""


def command_environment(environment: Mapping[str, str], cluster: str | None = None) -> dict[str, str]:
    """``environment`` for ``squeue``, ``sacct``, ``scancel`` and ``scontrol``: without Slurm's variables except those
    needed to reach the cluster, and with messages in English.

    ``cluster``: the cluster to ask, whatever ``SLURM_CLUSTERS`` says; empty: Slurm's default cluster. None: as
    ``SLURM_CLUSTERS`` says.
    """
    kept = {name: value for name, value in environment.items() if not _is_dropped(name)}
    kept.pop("LANGUAGE", None)
    if cluster is not None:
        kept.pop(CLUSTERS, None)
        kept |= {CLUSTERS: cluster} if cluster else {}
    return {**kept, "LC_ALL": "C"}


def unset_for_sbatch(environment: Mapping[str, str], given: Collection[str]) -> list[str]:
    """Names of the variables that must not reach sbatch, nor the job, which inherits sbatch's environment.

    ``given``: the parameters that the batch file sets. The locale stays, because the job uses it too.
    """
    return sorted(
        name for name in environment if _is_dropped(name) and (name not in _WHO_PAYS or _WHO_PAYS[name] in given)
    )


def cluster_in(environment: Mapping[str, str]) -> str:
    """The cluster chosen by the user; empty for Slurm's default cluster."""
    return environment.get(CLUSTERS, "").strip()


def several_clusters(environment: Mapping[str, str]) -> str:
    """Error message when ``SLURM_CLUSTERS`` cannot be used; empty when it can. Job numbers of two clusters may be
    equal, so cancelling one would cancel the other."""
    value = cluster_in(environment)
    if value.lower() == "all" or "," in value:
        return f"SLURM_CLUSTERS={value} names several clusters; set it to one cluster"
    return ""


def _is_dropped(name: str) -> bool:
    return name.startswith(_PREFIXES) and name not in _TO_REACH_THE_CLUSTER
