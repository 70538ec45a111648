"""`python -m tests.planted [NAME ...]`: plants each fault and prints what finds it and where it shows first."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from results.text.terminal import open_console, plain_table
from tests.planted.faults_of_ranks import FAULTS
from tests.planted.run import Detector, Finding
from tests.pool import Pool
from workloads.spec.checks import suggest


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every fault is found."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--precision", choices=("fp64", "fp32", "bf16"), default="fp64")
    parser.add_argument("--list", action="store_true", help="print the names and what they are")
    options = parser.parse_args(argv)
    known = {fault.name: fault for fault in FAULTS}
    for name in options.names:
        if name not in known:
            parser.error(f"no fault {name!r}{suggest(name, known)}")
    chosen = [known[name] for name in options.names] or FAULTS
    console = open_console()
    table = plain_table()
    if options.list:
        table.show_header = False
        for fault in chosen:
            table.add_row(fault.axis, fault.name, fault.what)
        console.print(table)
        return 0
    for name in ("axis", "fault", "found by", "first tensor that differs", "error", "s"):
        table.add_column(name, justify="right" if name in ("error", "s") else "left", overflow="fold")
    start, findings = time.perf_counter(), []
    pool = Pool(8, "gloo")
    try:
        detector = Detector(pool)
        for at, fault in enumerate(chosen):
            if console.is_terminal:
                print(f"\r{at + 1}/{len(chosen)} {fault.name:40}", end="", file=sys.stderr, flush=True)
            findings.append(detector.find(fault, options.precision))
    finally:
        pool.close()
    if console.is_terminal:
        print(file=sys.stderr)
    for finding in findings:
        table.add_row(*_cells(finding))
    console.print(table)
    missed = [finding.fault.name for finding in findings if finding.found_by is None]
    total = time.perf_counter() - start
    console.print(f"{len(findings) - len(missed)} of {len(findings)} found in {options.precision}, {total:.0f} s")
    if missed:
        console.print(f"not found: {', '.join(missed)}")
    return 1 if missed else 0


def _cells(finding: Finding) -> tuple[str, ...]:
    fault, first = finding.fault, finding.first
    where, error = "none: every number is right", ""
    if first is not None:
        step = "before step 0" if first.computed.step is None else f"step {first.computed.step}"
        microbatch = "" if first.microbatch is None else f", micro-batch {first.microbatch}"
        where, error = f"{step}{microbatch}: {first.computed.what}", f"{first.relative:.1e}"
    found = finding.found_by or "[red]nothing[/]"
    return fault.axis, fault.name, found, where, error, f"{finding.seconds:.1f}"


if __name__ == "__main__":
    sys.exit(main())
