"""Idle time of a pilot's nodes between the steps of two points. Each node is timed by its own clock."""

from __future__ import annotations

from collections.abc import Mapping

from launchers.attempt.attempt import Attempt
from launchers.attempt.phases import first_step_at, last_step_end, seconds_between
from workloads.contract.protocol import RankResult


class StepGaps:
    """Remembers when each node ended its last step."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}
        """End of the last step of the previous point, by node."""

    def gap_s(self, attempt: Attempt, results: Mapping[int, RankResult], *, succeeded: bool) -> float | None:
        """Seconds from the last step of the previous points to the first step of this one, on the node that waited
        longest; None if a node ran no point before, or its clock was set back. The attempt's own last steps are
        remembered if it ``succeeded``."""
        ends = {node: self._ends.pop(node, None) for node in attempt.nodes}
        if attempt.task.method != "measured":
            return None
        gaps: list[float | None] = []
        for node, before in ends.items():
            on_node = {rank: result for rank, result in results.items() if attempt.node_of(rank) == node}
            first, last = first_step_at(on_node), last_step_end(on_node)
            gaps.append(seconds_between(before, first) if before is not None and first is not None else None)
            if succeeded and last is not None:
                self._ends[node] = last
        known = [gap for gap in gaps if gap is not None]
        return max(known) if known and len(known) == len(gaps) else None

    def forget(self) -> None:
        """The time from now until the next point is no overhead of that point."""
        self._ends.clear()
