"""Brings the outputs that pages show below their commands up to date, by running the commands.

``python -m docs.tools.write_examples`` reports the shown lines that differ from what the command prints now (exit
status 1), and the blocks that it leaves out; with ``--write`` it puts the printed lines in their place.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from docs.tools.write_examples.lines import renewed
from docs.tools.write_examples.printed import look_through
from tests.docs.pages import WRITTEN_BY_HAND, name_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tools.write_examples", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="only these pages")
    parser.add_argument("--write", action="store_true", help="write the lines that differ anew")
    options = parser.parse_args()
    is_stale = False
    for path in [path.resolve() for path in options.pages] or WRITTEN_BY_HAND:
        findings = look_through(path)
        for finding in findings:
            print(f"{name_of(path)}:{finding.line}: {finding.says}")
        if options.write:
            path.write_text(renewed(path.read_text(), findings))
        is_stale |= any(one.is_fault and not (options.write and one.new) for one in findings)
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main())
