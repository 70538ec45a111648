"""`Attempt`: one attempt at one point with its folder and task, and all that another pilot needs to take it over."""

from __future__ import annotations

import dataclasses
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launchers.settings import LaunchSettings
from launchers.state.queue import Claim
from launchers.state.sweep_dir import Point, SweepDir
from results.errors import UltrasweepError
from results.text.secrets import hide_in_environment
from workloads.contract import protocol
from workloads.contract.clock import SteadyClock
from workloads.contract.protocol import RankResult, Task
from workloads.contract.typed import typed
from workloads.spec.experiment_id import shortened_id

START = "attempt.json"
"""File of every folder of an attempt that has begun; it is written after the task."""
LONGEST_IN_ATTEMPT = 56
"""Maximum number of bytes of the experiment's id that an attempt's id repeats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at one point, as it was started. Immutable."""

    attempt_id: str
    number: int
    """1 for the first attempt at the point."""
    point: Point
    folder: Path
    task: Task
    started_at: float
    """Seconds since the epoch."""
    device_ids: tuple[str, ...] | None
    """UUIDs of the GPUs; None for CPU processes."""
    pilot_id: str
    """The pilot that started it."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes, in the order of the ranks."""
    devices_per_node: int = 1
    node_check: Mapping[str, float | None] | None = None
    """Measurements of its nodes when their pilot started, see `launchers.pilot.node_check`; None: not measured."""
    host: str | None = None
    """Name of the machine on whose clock ``started_at`` is; None in attempts of earlier versions."""
    clock: SteadyClock = field(default_factory=SteadyClock, compare=False)
    """Clock that gave ``started_at``; the process that started the attempt also takes its end from this clock."""

    def node_of(self, rank: int) -> str | None:
        """The node on which ``rank`` runs; None if unknown. A rehearsal runs on the first node."""
        index = rank // self.devices_per_node if self.task.method == "measured" else 0
        return self.nodes[index] if index < len(self.nodes) else None

    def ranks(self) -> range:
        """All ranks of the layout. A rehearsal runs only some of them."""
        return range(self.point.experiment.world_size)

    def results(self) -> dict[int, RankResult]:
        """Results of the ranks that have written one so far. A damaged file counts as missing. Raises `OSError` when a
        file cannot be read now."""
        results_by_rank = {}
        for rank in self.ranks():
            try:
                result = protocol.read_result(self.folder, rank)
            except (ValueError, TypeError, KeyError):
                continue
            if result is not None:
                results_by_rank[rank] = result
        return results_by_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """Content of ``attempt.json``; the fields are those of `Attempt`."""

    number: int
    started_at: float
    pilot_id: str
    device_ids: tuple[str, ...] | None
    nodes: tuple[str, ...]
    devices_per_node: int
    node_check: Mapping[str, float | None] | None = None
    host: str | None = None


def new_attempt_id(point: Point, number: int) -> str:
    """Returns a new unique id that names the experiment and the attempt. File names contain it next to the experiment's
    own id, so a long experiment id is shortened to its beginning and its hash."""
    return f"{attempt_prefix(point)}{number}.{secrets.token_hex(3)}"


def attempt_prefix(point: Point) -> str:
    """Common prefix of the ids of all attempts at this experiment; the attempt's number follows."""
    return f"{shortened_id(point.experiment.id, LONGEST_IN_ATTEMPT)}.a"


def start_attempt(
    claim: Claim,
    attempt_id: str,
    number: int,
    settings: LaunchSettings,
    *,
    host: str,
    port: int,
    device_ids: tuple[str, ...] | None,
    nodes: tuple[str, ...],
    node_check: Mapping[str, float | None] | None = None,
) -> Attempt:
    """Write the folder of a new attempt.

    ``attempt_id``: from `new_attempt_id`; repeat a failed call with the same id, so that no second folder is left
    behind. ``host`` and ``port``: address of the rendezvous. Raises `OSError`.
    """
    point = claim.point
    folder = claim.sweep.attempts / attempt_id
    measure = settings.measure
    if point.slow_step_s is not None:
        measure = dataclasses.replace(measure, slow_step_s=point.slow_step_s)
    task = Task(
        attempt_id=attempt_id,
        experiment=point.experiment,
        measure=measure,
        cluster=dataclasses.replace(
            settings.cluster, environment=hide_in_environment(settings.cluster.environment)
        ),  # the ranks get their variables from the agent
        method=point.method,
        device=settings.device,
        devices_per_node=settings.num_devices,
        rendezvous_host=host,
        rendezvous_port=port,
        collective_timeout_s=settings.collective_timeout_s,
        probe=settings.probe,
    )
    protocol.write_task(folder, task)
    clock = SteadyClock()
    started_at, here = clock(), socket.gethostname()
    start = _Start(
        number=number,
        started_at=started_at,
        pilot_id=claim.pilot_id,
        device_ids=device_ids,
        nodes=nodes,
        devices_per_node=settings.num_devices,
        node_check=node_check,
        host=here,
    )
    protocol.write_json(folder / START, start)
    return Attempt(
        attempt_id=attempt_id,
        number=number,
        point=point,
        folder=folder,
        task=task,
        started_at=started_at,
        device_ids=device_ids,
        pilot_id=claim.pilot_id,
        nodes=nodes,
        devices_per_node=settings.num_devices,
        node_check=node_check,
        host=here,
        clock=clock,
    )


def reopen_attempt(sweep: SweepDir, point: Point, attempt_id: str) -> Attempt | None:
    """Loads an attempt that another pilot started; None when its folder is incomplete. Raises `OSError` when a file
    cannot be read now."""
    folder = sweep.attempts / attempt_id
    try:
        start = typed(_Start, protocol.read_attempt_json(folder / START), ignore_unknown=True)
        if start.number < 1 or start.devices_per_node < 1:
            return None
        task = protocol.read_task(folder)
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, UltrasweepError):
        return None
    return Attempt(
        attempt_id=attempt_id,
        number=start.number,
        point=point,
        folder=folder,
        task=task,
        started_at=start.started_at,
        device_ids=start.device_ids,
        pilot_id=start.pilot_id,
        nodes=start.nodes,
        devices_per_node=start.devices_per_node,
        node_check=start.node_check,
        host=start.host,
    )
