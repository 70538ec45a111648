"""Finds and reads configuration files: in this package's own folder and in the user's (``--conf DIR``). No Hydra.

The options of a group (grid, model, cluster, device, launcher, measure) are files ``<folder>/<group>/<name>.yaml``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workloads.checks import suggest
from workloads.errors import InvalidSweep
from workloads.experiment import ModelSpec, model_from_dict

PACKAGED = Path(__file__).parent / "conf"
GROUPS = ("grid", "model", "cluster", "device", "launcher", "measure")
COMPOSED = ("grid", "cluster", "device", "launcher", "measure")
"""Groups whose files Hydra reads. A name of one must not mean anything else in Hydra's grammar."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class ConfFolders:
    own: tuple[Path, ...] = ()
    """The user's folders. The packaged folder is searched before them, as in Hydra."""

    def __post_init__(self) -> None:
        for folder in self.own:
            if not folder.is_dir():
                raise InvalidSweep(f"--conf {folder}: no such folder")
            if "${" in str(folder.resolve()) or not str(folder.resolve()).isprintable():
                raise InvalidSweep(f"--conf {folder}: its path has control characters or ${{, and Hydra refuses both")

    @property
    def all(self) -> tuple[Path, ...]:
        return (PACKAGED, *self.own)

    def names(self, group: str) -> list[str]:
        return sorted({path.name.removesuffix(".yaml") for root in self.all for path in (root / group).glob("*.yaml")})

    def find(self, group: str, name: str) -> Path:
        """The file of one option. Raises `InvalidSweep` with the closest name and all that exist."""
        for root in self.all:
            path = root / group / f"{name}.yaml"
            if name and "/" not in name and path.is_file():
                if group in COMPOSED and not _PLAIN.fullmatch(name):
                    raise InvalidSweep(f"{group} {name!r}: a name may hold letters, digits, _, -, + and .")
                return path
        raise InvalidSweep(f"no {group} called {name!r}{suggest(name, self.names(group))}")

    def read(self, group: str, name: str) -> dict[str, Any]:
        """The contents of one option's file alone: its ``defaults`` list, if it has one, is not followed."""
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
        from yaml import YAMLError

        path = self.find(group, name)
        try:
            data = OmegaConf.to_container(OmegaConf.load(path))
        except (OSError, YAMLError, OmegaConfBaseException) as error:
            raise InvalidSweep(f"{path}: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise InvalidSweep(f"{path} does not hold a mapping")
        return {str(key): value for key, value in data.items()}

    def model(self, name: str) -> ModelSpec:
        return model_from_dict({"name": name, **self.read("model", name)})
