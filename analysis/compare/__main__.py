"""``python -m analysis.compare``."""

from __future__ import annotations

import sys

from analysis.compare.command import main

sys.exit(main())
