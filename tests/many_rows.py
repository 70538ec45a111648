"""What a finished sweep costs: inodes and calls of a point, and CPU seconds and memory of ``status`` and of the report
of many rows: ``python -m tests.many_rows [ROWS]``.

The rows are recorded ones over and over, under other ids and at slightly other speeds. CPU seconds include those of the
processes that draw.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from launchers.state import history, merged_history, pilot_state
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.sweep_dir import SweepDir, point_to_dict
from results.tables import files, store
from tests.launchers import scripted
from tests.launchers.file_calls import calls_a_point
from workloads.contract.protocol import write_json

ROWS = 20_000
POINTS = 8
RECORDED = Path(__file__).parent.parent / "results" / "recorded"


def many(folder: Path, count: int) -> Path:
    """A sweep of so many rows of one cluster, all finished, with the queue of a sweep that has ended."""
    base = store.read_attempts(RECORDED)
    for name, value in (("cluster", "h200"), ("method", "measured"), ("engine", "ultrasweep")):
        base = base.filter(pc.equal(base[name], value))
    pieces = []
    for copy in range(-(-count // base.num_rows)):
        own = {
            name: pc.binary_join_element_wise(f"r{copy}", base[name], "-") for name in ("attempt_id", "experiment_id")
        }
        own |= {"tokens_per_s_per_gpu": pc.divide(base["tokens_per_s_per_gpu"], 1 + copy / 500)}
        own |= {"step_time_s": pc.multiply(base["step_time_s"], 1 + copy / 500)}
        own |= {"sweep": pa.array([folder.name] * base.num_rows)}
        piece = base
        for name, column in own.items():
            at = piece.schema.get_field_index(name)
            piece = piece.set_column(at, piece.schema.field(at), column)
        pieces.append(piece)
    sweep = SweepDir.create(folder, {"cluster": "h200", "grids": ["many"]})
    rows = pa.concat_tables(pieces).slice(0, count)
    files.write_parquet(files.compacted_path(folder, "attempts"), rows)
    planned = store.read_ledger(RECORDED).slice(0, 1).to_pylist()[0]
    store.write_ledger(folder, [planned | {"experiment_id": f"e{index}"} for index in range(count)])
    [point] = scripted.points("ok")
    records = {}
    for index, attempt_id in enumerate(rows["attempt_id"].to_pylist()):
        stem, about = f"{index:06d}-e{index}", {"attempt_id": attempt_id, "experiment_id": f"e{index}"}
        write_json(sweep.done / f"{stem}@ok.json", point_to_dict(point))
        record = scripted.attempt_record(index, "ok", **about, step_time_s=0.5, nodes=["n1"])
        records[history.write_record(sweep, stem, record).name] = record
    merged_history.merge(sweep.history, records)
    return folder


def cost(*command: str) -> tuple[float, float]:
    """CPU seconds of a command and its processes, and the highest resident memory of one of them in MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, *command], capture_output=True, text=True, check=True, env=os.environ
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, int(done.stdout.splitlines()[-1]) / 1024


_MEASURED = """
import resource, subprocess, sys
subprocess.run([sys.executable, *sys.argv[1:]], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def inodes_a_point(folder: Path) -> float:
    """Files and folders that a finished point of two ranks adds to its sweep, after the pilot's end."""
    found = []
    for count in (1, POINTS):
        sweep = SweepDir.create(folder / str(count), {})
        sweep.add_points(scripted.points(*["ok"] * count))
        scripted_pilot(sweep)
        found.append(sum(1 for _ in sweep.path.rglob("*") if _.parent.name != "losses"))
    return (found[1] - found[0]) / (POINTS - 1)


def scripted_pilot(sweep: SweepDir) -> None:
    launch = scripted.settings(lease_s=60.0)
    config = PilotConfig(settings=launch, command=None, wall_time_s=None, stop_with_parent=False, provenance={})
    write_json(pilot_state.config_path(sweep, "p"), pilot_config_to_dict(config))
    command = [sys.executable, "-m", "tests.launchers.scripted", str(sweep.path), "p"]
    subprocess.run(command, env=pilot_environment(), check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    with tempfile.TemporaryDirectory(prefix="many_rows-") as name:
        where = Path(name)
        print(f"inodes of a finished point of two ranks: {inodes_a_point(where / 'points'):.1f}", flush=True)
        if shutil.which("strace") is not None:
            print(
                f"calls of a point of two ranks: {sum(calls_a_point(where / 'calls', POINTS).values()):.1f}", flush=True
            )
        sweep = many(where / "many", rows)
        for what, command in (
            ("status", ("-m", "sweep", "status", str(sweep))),
            ("report", ("-m", "analysis.report", str(sweep), "--out", str(where / "report"))),
        ):
            cpu_s, memory = cost(*command)
            print(f"{what} of {rows:,} rows: {cpu_s:.1f} s of CPU, {memory:,.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
