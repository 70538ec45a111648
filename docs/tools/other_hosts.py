"""Rows that were measured again on other devices and hosts, for docs/accuracy_details.md."""

from pathlib import Path

ON_OTHER_HOSTS = Path(__file__).parent / "rows_of_other_hosts"
"""A folder of sweeps as in `results/recorded`: the same layouts again, on other devices and hosts."""
