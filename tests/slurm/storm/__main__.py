"""``python -m tests.slurm.storm --seeds 8``: one line for each seed; the exit status is 1 if anything does not hold."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.slurm.reliability import write_storms
from tests.slurm.storm.storm import NODES, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm.storm", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds, from --first on")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=2, help="seeds at a time, each in a process of its own")
    parser.add_argument("--log", type=Path, help="folder for what pilots and commands of each seed say")
    parser.add_argument("--write-reliability", action="store_true", help="write the table of docs/reliability.md")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    results = []
    # One process for each seed, because the threads of killed processes stay until its end.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.at_once, mp_context=context, max_tasks_per_child=1) as pool:
        for result in pool.map(run_seed, seeds, [given.log] * given.seeds):
            print(result, flush=True)
            results.append(result)
    failed = any(result.complaints for result in results)
    if given.write_reliability and not failed:
        write_storms([result.table_line for result in results], NODES)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
