"""`AttemptThread` runs one attempt on some nodes of a pilot, and keeps its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launchers.attempt.attempt import Attempt
from launchers.attempt.execute import Control, Execution, execute, internal_error
from launchers.attempt.outcome import StopReason
from launchers.attempt.watchdog import Progress
from launchers.node.connection import NodeLost
from launchers.node.rank_group import RankGroup
from launchers.node.remote import Node, RemoteRanks
from launchers.settings import LaunchSettings
from launchers.state.pilot_state import Running
from launchers.state.queue import Claim

_ANSWER_SLACK_S = 90.0
"""Seconds that an agent's answer may take beyond the limit sent to it."""


class AttemptThread:
    """Thread of one attempt, which starts at once. ``done``, ``held`` and ``ended_at`` are valid when ``finished`` is
    true."""

    def __init__(
        self,
        claim: Claim,
        attempt: Attempt,
        nodes: Sequence[Node],
        width: int,
        settings: LaunchSettings,
        stages: Path,
        stop_reason: Callable[[], StopReason | None],
        wake: threading.Event,
    ) -> None:
        self.claim = claim
        self.attempt = attempt
        self.nodes = tuple(nodes)
        self.done: Execution | None = None
        self.held: Mapping[str, str] = {}
        """Remaining use of device memory after the attempt, by node; only nodes where the memory did not become
        free."""
        self.ended_at = 0.0
        self.progress = Progress(phase="spawn", step=None)
        self._width = width
        self._settings = settings
        self._stages = stages
        self._stop_reason = stop_reason
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=attempt.attempt_id, daemon=True)
        self._thread.start()

    @property
    def finished(self) -> bool:
        return not self._thread.is_alive()

    def unclean(self) -> dict[str, str]:
        """Nodes that cannot be used after this attempt, with the reason."""
        reasons = {node: f"device memory is not free: {held}" for node, held in self.held.items()}
        for process in self.done.survivors if self.done is not None else ():
            at = process.partition(" on ")[2] or self.nodes[0].name
            reasons[at] = f"processes {process} could not be killed"
        return reasons

    def running(self) -> Running:
        """The attempt as written in the pilot's state file."""
        attempt = self.attempt
        return Running(
            stem=self.claim.stem,
            attempt_id=attempt.attempt_id,
            experiment_id=attempt.point.experiment.id,
            world_size=attempt.point.experiment.world_size,
            started_at=attempt.started_at,
            deadline_s=self._settings.point_deadline_s or attempt.point.deadline_s,
            nodes=attempt.nodes,
            phase=self.progress.phase,
            step=self.progress.step,
            part=self.progress.part,
        )

    def _run(self) -> None:
        control = Control(
            start=self._start,
            stop_reason=self._stop_reason,
            on_progress=self._set_progress,
            wait_until_free=lambda: "; ".join(self._wait_until_free().values()) or None,
        )
        try:
            self.done = execute(self.attempt, self._settings, control, self._stages)
        except Exception as error:
            self.done = internal_error(error)
        self.held = self._wait_until_free()
        self.ended_at = self.attempt.clock()
        self._wake.set()

    def _set_progress(self, progress: Progress) -> None:
        self.progress = progress

    def _start(self, ranks: Sequence[int]) -> RankGroup:
        per_node = self._settings.num_devices if self.attempt.task.method == "measured" else 1
        group = RemoteRanks(self.nodes, ranks, per_node, self.attempt.attempt_id)
        group.start(self.attempt.folder, {node.name: self._environment(node) for node in self.nodes})
        return group

    def _environment(self, node: Node) -> dict[str, str]:
        ids = node.device_ids[: self._width] if node.device_ids is not None else ()
        return {**self._settings.environment, "CUDA_VISIBLE_DEVICES": ",".join(ids)}

    def _wait_until_free(self) -> dict[str, str]:
        """Remaining use of device memory after the limit, by node. Lost nodes are left out; the pool knows them."""
        limit_s = self._settings.device_free_limit_s
        requests = [(node, node.ask("free", count=self._width, limit_s=limit_s)) for node in self.nodes]
        held_by_node = {}
        for node, future in requests:
            try:
                answer = node.wait(future, "free", limit_s + _ANSWER_SLACK_S)
            except NodeLost:
                continue
            if (held := answer.get("held") or answer.get("error")) is not None:
                held_by_node[node.name] = held
        return held_by_node
