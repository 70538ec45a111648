"""The ordinary command line with Slurm jobs that run the stand-in: ``python -m tests.slurm.submit run +grid=...``.

Only the command in the batch file is replaced.
"""

from __future__ import annotations

import sys
from pathlib import Path

STANDIN = Path(__file__).resolve().parent / "standin.py"


def main() -> int:
    from launchers.slurm import submit
    from sweep import __main__ as command_line

    submit.PILOT = (sys.executable, str(STANDIN))
    return command_line.main()


if __name__ == "__main__":
    sys.exit(main())
