"""The faults of a storm: each is one method, drawn by its weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tests.launchers.virtual_time import Process, World
from tests.slurm.storm.cluster import Cluster, Machine, SlurmJob
from tests.slurm.storm.files import StormyFiles
from tests.slurm.storm.pilots import PilotRun

WEIGHTS = {
    "pilot_killed": 12,
    "pilot_killed_at_a_file": 14,
    "pilot_frozen": 10,
    "pilot_hangs_at_a_file": 10,
    "agent_killed": 8,
    "rank_killed": 8,
    "rank_stuck": 5,
    "node_rebooted": 8,
    "rack_rebooted": 2,
    "node_drained": 4,
    "node_taken_for_lost": 4,
    "job_cancelled": 5,
    "waiting_job_cancelled": 3,
    "preempted": 8,
    "limit_cut": 3,
    "controller_away": 4,
    "controller_away_ten_minutes": 1,
    "controller_forgets": 2,
    "commands_fail": 6,
    "files_fail": 6,
    "clock_step": 6,
    "submitter_killed": 7,
    "submitter_frozen": 3,
    "second_submitter": 3,
}
"""How often each fault is drawn, relative to the others."""


class Faults:
    """Draws faults by the world's seed and counts those that found something to disturb."""

    def __init__(
        self, world: World, cluster: Cluster, files: StormyFiles, submitters: list[Process], submit: Callable[[], None]
    ) -> None:
        """``submitters``: the processes of the user's commands, the newest last. ``submit`` starts one more."""
        self.counts: Counter[str] = Counter()
        self._world, self._cluster, self._files = world, cluster, files
        self._submitters, self._submit = submitters, submit

    def draw(self) -> None:
        """Let one fault happen."""
        kind = self._world.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if getattr(self, f"_{kind}")():
            self.counts[kind] += 1

    def heal(self) -> None:
        """End every fault that lasts."""
        self._cluster.away, self._cluster.flaky, self._files.failing = False, 0.0, 0.0
        for machine in self._cluster.machines.values():
            machine.up, machine.drained, machine.taken_until = True, False, 0.0

    def _runs(self) -> list[tuple[SlurmJob, PilotRun]]:
        jobs = [job for job in self._cluster.jobs if job.state == "RUNNING" and job.run is not None]
        return [(job, job.run) for job in jobs if isinstance(job.run, PilotRun) and not job.run.process.dead]

    def _any_run(self) -> tuple[SlurmJob, PilotRun] | None:
        runs = self._runs()
        return self._world.random.choice(runs) if runs else None

    def _any_machine(self) -> Machine:
        return self._world.random.choice([*self._cluster.machines.values()])

    # Pilots, agents, ranks

    def _pilot_killed(self) -> bool:
        if (found := self._any_run()) is None:
            return False
        found[1].process.kill()
        return True

    def _pilot_killed_at_a_file(self) -> bool:
        if (found := self._any_run()) is None:
            return False
        found[1].process.dies_in = self._world.random.randrange(60)
        return True

    def _pilot_frozen(self) -> bool:
        if (found := self._any_run()) is None:
            return False
        found[1].freeze(self._world.random.choice((5.0, 30.0, 80.0, 200.0, 400.0)))
        return True

    def _pilot_hangs_at_a_file(self) -> bool:
        if (found := self._any_run()) is None:
            return False
        process = found[1].process
        process.hangs_in, process.hang_s = self._world.random.randrange(20), self._world.random.uniform(30.0, 600.0)
        return True

    def _agent_killed(self) -> bool:
        if (found := self._any_run()) is None:
            return False
        self._world.random.choice([*found[1].agents.values()]).die(0.2)
        return True

    def _rank_killed(self) -> bool:
        for _, run in self._runs():
            for group, ranks in run.running:
                rank = self._world.random.choice([*ranks.agents])
                ranks.gone.add(rank)
                ranks.agents[rank].exit(group, rank, None, 9)
                return True
        return False

    def _rank_stuck(self) -> bool:
        for _, run in self._runs():
            for _, ranks in run.running:
                ranks.stuck = True
                return True
        return False

    # Nodes

    def _crash(self, machine: Machine) -> None:
        """Power loss, which the controller notices later, and a reboot."""
        world, cluster = self._world, self._cluster
        if not machine.up:
            return
        hit = [job for job in cluster.jobs if machine in job.machines]
        runs = [run for job in hit if isinstance(run := job.run, PilotRun)]
        runs += [run for run in cluster.orphans if isinstance(run, PilotRun) and machine in run.machines]
        cluster.crash(machine)
        for run in runs:
            run.crash(machine)
        first = [(job, job.run) for job in hit]

        def noticed() -> None:
            if cluster.away:
                world.at(5.0, noticed)
                return
            for job, run in first:
                if job.run is run:
                    cluster.lose_node(job)

        world.at(world.random.uniform(15.0, 90.0), noticed)
        world.at(world.random.uniform(20.0, 400.0), lambda: cluster.reboot(machine))

    def _node_rebooted(self) -> bool:
        self._crash(self._any_machine())
        return True

    def _rack_rebooted(self) -> bool:
        for machine in self._world.random.sample([*self._cluster.machines.values()], 4):
            self._crash(machine)
        return True

    def _node_drained(self) -> bool:
        machine = self._any_machine()
        machine.drained = True
        self._world.at(self._world.random.uniform(60.0, 600.0), lambda: setattr(machine, "drained", False))
        return True

    def _node_taken_for_lost(self) -> bool:
        if (found := self._any_run()) is None or self._cluster.away:
            return False
        self._cluster.lose_node(found[0])
        return True

    # Jobs

    def _job_cancelled(self) -> bool:
        if (found := self._any_run()) is None or self._cluster.away:
            return False
        self._cluster.cancel(found[0])
        return True

    def _waiting_job_cancelled(self) -> bool:
        waiting = [job for job in self._cluster.jobs if job.state == "PENDING"]
        if not waiting or self._cluster.away:
            return False
        self._cluster.cancel(self._world.random.choice(waiting))
        return True

    def _preempted(self) -> bool:
        if (found := self._any_run()) is None or self._cluster.away:
            return False
        job, _ = found
        until = self._world.now + self._world.random.uniform(60.0, 400.0)
        for machine in job.machines:
            machine.taken_until = max(machine.taken_until, until)
        self._cluster.end(job, "PREEMPTED", requeue=True, kill_wait_s=self._world.random.choice((2.0, 30.0)))
        return True

    def _limit_cut(self) -> bool:
        if (found := self._any_run()) is None:
            return False
        job, run = found
        job.time_s = min(job.time_s, self._world.now - job.started_at + 120.0)
        run.ends_at = job.started_at + job.time_s
        return True

    # The controller and its commands

    def _away(self, seconds: float) -> bool:
        if self._cluster.away:
            return False
        self._cluster.away = True
        self._world.at(seconds, lambda: setattr(self._cluster, "away", False))
        return True

    def _controller_away(self) -> bool:
        return self._away(self._world.random.uniform(5.0, 120.0))

    def _controller_away_ten_minutes(self) -> bool:
        return self._away(600.0)

    def _controller_forgets(self) -> bool:
        return self._cluster.forget(self._world.random.uniform(5.0, 300.0)) > 0

    def _commands_fail(self) -> bool:
        self._cluster.flaky = self._world.random.uniform(0.2, 0.8)
        self._world.at(self._world.random.uniform(20.0, 180.0), lambda: setattr(self._cluster, "flaky", 0.0))
        return True

    # Files and clocks

    def _files_fail(self) -> bool:
        self._files.failing = self._world.random.choice((0.01, 0.05, 0.2, 1.0))
        lasts_s = self._world.random.uniform(5.0, 120.0)
        self._world.at(lasts_s, lambda: setattr(self._files, "failing", 0.0))
        return True

    def _clock_step(self) -> bool:
        host = self._world.random.choice(["login", *self._cluster.machines])
        self._world.offsets[host] = self._world.random.choice((-3600.0, -60.0, -5.0, 0.0, 5.0, 60.0, 3600.0))
        return True

    # The user's command

    def _living_submitter(self) -> Process | None:
        living = [process for process in self._submitters if not process.dead]
        return living[-1] if living else None

    def _submitter_killed(self) -> bool:
        if (process := self._living_submitter()) is None:
            return False
        process.dies_in = self._world.random.randrange(80)
        return True

    def _submitter_frozen(self) -> bool:
        if (process := self._living_submitter()) is None:
            return False
        process.freezes_in, process.freeze_s = self._world.random.randrange(60), self._world.random.uniform(5.0, 200.0)
        return True

    def _second_submitter(self) -> bool:
        if len([process for process in self._submitters if not process.dead]) > 1:
            return False
        self._submit()
        return True
