"""Says which version of another engine is installed here, and whether it can run an experiment. No torch here.

The package is looked up, not imported, so that planning is fast and a version that cannot be imported gets a sentence.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from workloads.rules.installed_packages import installed_version as _version
from workloads.rules.installed_packages import other_version
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Release:
    """A release of an engine that an adapter drives."""

    version: str
    """`Experiment.engine_version`."""
    torch: tuple[int, int]
    """Oldest torch under which it can be imported."""
    file: str
    """File of the package that tells the release from a development version of the same number."""
    name: str
    """Text in that file."""
    extra: str
    """EXTRA in ``pip install 'ultrasweep[EXTRA]'``."""

    @property
    def number(self) -> str:
        return self.version.partition("+")[0]


RELEASES: Mapping[str, tuple[Release, ...]] = {
    "torchtitan": (
        Release("0.2.2+2", (2, 11), "components/loss.py", "def build_cross_entropy_loss", "torchtitan02"),
        Release("0.3.0+1", (2, 13), "components/loss.py", "class ChunkedLossWrapper", "torchtitan"),
    )
}
"""Releases by engine, the oldest first. The name of the engine is the name of its package."""


def version_here(engine: str) -> str | None:
    """The `engine_version` of the package that is installed here; None if there is none that an adapter drives."""
    number = _version(engine) if engine in RELEASES else None
    return next((release.version for release in RELEASES.get(engine, ()) if release.number == number), None)


def unusable_here(experiment: Experiment) -> str | None:
    """Why the installed package cannot run the experiment, what is installed and what works; None if it can, and if the
    package is not installed here."""
    engine = experiment.engine
    if engine not in RELEASES:
        return other_version(experiment)
    if (number := _version(engine)) is None:
        return None
    installed, torch = next((r for r in RELEASES[engine] if r.number == number), None), _version("torch") or "none"
    if installed is None:
        why = "no adapter drives this version"
    elif installed.version != experiment.engine_version:
        why = f"the experiment needs {experiment.engine_version.partition('+')[0]}"
    elif _major_minor(torch) < installed.torch:
        why = f"it needs torch {_dotted(installed.torch)} or newer"
    elif not _is_release(engine, installed):
        why = f"its {installed.file} has no {installed.name.split()[-1]}: it is not the release {number}"
    else:
        return None
    return f"{engine} {number} with torch {torch} is installed, and {why}; {works(engine)}"


def works(engine: str) -> str:
    """The releases that work, with the torch and the command of each."""
    ways = (
        f"{release.number} with torch {_dotted(release.torch)} or newer (pip install 'ultrasweep[{release.extra}]')"
        for release in RELEASES.get(engine, ())
    )
    return f"what works: {', '.join(ways) or 'its extra of ultrasweep'}"


def _is_release(engine: str, release: Release) -> bool:
    found = importlib.util.find_spec(engine)
    if found is None or found.origin is None:
        return False
    file = Path(found.origin).parent / release.file
    return file.is_file() and release.name in file.read_text()


def _major_minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
