"""`PilotRun`: one start of a pilot's job, with the real `Pilot` and `NodePool` and simulated agents and ranks."""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from launchers.node.connection import SILENCE_LIMIT_S
from launchers.node.remote import Node
from launchers.pilot.allocation import Allocation
from launchers.pilot.node_pool import NodePool
from launchers.pilot.pilot import Pilot
from launchers.slurm.client import TimeLeft
from launchers.slurm.pilot_job import SlurmJob as Batch
from launchers.state import pilot_state
from launchers.state.pilot_config import read_pilot_config
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from tests.launchers.virtual_time import Process, VirtualEvent, World
from tests.slurm.storm.cluster import Machine, SlurmJob
from workloads.contract import protocol
from workloads.contract.protocol import RankError, RankResult, StepRecord, Task

BEAT_S = 5.0


@dataclass(eq=False)
class Journal:
    """What really happened, whatever the sweep's files say."""

    begun: dict[str, str] = field(default_factory=dict)
    """Point of every attempt whose ranks were started, by attempt."""
    measured: dict[str, str] = field(default_factory=dict)
    """The same for attempts whose ranks have all written their results."""
    measured_at: dict[str, float] = field(default_factory=dict)
    """Virtual time of that, by attempt."""
    errors: list[str] = field(default_factory=list)
    """Tracebacks of pilots and submitters: faults of the product."""
    ended: dict[str, str] = field(default_factory=dict)
    """Commands that have ended with an error for the user, which types them again."""
    logs: list[str] = field(default_factory=list)
    """What pilots and commands have printed."""

    def lines(self) -> list[str]:
        """All of it, for people."""
        return [*self.logs, *(f"{name} ended: {why}" for name, why in self.ended.items()), *self.errors]


@dataclass(frozen=True, slots=True)
class Place:
    """What every process of a storm shares."""

    world: World
    sweep: Path
    durations: dict[str, float]
    """Seconds that a point runs, by experiment."""
    journal: Journal
    has_scontrol: bool


@dataclass(eq=False)
class Ranks:
    """The ranks of one attempt."""

    folder: Path
    task: Task
    agents: dict[int, Agent] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    stuck: bool = False

    @property
    def complete(self) -> bool:
        return len(self.agents) == self.task.experiment.world_size

    @property
    def able(self) -> bool:
        """Whether all of them live and make progress."""
        return self.complete and not self.gone and not self.stuck


