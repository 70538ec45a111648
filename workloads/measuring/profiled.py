"""Records a few more steps with torch's profiler, after the timed ones, and divides the last one's time among its
kernels.

One rank of every pipeline stage records; all ranks run the steps, because none can run alone. If the profiler fails,
the error goes to the rank's log and the breakdown is lost, but the rank continues with the steps: otherwise the other
ranks would wait for it.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from results.shared_filesystem.whole_files import whole_file
from workloads.contract.measure_spec import PROFILED_STEPS
from workloads.contract.protocol import Breakdown, trace_path
from workloads.engine.collectives.groups import Groups
from workloads.engine.observing.breakdown import break_down
from workloads.engine.observing.trace import read_step
from workloads.engine.observing.traffic import axes_of
from workloads.engine.training.build import Engine
from workloads.measuring.step import BeforeStep, garbage_collector_off, run_steps


def profile(
    engine: Engine, folder: Path, first_step: int, before_step: BeforeStep
) -> tuple[Breakdown | None, str | None]:
    """Run `PROFILED_STEPS` steps, the first of them with number ``first_step``. Returns the breakdown of the last one
    (on the ranks that record) and the name of the trace in ``folder`` (on rank 0); None if there is none.

    Collective over all ranks. Nothing is run without CUDA: overlap cannot be measured with the host's clock.
    """
    if engine.groups.device.type != "cuda":
        return None, None
    recorder = _Recorder() if records(engine.groups) else None
    steps = range(first_step, first_step + PROFILED_STEPS)
    with garbage_collector_off():
        if recorder is not None:
            recorder.attempt(recorder.start)
        run_steps(engine, steps[:1], before_step, is_warmup=False)
        if recorder is not None:
            recorder.attempt(recorder.record)
        run_steps(engine, steps[1:], before_step, is_warmup=False)
    if recorder is None:
        return None, None
    before_step(steps[-1] + 1, False)  # a heartbeat: a long trace takes seconds to write
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        recorder.attempt(lambda: recorder.write(file))
        if engine.groups.rank == 0:
            recorder.attempt(lambda: recorder.keep(file, trace_path(folder, 0)))
        recorder.attempt(lambda: recorder.analyse(file, engine))
    if recorder.problem is not None:
        sys.stderr.write(f"the profiled step has no breakdown: {recorder.problem}\n")
    return recorder.breakdown, recorder.kept


def records(groups: Groups) -> bool:
    """Whether this rank records: the first one of its pipeline stage."""
    return all(index == 0 for axis, index in groups.position.items() if axis != "pp")


class _Recorder:
    """The profiler of one rank. After its first error it does nothing more."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.breakdown: Breakdown | None = None
        self.kept: str | None = None
        self._profiler: torch.profiler.profile | None = None

    def attempt(self, action: Callable[[], None]) -> None:
        if self.problem is None:
            try:
                action()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"

    def start(self) -> None:
        """Start with a step that is not recorded, because starting the profiler takes device time."""
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA],
            schedule=torch.profiler.schedule(wait=0, warmup=1, active=PROFILED_STEPS - 1, repeat=1),
        )
        self._profiler.start()

    def record(self) -> None:
        assert self._profiler is not None
        self._profiler.step()

    def write(self, file: Path) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(file))

    def analyse(self, file: Path, engine: Engine) -> None:
        recorded = read_step(json.loads(file.read_bytes()), axes_of(engine.groups))
        waiting = ("pp", "tied", "world") if engine.experiment.pp > 1 else ()
        self.breakdown = break_down(recorded.spans, recorded.start_s, recorded.end_s, waiting)

    def keep(self, file: Path, target: Path) -> None:
        """Compress the trace into the attempt's folder; readers see the whole file or none."""
        with (
            file.open("rb") as plain,
            whole_file(target) as whole,
            gzip.GzipFile(fileobj=whole, mode="wb", compresslevel=3) as packed,
        ):
            shutil.copyfileobj(plain, packed)
        self.kept = target.name
