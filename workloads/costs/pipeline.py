"""How long a pipeline of stages with given times takes: exactly by simulation, or in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workloads.costs.schedule import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one stage on the time line."""

    stage: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Simulation:
    total_s: float
    """Start of the first action to the end of the last, on any stage."""
    idle_s: tuple[float, ...]
    """For each stage: ``total_s`` minus the time in its own actions."""
    spans: tuple[Span, ...]
    """Every action, stage by stage in the order of its list."""


def simulate(
    schedule: Sequence[Sequence[Action]],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    p2p_s: float = 0.0,
) -> Simulation:
    """Execute the action list of every stage (`schedule_actions`) with constant times per stage.

    A stage runs its list in order. A forward waits for the same micro-batch's forward on the stage before, a backward
    for its backward on the stage after, each plus ``p2p_s``; sending takes no time of the sender. Raises ValueError for
    lists that wait for each other for ever.
    """
    num_stages = len(schedule)
    done: dict[tuple[str, int, int], float] = {}
    position, clock = [0] * num_stages, [0.0] * num_stages
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    remaining = sum(len(actions) for actions in schedule)
    while remaining:
        before = remaining
        for stage, actions in enumerate(schedule):
            while position[stage] < len(actions):
                action = actions[position[stage]]
                neighbour = stage - 1 if action.kind == "F" else stage + 1
                start = clock[stage]
                if 0 <= neighbour < num_stages:
                    ready = done.get((action.kind, neighbour, action.microbatch))
                    if ready is None:
                        break
                    start = max(start, ready + p2p_s)
                elif action.kind == "B" and ("F", stage, action.microbatch) not in done:
                    break
                end = start + (forward_s[stage] if action.kind == "F" else backward_s[stage])
                done[action.kind, stage, action.microbatch] = clock[stage] = end
                spans[stage].append(Span(stage, action, start, end))
                position[stage] += 1
                remaining -= 1
        if remaining == before:
            waiting = [f"stage {s}: {a[position[s]]}" for s, a in enumerate(schedule) if position[s] < len(a)]
            raise ValueError(f"the schedule waits for itself; next actions are {'; '.join(waiting)}")
    total = max(clock)
    idle = tuple(
        total - len(forwards) * forward_s[s] - (len(spans[s]) - len(forwards)) * backward_s[s]
        for s, forwards in enumerate([span for span in own if span.action.kind == "F"] for own in spans)
    )
    return Simulation(total_s=total, idle_s=idle, spans=tuple(span for own in spans for span in own))


def pipeline_time_s(
    name: str,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    num_microbatches: int,
    p2p_s: float = 0.0,
    virtual_stages: int = 1,
) -> float:
    """Seconds of a whole schedule, without simulating it.

    F_s and B_s are the seconds of stage s for one micro-batch, over all its chunks; p stages, m micro-batches.

    gpipe  ``sum F + (m-1) max F + sum B + (m-1) max B + 2 (p-1) p2p``: two flow shops, exact.
    1f1b   The latest end that any one stage enforces, counting the way to it and back, its own work, and its waiting
           for the first micro-batch to return (see `_one_f_one_b_s`). Exact for equal stages without p2p and for one
           heavy last stage; a test keeps how near it is to `simulate` elsewhere.
    interleaved_1f1b   1f1b whose idle time is divided by v (arXiv:2104.04473, section 2.2).
    zero_bubble_v, dualpipe_v   1f1b with a ramp of max(0, F - B/2) a stage: backward's two halves fill it when F = B/2
           (arXiv:2401.10241). An ideal: no such schedule is simulated here yet.
    """
    p, m = len(forward_s), num_microbatches
    if name == "gpipe":
        ramps = sum(forward_s) + sum(backward_s) + 2 * (p - 1) * p2p_s
        return ramps + (m - 1) * (max(forward_s) + max(backward_s))
    total = _one_f_one_b_s(forward_s, backward_s, m, p2p_s)
    if name in ("none", "1f1b"):
        return total
    busy = m * max(f + b for f, b in zip(forward_s, backward_s, strict=True))
    if name == "interleaved_1f1b":
        return busy + (total - busy) / virtual_stages
    return busy + sum(max(0.0, f - b / 2) for f, b in zip(forward_s, backward_s, strict=True)) * (p - 1) / p


def _one_f_one_b_s(forward_s: Sequence[float], backward_s: Sequence[float], m: int, p2p_s: float) -> float:
    """The largest of lower bounds on 1F1B's time, one for each stage.

    Stage s starts when the first forward reaches it and ends when the last backward has yet to go back: together
    ``ramp = sum_{j < s} (F_j + B_j) + 2 s p2p``. A micro-batch is away from it for ``round_trip`` (its own F and B
    included), with k = p - s micro-batches in flight. If m > k the stage works m (F + B), waits for the first return
    after k forwards and for the last k backwards at their end, or is held up by the round trip in every cycle of k; if
    m <= k all forwards come first.
    """
    p = len(forward_s)
    ramp = sum(forward_s) + sum(backward_s) + 2 * p * p2p_s
    round_trip = total = 0.0
    for s in range(p - 1, -1, -1):
        f, b, k = forward_s[s], backward_s[s], p - s
        ramp -= f + b + 2 * p2p_s
        round_trip += f + b
        if m > k:
            waits = max(0.0, round_trip - k * f - b) + max(0.0, round_trip - f - k * b)
            own = max(m * (f + b) + waits, round_trip * (1 + (m - 1) / k))
        else:
            own = max(m * (f + b), round_trip + (m - 1) * max(f, b))
        total = max(total, ramp + own)
        round_trip += 2 * p2p_s
    return total
