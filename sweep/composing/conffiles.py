"""Finds and reads configuration files in this package's folder and in the user's (``--conf DIR``), without Hydra.

The options of a group (grid, model, cluster, device, launcher, measure) are files ``<folder>/<group>/<name>.yaml``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.errors import UltrasweepError
from sweep.composing.yaml_files import read_yaml
from workloads.spec.checks import suggest
from workloads.spec.errors import InvalidSweep
from workloads.spec.mistakes import Mistakes
from workloads.spec.model_spec import ModelSpec, model_from_dict, model_to_dict

PACKAGED = Path(__file__).parents[1] / "conf"
GROUPS = ("grid", "model", "cluster", "device", "launcher", "measure")
COMPOSED = ("grid", "cluster", "device", "launcher", "measure")
"""Groups whose files Hydra reads. A name in such a group must not have another meaning in Hydra's grammar."""
_BEGINNINGS = {
    "grid": "axes: {model: llama8b, global_batch_size: 512}",
    "model": "num_layers: 32",
    "cluster": "defaults: [h200, _self_]",
    "device": "name: ours",
    "launcher": "defaults: [slurm, _self_]",
}
"""How files of the groups may begin whose files must say something."""
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """One of the files that an option is built from."""

    group: str
    path: Path
    fields: dict[str, Any]
    """Contents without the ``defaults`` list."""


