"""Says whether the packages of an engine are installed here in the versions that its rows name. No torch here.

Packages are looked up, not imported: planning stays fast, and a version that cannot be imported gets a sentence.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from functools import cache

from workloads.spec.errors import UnsupportedByEngine
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import Recurrence
from workloads.spec.model_spec import ModelSpec
from workloads.spec.recurrent_kernels import LARGEST_KEY, PACKAGE, RELEASE, has_recurrences, key_sizes

PACKAGES = {"transformers": "transformers", "megatron": "megatron-core"}
"""Package of each engine whose version names all its packages: ``5.24.0+1 with accelerate 1.15.0``."""


def require_torch(what: str) -> None:
    """Raises `UnsupportedByEngine` if torch is not installed here. ``what``: begins the sentence that says what needs
    it.

    Planning needs no torch, so that it is not a dependency but an extra.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedByEngine(f"{what} needs torch, which is not installed here: pip install 'ultrasweep[engine]'")


def packages_of(experiment: Experiment) -> dict[str, str]:
    """Versions by package that the experiment's engine consists of; empty for engines that are not listed here."""
    if experiment.engine not in PACKAGES:
        return {}
    own, _, other = experiment.engine_version.partition(" with ")
    packages = {PACKAGES[experiment.engine]: own.partition("+")[0].partition(" ")[0]}
    if other:
        name, _, version = other.rpartition(" ")
        packages[name.lower().replace(" ", "_")] = version
    return packages


def other_version(experiment: Experiment) -> str | None:
    """The packages that are installed here in another version than the experiment needs, in a sentence.

    None if there are none. A package that is missing is none of them: a plan may be made on another machine.
    """
    others = [
        f"{name} {installed} is installed, but the experiment needs {wanted}"
        for name, wanted in packages_of(experiment).items()
        if (installed := installed_version(name)) not in (None, wanted)
    ]
    return f"{'; '.join(others)}: {_install(experiment)}" if others else None


def missing(experiment: Experiment) -> str | None:
    """The packages of the experiment's engine that are not installed here, in a sentence; None if all are."""
    lacking = [name for name in packages_of(experiment) if installed_version(name) is None]
    if not lacking:
        return None
    return f"engine={experiment.engine} needs {' and '.join(lacking)}, not installed here: {_install(experiment)}"


def recurrence_here(model: ModelSpec, precision: str, backend: str | None) -> Recurrence:
    """What computes recurrent layers where nothing was chosen: the kernels of flash-linear-attention if their release
    is installed here and they take the model and the precision (the rule ``recurrence``), else torch. It is a field of
    the experiment, so that a node without them refuses the point."""
    takes = backend == "cuda" and precision not in ("fp32", "fp64") and max(key_sizes(model), default=0) <= LARGEST_KEY
    return "fla" if takes and has_recurrences(model) and installed_version(PACKAGE) == RELEASE else "torch"


def _install(experiment: Experiment) -> str:
    return f"pip install 'ultrasweep[{experiment.engine}]'"


@cache
def installed_version(package: str) -> str | None:
    """Version of a package that is installed here; None if it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
