"""The user's options for the Slurm jobs that run pilots, checked before any file is written.

Every value is written into a batch file, where a line break would start a new command. So control characters are
refused everywhere, and a value of a known form (partition, account, node list ...) may only contain the characters of
that form. Setup lines and ``srun_args`` are the user's own shell code and options.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from results.text.secrets import hide_in_text, holds_secret
from workloads.spec.checks import build, choice, flag, mapping, matching, number, sequence, text, whole_number
from workloads.spec.errors import InvalidSweep
from workloads.spec.mistakes import Mistakes

GpuRequest = Literal["gpus_per_node", "gres", "none"]

WALL_TIME_MARGIN_S = 30
"""Seconds by which Slurm's warning may come early or late: Slurm checks time limits every 30 s."""
_LEAST_USABLE_S = 60

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:+-]*")
_TYPE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_LIST = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@:+,-]*")
_NODES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,\[\]-]*")
_FEATURES = re.compile(r"[A-Za-z0-9\[(][A-Za-z0-9_.*&|,:()\[\]-]*")
_MEMORY = re.compile(r"[0-9]+[KMGT]?")
_SHAPES: Mapping[str, tuple[re.Pattern[str], str]] = {
    "partition": (_LIST, "a partition's name, or several with commas between"),
    "account": (_WORD, "an account's name"),
    "qos": (_WORD, "a QOS's name"),
    "reservation": (_LIST, "a reservation's name"),
    "constraint": (_FEATURES, "features of nodes, such as h100&ib"),
    "exclude": (_NODES, "a list of nodes, such as node[01-04,17]"),
    "nodelist": (_NODES, "a list of nodes, such as node[01-04,17]"),
    "gpu_type": (_TYPE, "the type of a GPU as Slurm knows it, such as h100"),
    "mem": (_MEMORY, "memory of a node, such as 500G, or 0 for all of it"),
}
_LEAST: Mapping[str, int | None] = {
    "time_min": 1,
    "cpus_per_task": 1,
    "max_nodes": 1,
    "max_pilots": 1,
    "signal_delay_s": 0,
    "nice": None,
}
"""Minimum of every whole number; None: any."""
_PARAMETER = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_OURS = frozenset(
    {
        "array",
        "chdir",
        "cluster-constraint",
        "clusters",
        "comment",
        "error",
        "gpus-per-node",
        "gres",
        "job-name",
        "nodes",
        "no-requeue",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
        "requeue",
        "signal",
        "test-only",
        "time",
        "wait",
        "wrap",
    }
)
"""Parameters of sbatch that only the launcher may set."""
_WAYS = "gpus_per_node, gres or none (how GPUs are requested)"
_NUMBER_OF_GPUS = "the number of GPUs of a node is cluster.devices_per_node=N"
_ALTERNATIVES: Mapping[str, str] = {
    "array": "use launcher.max_pilots for the most pilots at a time",
    "chdir": "pilots run in the copy of the code; results_dir=DIR moves the sweep's folder",
    "clusters": "set the variable SLURM_CLUSTERS when the sweep is first run",
    "cluster-constraint": "set the variable SLURM_CLUSTERS when the sweep is first run",
    "comment": "it names the submission, which finds the job again",
    "error": "logs are in the folder slurm/ of the sweep",
    "output": "logs are in the folder slurm/ of the sweep",
    "gpus": f"{_NUMBER_OF_GPUS}, and launcher.gpus is {_WAYS}",
    "gpus-per-node": f"{_NUMBER_OF_GPUS}, and launcher.gpus is {_WAYS}",
    "gres": f"{_NUMBER_OF_GPUS}, and launcher.gpus=gres requests them so",
    "job-name": "it ends with the submission's name; name=NAME changes its beginning",
    "nodes": "they follow from each point's world size; launcher.max_nodes=N limits them",
    "ntasks": "a node has one task, which starts one process for each device",
    "ntasks-per-node": "a node has one task, which starts one process for each device",
    "no-requeue": "use launcher.requeue=false",
    "parsable": "it cannot be changed",
    "open-mode": "it cannot be changed",
    "signal": "use launcher.signal_delay_s",
    "test-only": "use launcher.dry=true",
    "time": "use launcher.time_min",
    "time-min": "pilots count on their whole time limit, launcher.time_min",
    "wait": "`run` waits for the points unless --detach is given",
    "wrap": "launcher.setup and launcher.prefix run further commands",
}
"""What to do instead of giving a parameter of `_OURS`, where no option has the same name."""
_EXCLUDED: Mapping[str, tuple[str, Any]] = {
    "mem-per-cpu": ("mem", None),
    "mem-per-gpu": ("mem", None),
    "cpus-per-gpu": ("cpus_per_task", None),
    "oversubscribe": ("exclusive", False),
}
"""Parameters that Slurm refuses together with one of our options: the option, and the value of it that Slurm
accepts."""
_IN_A_CONTAINER = (
    "store credentials of a registry where the container's runtime reads them (enroot: ~/.config/enroot/.credentials, "
    "apptainer: `apptainer registry login`)"
)
_REMEDIES: Mapping[str, str] = {
    "setup": "let a line of launcher.setup read a file that only you can read, such as 'source ~/.secrets', or set a "
    "variable of the ranks with +launcher.environment.NAME=VALUE",
    "srun_args": _IN_A_CONTAINER,
    "prefix": _IN_A_CONTAINER,
}
"""What works instead of a secret in an option."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """How pilots are submitted. None leaves the choice to the cluster."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    """Nodes never to use, in addition to those that the sweep itself excludes."""
    nodelist: str | None = None
    nice: int | None = None
    time_min: int = 120
    """Time limit of a pilot in minutes."""
    signal_delay_s: int = 120
    """Seconds before its time limit at which a pilot is warned (SIGUSR2), so that it can release its points."""
    requeue: bool = True
    """Whether Slurm may restart a pilot after a preemption or the loss of a node."""
    gpus: GpuRequest = "gpus_per_node"
    """How to request GPUs; a CPU cluster requests none. ``none``: nodes come with all of their GPUs."""
    gpu_type: str | None = None
    exclusive: bool = True
    """Whether to use whole nodes, because other jobs on a node would disturb the measurement."""
    cpus_per_task: int | None = None
    """Cores of a node for the pilot; None: all of them, which needs ``exclusive``."""
    mem: str | None = "0"
    """Memory per node; ``0`` is all of it, None omits the option (some sites refuse it)."""
    max_nodes: int | None = None
    """Nodes that the pilots of one shape may hold at the same time; None: as many as needed to finish within
    ``target_h``. Without ``target_h`` and ``max_pilots``: at most `launchers.slurm.demand.DEFAULT_NODES`."""
    max_pilots: int | None = None
    """Pilots of one shape at the same time; None: no limit other than that of nodes."""
    target_h: float | None = None
    """Hours from the pilots' start until all points should be done. None: one time limit, the fewest pilots that
    suffice without a second submission."""
    python: str | None = None
    """Interpreter on the nodes (in a container: inside it); None: the one that runs the submission."""
    prefix: tuple[str, ...] = ()
    """Words before the pilot's command, such as ``apptainer exec --nv image.sif``."""
    srun_args: tuple[str, ...] = ()
    """More options of srun, such as ``--container-image=...`` of pyxis."""
    setup: tuple[str, ...] = ()
    """Shell lines that the job runs first, such as ``module load cuda``."""
    sbatch: Mapping[str, str | int | bool] = field(default_factory=dict)
    """Further parameters of sbatch by their long names; true for a parameter without a value, false omits it."""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name, (shape, what) in _SHAPES.items():
            with mistakes.collected():
                if (value := getattr(self, name)) is not None:
                    matching(f"launcher: {name}", value, shape, what)
        for name, least in _LEAST.items():
            with mistakes.collected():
                if (value := getattr(self, name)) is not None:
                    whole_number(f"launcher: {name}", value, least)
        with mistakes.collected():
            if self.target_h is not None:
                number("launcher: target_h", self.target_h, above=0, unit="hours")
        for name in ("requeue", "exclusive"):
            with mistakes.collected():
                flag(f"launcher: {name}", getattr(self, name))
        with mistakes.collected():
            if isinstance(self.gpus, int) or str(self.gpus).isdigit():
                raise InvalidSweep(f"launcher: gpus={self.gpus} must be {_WAYS}, not a number; {_NUMBER_OF_GPUS}")
            choice("launcher: gpus", self.gpus, get_args(GpuRequest))
        with mistakes.collected():
            self._check_lines()
        mistakes.refuse()
        if self.gpus == "none" and self.gpu_type is not None:
            raise InvalidSweep(
                f"launcher: gpu_type={self.gpu_type} has no effect with gpus=none, which requests no GPUs; choose "
                "nodes with constraint or partition, or give gpus=gres"
            )
        if self.usable_s < _LEAST_USABLE_S:
            raise InvalidSweep(
                f"launcher: time_min={self.time_min} less signal_delay_s={self.signal_delay_s} and "
                f"{WALL_TIME_MARGIN_S} s leaves a pilot {self.usable_s} s; at least {_LEAST_USABLE_S} are needed"
            )
        if not self.exclusive and self.cpus_per_task is None:
            raise InvalidSweep(
                "launcher: exclusive=false needs cpus_per_task=N; without it Slurm gives a pilot one core of a node"
            )

    @property
    def usable_s(self) -> int:
        """Seconds of its time limit that a pilot may use: points must have ended before the warning."""
        return self.time_min * 60 - self.reserve_s

    @property
    def reserve_s(self) -> int:
        """Seconds before the end of its time limit by which a pilot's points must have ended."""
        return self.signal_delay_s + WALL_TIME_MARGIN_S

    def _check_lines(self) -> None:
        for name in ("setup", "prefix", "srun_args"):
            for line in getattr(self, name):
                _one_line(name, line)
        if self.python is not None:
            _one_line("python", self.python)
        for line in self.setup:
            if line.lstrip().startswith("#SBATCH"):
                raise InvalidSweep(f"launcher: setup line {line!r} is a parameter of sbatch; use launcher.sbatch")
        self._check_sbatch()

    def _check_sbatch(self) -> None:
        """Refuse parameters that the launcher sets, and parameters that Slurm refuses together with one of these."""
        for key, given in self.sbatch.items():
            if not (isinstance(key, str) and _PARAMETER.fullmatch(key)):
                raise InvalidSweep(f"launcher: sbatch has {key!r}, which is not a long parameter of sbatch")
            dashed = key.replace("_", "-")
            if dashed in _OURS or (dashed.replace("-", "_") in _NAMES and dashed != "setup"):
                raise InvalidSweep(f"launcher: sbatch.{key} is set by the launcher itself; {_alternative(dashed)}")
            option, remedy = _EXCLUDED.get(dashed, ("", None))
            if given is not False and option and getattr(self, option) != remedy:
                raise InvalidSweep(
                    f"launcher: sbatch.{key}={given} and launcher.{option}={as_typed(getattr(self, option))} exclude "
                    f"each other in Slurm; add launcher.{option}={as_typed(remedy)}"
                )
            if not isinstance(given, int):
                _one_line(f"sbatch.{key}", given)
                if dashed == "dependency" and re.search(r"\bsingleton\b", str(given)):
                    raise InvalidSweep(
                        "launcher: sbatch.dependency=singleton holds back no pilot: the jobs of a sweep have different "
                        "names, and the elements of an array run at once; launcher.max_pilots=1 runs one at a time"
                    )
        self._refuse_secrets()

    def _refuse_secrets(self) -> None:
        """Refuse values of secrets: everyone may read the batch file, and Slurm keeps it."""
        lines = [("setup", line) for line in self.setup]
        lines += [(name, " ".join(getattr(self, name))) for name in ("prefix", "srun_args")]
        lines += [(f"sbatch.{key}", f"--{key}={value}") for key, value in self.sbatch.items()]
        for name, line in lines:
            if holds_secret(line):
                raise InvalidSweep(
                    f"launcher: {name} {hide_in_text(line)!r} holds a secret, and others can read the batch file; "
                    f"{_REMEDIES.get(name, _REMEDIES['setup'])}"
                )


