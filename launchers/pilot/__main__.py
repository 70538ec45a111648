"""``python -m launchers.pilot SWEEP_DIR CONFIG_ID``: see `launchers.pilot.pilot`."""

import sys

from launchers.pilot.pilot import main

if __name__ == "__main__":
    sys.exit(main())
