"""Columns that record how and where a point ran, grouped by what a difference in them means for a changed throughput.

The values are the names of the columns in messages.
"""

from __future__ import annotations

METHOD = {
    "method": "method",
    "measurement_version": "measurement version",
    "engine": "engine",
    "time_source": "source of the step time",
}
HARDWARE = {
    "device_name": "device",
    "cluster": "cluster",
    "node_count": "nodes",
    "network_regime": "network regime",
    "driver_version": "driver",
}
SOFTWARE = {
    "engine_version": "engine version",
    "git_commit": "commit",
    "torch_version": "PyTorch",
    "cuda_version": "CUDA",
    "nccl_version": "NCCL",
    "nccl_environment": "NCCL variables",
    "warmup_steps": "warm-up steps",
    "timed_steps": "timed steps",
}
DEVICE_STATE = {"power_limit_w": "power limit", "sm_clock_mhz": "SM clock"}
FACTS = (*METHOD, *HARDWARE, *SOFTWARE, *DEVICE_STATE)
"""Columns that decide verdicts, besides outcomes, rates and losses."""
