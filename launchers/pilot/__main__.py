"""``python -m launchers.pilot SWEEP_DIR CONFIG_ID``: see `launchers.pilot.command`."""

import sys

from launchers.pilot.command import main

if __name__ == "__main__":
    sys.exit(main())
