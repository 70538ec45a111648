"""The command `python -m sweep`: grids, plans, predictions, runs, searches and exports."""

import importlib.util
import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:  # ``python -m`` is looking for the module to run, with the working folder first on the path
    for _name in ("results", "workloads", "launchers", "sweep", "analysis"):
        _spec = importlib.util.find_spec(_name)
        if _spec is not None and _spec.origin is not None and Path(_spec.origin).parent.name != _name:
            print(
                f"ultrasweep: {_spec.origin} hides ultrasweep's package {_name!r}: rename the file, work in another "
                "folder, or type `ultrasweep` instead of `python -m sweep`",
                file=sys.stderr,
            )
            sys.exit(2)