@dataclass(frozen=True, slots=True)
class ConfFolders:
    own: tuple[Path, ...] = ()
    """The user's folders. The packaged folder is searched before them, as in Hydra."""

    def __post_init__(self) -> None:
        for folder in self.own:
            if not folder.is_dir():
                raise InvalidSweep(f"--conf {folder}: no such folder")
            if "${" in str(folder.resolve()) or not str(folder.resolve()).isprintable():
                raise InvalidSweep(
                    f"--conf {folder}: its path has control characters or ${{, which Hydra does not accept"
                )
            self._refuse_shipped_names(folder)

    def _refuse_shipped_names(self, folder: Path) -> None:
        """Refuse a user file with the name of a shipped one: Hydra would read the shipped file. An equal copy is
        allowed."""
        for group in GROUPS:
            for path in sorted((folder / group).glob("*.yaml")):
                shipped = PACKAGED / group / path.name
                if shipped.is_file() and path.is_file() and path.read_bytes() != shipped.read_bytes():
                    raise InvalidSweep(
                        f"{path} has the name of a {group} that ships with the program, which would be read instead; "
                        "give your file another name"
                    )

    @property
    def all(self) -> tuple[Path, ...]:
        return (PACKAGED, *self.own)

    def names(self, group: str) -> list[str]:
        files = (path for root in self.all for path in (root / group).glob("*.yaml") if path.is_file())
        return sorted({path.name.removesuffix(".yaml") for path in files})

    def find(self, group: str, name: str, named_in: Path | None = None) -> Path:
        """Path of the file of one option. ``named_in``: the file that builds on it, for the message.

        Raises `InvalidSweep` with the closest name and all existing names.
        """
        if group == "model" and (published := _published(name)) is not None:
            return published
        candidates = [root / group / f"{name}.yaml" for root in self.all] if name and "/" not in name else []
        existing = [path for path in candidates if path.is_file()]
        if not existing:
            by = f"{named_in}: " if named_in is not None else ""
            raise InvalidSweep(f"{by}no {group} called {name!r}{suggest(name, self.names(group))}")
        if group in COMPOSED and not _PLAIN.fullmatch(name):
            raise InvalidSweep(f"{group} {name!r}: a name may hold letters, digits, _, -, + and .")
        return existing[0]

    @contextmanager
    def named(self, group: str, name: str) -> Iterator[None]:
        """Names the user's files of an option in the errors about it that do not."""
        try:
            yield
        except UltrasweepError as error:
            paths = {file.path for file in self.lineage(group, name)} if group in COMPOSED else {self.find(group, name)}
            own = sorted(str(path) for path in paths if not path.is_relative_to(PACKAGED))
            if not own:
                raise
            of_files = f" ({', '.join(own)})"
            messages = (text if any(path in text for path in own) else text + of_files for text in error.messages)
            raise type(error)(*messages) from None

    def read(self, group: str, name: str) -> dict[str, Any]:
        """The contents of one option's file; its ``defaults`` list, if any, is not followed. A model may be a published
        config.json, whose contents are then those of the file of the same model here, with its modules of multi-token
        prediction."""
        if group == "model" and (published := _published(name)) is not None:
            from workloads.spec.config_json.expressible import model_spec
            from workloads.spec.config_json.read import read_config

            return model_to_dict(model_spec(read_config(published), ahead=True))
        return _filled(group, self.find(group, name))

    def lineage(self, group: str, name: str) -> list[BuiltFile]:
        """The files that an option is built from, in the order in which Hydra merges them: a later one wins.

        These are the option's own file, the files in its ``defaults`` list, and theirs. Raises `InvalidSweep` for a
        file that does not exist or cannot be read, and for an option that is built on itself.
        """
        return list(self._walk(group, name, ()))

    def refuse_mistakes(self, options: Iterable[tuple[str, str]]) -> None:
        """Read the user's files that the options (group and name) are built from, because Hydra reports mistakes in
        them without file and line. Raises `InvalidSweep` with those of all files."""
        mistakes = Mistakes()
        for group, name in options:
            with mistakes.collected():
                if not self.find(group, name).is_relative_to(PACKAGED):
                    self.lineage(group, name)
        mistakes.refuse()

    def _walk(self, group: str, name: str, above: tuple[Path, ...]) -> Iterator[BuiltFile]:
        """Yields the files of an option. ``above``: the files that led here, each named in the ``defaults`` list of the
        previous."""
        path = self.find(group, name, above[-1] if above else None)
        if path in above:
            raise InvalidSweep(f"{path} is built on itself: its defaults list leads back to it")
        fields = _filled(group, path)
        entries = fields.pop("defaults", None) or []
        if not isinstance(entries, list):
            raise InvalidSweep(f"{path}: defaults must be a list, such as [NAME, _self_]")
        this_file = BuiltFile(group, path, fields)
        for entry in entries:
            if entry == "_self_":
                yield this_file
            else:
                for other_group, option in _named(group, entry):
                    yield from self._walk(other_group, option, (*above, path))
        if "_self_" not in entries:
            yield this_file

    def model(self, name: str) -> ModelSpec:
        with self.named("model", name):
            return model_from_dict({"name": name, **self.read("model", name)})


def _filled(group: str, path: Path) -> dict[str, Any]:
    """The contents of a file. Raises `InvalidSweep` if it has none, where an option needs some."""
    fields = read_yaml(path)
    if not fields and group in _BEGINNINGS:
        raise InvalidSweep(f"{path} is empty; a {group} begins for example with {_BEGINNINGS[group]}")
    return fields


def _published(name: str) -> Path | None:
    """The config.json that a user means with the "name" of a model, if it is a path, whether or not it exists. Its
    readers are imported only then."""
    if "/" not in name and not name.endswith(".json"):
        return None
    from workloads.spec.config_json.read import config_path

    return config_path(Path(name))


def _named(group: str, entry: Any) -> Iterator[tuple[str, str]]:
    """Group and name of each option in one entry of a ``defaults`` list of a file of ``group``."""
    if isinstance(entry, str):
        first, slash, rest = entry.lstrip("/").partition("/")
        yield (first, rest) if slash else (group, first)
    elif isinstance(entry, dict):
        for key, option in entry.items():  # e.g. {override /device@device: h200}
            other = str(key).split()[-1].partition("@")[0].strip("/")
            if other in GROUPS and isinstance(option, str):
                yield other, option
