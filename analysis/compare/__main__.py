"""Entry point of ``python -m analysis.compare``."""

from __future__ import annotations

import sys

try:
    from analysis.compare.command import main

    status = main()
except KeyboardInterrupt:  # while modules are being imported
    print("error: interrupted", file=sys.stderr)
    status = 130
sys.exit(status)
