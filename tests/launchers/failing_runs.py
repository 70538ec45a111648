"""How many points an hour pilots run on files that fail: ``python -m tests.launchers.failing_runs [POINTS ...]``.

Four pilots run stand-in points in virtual time (`tests.launchers.virtual_time`): every call on the sweep's folder takes
a millisecond, and every point a second, far less than a real one, so that calls count for much. Queue, rows, records,
retries and take-overs are those of real pilots. Some calls fail (`tests.launchers.failing_calls`), and in the last line
pilots are killed at random calls and replaced. After each run every point must have one final row, and every attempt
must have a row.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import math
import random
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from launchers.attempt.attempt import start_attempt
from launchers.pilot import pilot as pilot_module
from launchers.pilot.stop_request import StopRequest
from launchers.state.sweep_dir import SweepDir, entry_names, key_of
from results.tables import store
from tests.launchers.failing_calls import Death, FailingFiles
from tests.launchers.failing_files import FakeAttempts, run_pilot
from tests.launchers.scripted import points
from tests.launchers.virtual_time import VirtualEvent, World

PILOTS = 4
CALL_S, POINT_S = 0.001, 1.0
"""Virtual seconds of one call on the sweep's folder, and of one point."""
LIFE_S, RESTART_S, LEASE_S = 60.0, 5.0, 10.0
"""Virtual seconds: mean life of a pilot where pilots are killed, time until another starts in its place, and age of a
heartbeat at which its points are taken over."""

LONGEST_WAIT_S = 0.5
"""A pilot that waits looks no oftener than this while nothing happens."""
LIMIT_S = 7200.0
"""Virtual time at which a run is ended that gets nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    rate: float = 0.0
    """Share of the calls that fail."""
    kills: bool = False

    @property
    def name(self) -> str:
        failing = f"{100 * self.rate:g} % failing" if self.rate else "clean"
        return failing + (" and kills" if self.kills else "")


CASES = (Case(), Case(rate=0.005), Case(rate=0.01), Case(rate=0.02), Case(rate=0.02, kills=True))


@dataclass(slots=True, kw_only=True)
class Result:
    """What four pilots have done. Times are virtual."""

    points: int
    done: int = 0
    seconds: float = 0.0
    """Until the last pilot has ended."""
    first_claim_s: float | None = None
    calls: int = 0
    failed: int = 0
    killed: int = 0
    gave_up: int = 0
    """Pilots that ended because of the files."""
    repeated: int = 0
    """Attempts at points beyond the first."""
    unmarked: int = 0
    """Attempts without a row."""
    final_rows: int = 0
    """Points with exactly one final row."""

    @property
    def per_hour(self) -> float:
        return 3600 * self.done / self.seconds


def exact_world(seed: int = 0) -> World:
    """A clock that begins at 0 and whose sleeps are as long as they are asked to be."""
    return World(seed, now=0.0, shortest_sleep_s=0.0, spread=0.0)


def run(
    case: Case, count: int, folder: Path, seed: int = 0, said: Callable[[str], object] = lambda text: None
) -> Result:
    """Run ``count`` points to their end, or until `LIMIT_S`. ``said`` gets what the pilots print."""
    result, clock, chance = Result(points=count), exact_world(seed), random.Random(seed)
    sweep = SweepDir.create(folder, {})
    sweep.add_points(points(*["ok"] * count))
    dies_at: dict[threading.Thread, float] = {}
    """When the pilot of a thread is killed; 0 afterwards, so that no clean-up of a killed pilot is done."""

    def at_call() -> bool:
        clock.sleep(CALL_S)
        limit = dies_at[threading.current_thread()]
        if limit == 0.0:
            raise Death
        if clock.now < limit:
            return False
        dies_at[threading.current_thread()] = 0.0
        return True

    def pilots(slot: int) -> None:
        number, status = itertools.count(), None
        while status is None and clock.now < LIMIT_S:
            life_s = chance.expovariate(1 / LIFE_S) if case.kills else math.inf
            dies_at[threading.current_thread()] = min(clock.now + life_s, LIMIT_S)
            try:
                wake = VirtualEvent(clock, LONGEST_WAIT_S)
                status = run_pilot(sweep, f"p{slot}.{next(number)}", wake, lease_s=LEASE_S)
            except Death:
                result.killed += 1
                clock.sleep(RESTART_S)
        result.gave_up += status not in (None, pilot_module.FINISHED)

    def claimed(claim: Any, *more: Any, **options: Any) -> Any:
        if result.first_claim_s is None:
            result.first_claim_s = clock.now
        return start_attempt(claim, *more, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as output:
        files = FailingFiles(patch.setattr, sweep.path, seed, case.rate)
        attempts = FakeAttempts(patch, files, POINT_S)
        patch.setattr(pilot_module, "start_attempt", claimed)
        patch.setattr(StopRequest, "listen", lambda self: None)
        files.at_call, files.active = at_call, True
        with clock.installed():
            clock.run(*(partial(pilots, slot) for slot in range(PILOTS)))
        files.active = False
    said(output.getvalue())
    result.seconds, result.calls, result.failed = clock.now, files.calls, len(files.failed)
    result.done = len(entry_names(sweep.done))
    _count_rows(sweep, attempts.runs, result)
    return result


def _count_rows(sweep: SweepDir, runs: Mapping[str, int], result: Result) -> None:
    rows = store.read_attempts(sweep.path).to_pylist()
    final = Counter(row["experiment_id"] for row in rows if not row["will_retry"] and not row["repeat_of"])
    result.final_rows = sum(number == 1 for number in final.values())
    written = Counter(row["experiment_id"] for row in rows)
    for stem, number in runs.items():
        result.repeated += number - 1
        result.unmarked += max(0, number - written[key_of(stem)])


def main() -> None:
    """Print the table, one line as soon as a run has ended."""
    parser = argparse.ArgumentParser(prog="python -m tests.launchers.failing_runs")
    parser.add_argument("points", nargs="*", type=int, default=[1000], help="numbers of points")
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="only these cases")
    parser.add_argument("--pilots", action="store_true", help="print what the pilots say, too")
    arguments = parser.parse_args()
    said = print if arguments.pilots else lambda text: None
    columns = ("done", "hours", "points/h", "of clean", "1st claim", "calls/pt", "failed", "killed", "gave up")
    more = ("repeated", "unmarked", "final rows")
    print(f"{'points':>6}  {'calls':<20}", *(f"{name:>9}" for name in columns), *(f"{name:>10}" for name in more))
    for count in arguments.points:
        clean = math.nan
        for case in CASES:
            if arguments.case and case.name not in arguments.case:
                continue
            with tempfile.TemporaryDirectory(prefix="failing_runs-") as name:
                ran = run(case, count, Path(name) / "sweep", said=said)
            clean = ran.per_hour if case == CASES[0] else clean
            first = "never" if ran.first_claim_s is None else f"{ran.first_claim_s:.1f} s"
            figures = (
                f"{ran.done:>9} {ran.seconds / 3600:>9.3f} {ran.per_hour:>9,.0f} {ran.per_hour / clean:>9.2f}",
                f"{first:>9} {ran.calls / count:>9.1f} {ran.failed:>9} {ran.killed:>9} {ran.gave_up:>9}",
                f"{ran.repeated:>10} {ran.unmarked:>10} {ran.final_rows:>10}",
            )
            print(f"{count:>6}  {case.name:<20}", *figures, flush=True)


if __name__ == "__main__":
    main()