def options_from_dict(fields: Mapping[str, Any]) -> SlurmOptions:
    """Options from plain data (YAML). Raises `InvalidSweep` with one line about the error."""
    values = {str(key): value for key, value in fields.items()}
    for name in ("setup", "prefix", "srun_args"):
        if (given := values.pop(name, None)) is not None:
            values[name] = tuple(sequence(f"launcher: {name}", given))
    if (given := values.pop("sbatch", None)) is not None:
        values["sbatch"] = mapping("launcher: sbatch", given)
    for name in _SHAPES:  # YAML reads mem=0 and exclude=17 as numbers
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            values[name] = str(value)
    return build(SlurmOptions, "launcher", values)


def check_path(path: Path) -> None:
    """Raises `InvalidSweep` for a path that cannot be written into a batch file: Slurm replaces ``%`` and ``\\`` in
    the names of log files, and a line break would begin a new line of the file. Spaces and quotes are fine."""
    name = str(path)
    if _CONTROL.search(name) or "%" in name or "\\" in name:
        raise InvalidSweep(
            f"{name!r} cannot be the folder of a sweep on Slurm: line breaks, other control characters, % and \\ have "
            "a meaning in batch files; choose another results_dir or name"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidSweep(f"{name!r} cannot be the folder of a sweep on Slurm: it is not UTF-8") from None


def _one_line(name: str, value: object) -> None:
    if _CONTROL.search(text(f"launcher: {name}", value)):
        raise InvalidSweep(f"launcher: {name}={value!r} holds a line break or another control character")


def in_our_words(parameter: str, value: str) -> str:
    """How a parameter of sbatch is given to this program; empty for a parameter that is neither set nor named here."""
    name = parameter.replace("-", "_")
    if parameter in _ALTERNATIVES:
        return _ALTERNATIVES[parameter]
    return f"write launcher.{name}={value}" if name in _NAMES else ""


def _alternative(parameter: str) -> str:
    return _ALTERNATIVES.get(parameter) or f"use launcher.{parameter.replace('-', '_')}"


def as_typed(value: object) -> str:
    """A value as a user types it on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_NAMES = frozenset(f.name for f in dataclasses.fields(SlurmOptions))
