"""Options given by submitit's names (``slurm_partition``, ``timeout_min``), as options of this launcher.

Whether a name is a parameter, the installed submitit says. One without an option of ours goes to sbatch as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import submitit

from launchers.slurm.options import SlurmOptions, as_typed, in_our_words
from results.text.secrets import hide_in_text
from workloads.spec.checks import did_you_mean
from workloads.spec.errors import InvalidSweep
from workloads.spec.other_names import OF_SUBMITIT, inside

_RENAMED: Mapping[str, str] = {
    "time": "time_min",
    "timeout_min": "time_min",
    "mem_gb": "mem",
    "array_parallelism": "max_pilots",
    "additional_parameters": "sbatch",
}
_REFUSED: Mapping[str, str] = {
    **{name: name for name in ("comment", "gpus_per_node", "gres", "nodes", "ntasks_per_node")},
    "gpus_per_task": "gpus_per_node",
    "name": "job_name",
    "job_name": "job_name",
    "num_gpus": "gpus_per_node",
    "stderr_to_stdout": "error",
    "tasks_per_node": "ntasks_per_node",
    "use_srun": "ntasks_per_node",
}
"""Parameters of submitit that only the launcher may set, by the parameter of sbatch whose remedy holds for them."""
_NEEDLESS: Mapping[str, str] = {
    "max_num_timeout": "a pilot is requeued whenever its job ends while points are left",
    "teardown": "nothing runs after a pilot's points",
}
_OURS = {field.name for field in dataclasses.fields(SlurmOptions)}


class _Parameters(submitit.SlurmExecutor):  # type: ignore[misc]
    """submitit's parameters, on machines without Slurm too."""

    @classmethod
    def affinity(cls) -> int:
        return 1


def in_our_options(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the launcher, in which those with submitit's names have become ours; null is no value, as in
    submitit. ``defaults``: values of our options that the user has not chosen.

    Raises `InvalidSweep` with one line for each name without a meaning here, and for a value that contradicts another.
    """
    ours = {name: value for name, value in given.items() if not name.startswith(OF_SUBMITIT)}
    mistakes: list[str] = []
    for name, value in given.items():
        if name in ours or value is None:
            continue
        plain, shown = name.removeprefix("slurm_"), hide_in_text(as_typed(value))
        if refusal := _refusal(plain, value):
            mistakes.append(f"launcher.{name}={shown}: {refusal}")
            continue
        option, value = _translated(plain, value)
        before = ours.get(option)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            contradicts = any(before.get(key, new) != new for key, new in value.items())
            value = {**before, **value}
        else:
            contradicts = before not in (None, value, defaults.get(option))
        if contradicts:
            mistakes.append(
                f"launcher.{option}={hide_in_text(str(before))} and launcher.{name}={shown} differ; give one of them"
            )
        ours[option] = value
    if mistakes:
        raise InvalidSweep(*mistakes)
    return ours


def _refusal(plain: str, value: object) -> str:
    if plain in _NEEDLESS:
        return f"{_NEEDLESS[plain]}; leave it out"
    if plain in _REFUSED:
        return in_our_words(_REFUSED[plain].replace("_", "-"), str(value))
    if plain in _RENAMED or plain in _OURS or _is_parameter(plain):
        return ""
    if place := inside(plain, ["sbatch"]):
        return f"write {place}={value}"
    return (
        f"submitit {submitit.__version__} has no parameter {plain!r}{did_you_mean(plain, {*_OURS, *_RENAMED})}; other "
        "parameters of sbatch are launcher.sbatch.NAME=VALUE"
    )


def _is_parameter(name: str) -> bool:
    executor = _Parameters(folder=".")
    try:
        executor.update_parameters(**{name: None})
    except ValueError:
        return False
    return name in executor.parameters


def _translated(plain: str, value: Any) -> tuple[str, Any]:
    if plain == "mem_gb" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return "mem", f"{value:.0f}G" if float(value).is_integer() else f"{value * 1024:.0f}M"
    if plain == "mem" and isinstance(value, str):
        return "mem", value.upper().removesuffix("B")
    if (option := _RENAMED.get(plain, plain)) in _OURS:
        return option, value
    return "sbatch", {plain: value}