class Agent:
    """Replaces the connection to an agent: answers at once, and runs ranks that are only callbacks."""

    def __init__(self, run: PilotRun, machine: Machine) -> None:
        self.run, self.machine = run, machine
        self.node = Node(machine.name, machine.name, None, self)  # type: ignore[arg-type]
        self.dead = False

    def send(self, message: Mapping[str, Any]) -> None:
        """A message of the pilot."""
        if self.dead:
            raise BrokenPipeError("the agent is gone")
        if "do" in message:
            answer = getattr(self, f"_{message['do']}")(message)
            self.node.handle({"answer": message["request"], **answer})

    def die(self, notice_s: float) -> None:
        """End with all of its ranks; the pilot notices after ``notice_s`` seconds."""
        if self.dead:
            return
        self.dead = True
        for ranks in self.run.groups.values():
            ranks.gone.update(rank for rank, agent in ranks.agents.items() if agent is self)
        self.run.place.world.at(notice_s, self._noticed)

    def exit(self, group: str, rank: int, status: int | None, signal: int | None, *, by_us: bool = False) -> None:
        """Tell the pilot that a rank has ended."""
        at = self.run.place.world.time()
        fields = {"rank": rank, "status": status, "signal": signal, "time": at, "killed_by_us": by_us}
        if not self.dead:
            self.node.handle({"exit": fields, "group": group})

    def beat(self, group: str, rank: int, phase: str, step: int | None, *, failed: bool = False) -> None:
        at = self.run.place.world.time()
        fields = {"rank": rank, "phase": phase, "step": step, "time": at, "pid": 1, "failed": failed}
        if not self.dead:
            self.node.handle({"beats": [fields], "group": group})

    def _noticed(self) -> None:
        self.node.mark_lost("its agent's connection closed")
        self.run.wake.set()

    def _port(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        return {"port": 29500}

    def _free(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def _stacks(self, _message: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def _start(self, message: Mapping[str, Any]) -> dict[str, Any]:
        group, folder = message["group"], Path(message["folder"])
        if group not in self.run.groups:
            self.run.groups[group] = Ranks(folder, protocol.read_task(folder))
        ranks = self.run.groups[group]
        ranks.agents.update(dict.fromkeys((rank for rank, _ in message["ranks"]), self))
        if ranks.complete:
            self.run.begin(group, ranks)
        return {}

    def _end(self, message: Mapping[str, Any]) -> dict[str, Any]:
        ranks = self.run.groups.get(message["group"])
        if ranks is not None:
            for rank, agent in ranks.agents.items():
                if agent is self and rank not in ranks.gone:
                    ranks.gone.add(rank)
                    self.exit(message["group"], rank, None, 9, by_us=True)
        return {"survivors": [], "exits": [], "beats": []}


@dataclass
class Server:
    """Replaces `launchers.pilot.agent_server.AgentServer`."""

    nodes: dict[str, Node] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class StormBatch(Batch):
    """Slurm as a pilot sees it; its environment is that of its job."""

    def __init__(self, run: PilotRun) -> None:
        super().__init__()
        self._run = run

    def nodes(self) -> list[str]:
        return [machine.name for machine in self._run.machines]

    def ended_tasks(self, sweep: SweepDir, place: Allocation) -> list[Any]:
        return []

    def seconds_left(self, place: Allocation) -> float | None:
        known = self._brief_client.time_left(place.job or "") if self._run.place.has_scontrol else None
        if known is None and not self._end_known:
            known = TimeLeft(self._run.ends_at - self._run.place.world.now, None)
        self._end_known = self._end_known or known is not None
        return known.left_s if known is not None else None


class PilotRun:
    """One start of a job."""

    numbers = itertools.count(1)

    def __init__(self, place: Place, job: SlurmJob) -> None:
        world = place.world
        self.place, self.job_name, self.machines = place, job.name, job.machines
        self.status: int | None = None
        self.groups: dict[str, Ranks] = {}
        self.ends_at = world.now + job.time_s
        self.wake = VirtualEvent(world)
        self.pilot: Pilot | None = None
        self.number = next(PilotRun.numbers)
        self.allocation = Allocation(
            pilot_id=f"{job.token}.{job.index}.{job.restarts}",
            job=job.name,
            node=job.machines[0].name,
            is_head=True,
            restarts=job.restarts,
        )
        self.token = job.token
        self.agents = {machine.name: Agent(self, machine) for machine in job.machines}
        self.process = Process(self.allocation.pilot_id, job.machines[0].name, on_death=self._died)
        self._warned = False
        self._server = Server()
        world.start(self.process, self._main, world.random.uniform(1.0, 6.0))

    @property
    def running(self) -> list[tuple[str, Ranks]]:
        """Attempts whose ranks run."""
        return [(group, ranks) for group, ranks in self.groups.items() if ranks.able]

    def warn(self) -> None:
        self._warned = True
        if self.pilot is not None:
            self.pilot._stop.reason = self.pilot._stop.reason or "preempted"
            self.wake.set()

    def kill(self) -> None:
        self.process.kill()
        for agent in self.agents.values():
            agent.die(0.0)

    def wants_requeue(self) -> bool:
        request = pilot_state.requeue_request(SweepDir(self.place.sweep), self.allocation.pilot_id)
        asked = request.exists()
        request.unlink(missing_ok=True)
        return asked

    def freeze(self, seconds: float) -> None:
        """SIGSTOP now, SIGCONT later. Agents end when they have not heard from the pilot for long."""
        self.process.freezes_in, self.process.freeze_s = self.place.world.random.randrange(30), seconds
        self.place.world.at(SILENCE_LIMIT_S + 5.0, self._agents_look)

    def crash(self, machine: Machine) -> None:
        """Power loss of one of its nodes."""
        if machine is self.machines[0]:
            self.process.kill()
        self.agents[machine.name].die(self.place.world.random.choice((0.2, SILENCE_LIMIT_S)))

    def begin(self, group: str, ranks: Ranks) -> None:
        """Run all ranks of an attempt; each step is a callback."""
        place, world = self.place, self.place.world
        place.journal.begun[group] = ranks.task.experiment.id
        left = [place.durations[ranks.task.experiment.id]]
        kind = ranks.task.experiment.model.name
        world.at(0.5, lambda: self._beat(group, ranks, "build", None))
        steps = itertools.count()

        def step() -> None:
            if not ranks.able:
                return
            number = next(steps)
            if number == 1 and kind in ("oom", "crash"):
                self._fail(group, ranks, kind)
            elif left[0] > 0:
                self._beat(group, ranks, "warmup" if number == 0 else "step", number)
                left[0] -= BEAT_S
                world.at(min(BEAT_S, max(0.5, left[0])), step)
            else:
                self._write_results(group, ranks)

        world.at(2.0, step)

    def _beat(self, group: str, ranks: Ranks, phase: str, step: int | None) -> None:
        for rank, agent in ranks.agents.items():
            if rank not in ranks.gone:
                agent.beat(group, rank, phase, step)

    def _fail(self, group: str, ranks: Ranks, kind: Any) -> None:
        for rank, agent in ranks.agents.items():
            message = "OutOfMemoryError: CUDA out of memory" if kind == "oom" else "ZeroDivisionError: by zero"
            error = RankError(rank=rank, phase="step", step=1, kind=kind, message=message, traceback="")
            protocol.write_json(protocol.error_path(ranks.folder, rank), error)
            agent.beat(group, rank, "step", 1, failed=True)
            ranks.gone.add(rank)
            agent.exit(group, rank, 1, None)

    def _write_results(self, group: str, ranks: Ranks) -> None:
        world = self.place.world
        now = world.time()
        for rank in ranks.agents:
            steps = [
                StepRecord(
                    step=step,
                    is_warmup=step < ranks.task.measure.warmup_steps,
                    step_time_s=0.5,
                    loss=5.5,
                    grad_norm=1.0,
                    peak_allocated_bytes=2**30,
                    peak_reserved_bytes=2**31,
                    allocator_retries=0,
                )
                for step in range(ranks.task.measure.steps_of(None))
            ]
            result = RankResult(
                rank=rank,
                coordinates={"dp": rank, "tp": 0, "cp": 0, "pp": 0},
                steps=steps,
                phase_started_at={"warmup": now - 5.0, "step": now - 4.0, "teardown": now},
                host=ranks.agents[rank].machine.name,
                device_name="cpu",
            )
            protocol.write_json(protocol.result_path(ranks.folder, rank), result)
        self.place.journal.measured[group] = ranks.task.experiment.id
        self.place.journal.measured_at[group] = world.now
        self._beat(group, ranks, "teardown", None)

        def ended() -> None:
            for rank, agent in ranks.agents.items():
                if rank not in ranks.gone:
                    ranks.gone.add(rank)
                    agent.exit(group, rank, 0, None)

        world.at(0.3, ended)

    def _died(self) -> None:
        """The pilot's process is gone: agents see its connection close, and srun ends the step."""
        for agent in self.agents.values():
            agent.die(0.0)
        self.place.world.at(2.0, self._step_over)

    def _step_over(self) -> None:
        self.status = self.status if self.status is not None else 137

    def _agents_look(self) -> None:
        if self.process.frozen_until > self.place.world.now:
            for agent in self.agents.values():
                agent.die(0.0)

    def _join(self, machine: Machine) -> None:
        agent = self.agents[machine.name]
        if machine.up and not agent.dead:
            self._server.nodes[machine.name] = agent.node

    def _main(self) -> None:
        place = self.place
        try:
            self.status = self._run_pilot()
        except UltrasweepError as error:
            place.journal.logs.append(f"{self.allocation.pilot_id}: {error}")
            self.status = 2
        except Exception:
            place.journal.errors.append(f"{self.allocation.pilot_id}: {traceback.format_exc()}")
            self.status = 1
        finally:
            self.process.dead = True
            for agent in self.agents.values():
                agent.die(0.0)

    def _run_pilot(self) -> int:
        world = self.place.world
        sweep = SweepDir.open(self.place.sweep)
        config = read_pilot_config(pilot_state.config_path(sweep, self.token))
        batch = StormBatch(self)
        for number, machine in enumerate(self.machines):
            world.at(world.random.uniform(0.5, 8.0) if number else 0.3, partial(self._join, machine))
        pool = NodePool(
            self._server,  # type: ignore[arg-type]
            self.allocation,
            config.nodes,
            -1,
            sweep,
            batch=batch,
            use_excluded=config.use_excluded,
        )
        provenance = json.loads(json.dumps({**(config.provenance or {}), "python_version": "3", "command": "storm"}))
        self.pilot = Pilot(sweep, self.allocation, config, pool, self.wake, provenance, batch)  # type: ignore[arg-type]
        if self._warned:
            self.warn()
        return self.pilot.run()
