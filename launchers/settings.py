"""The settings of a launcher: the devices, how points are measured, and all time limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.probe_figures import ProbeKind
from workloads.contract.protocol import Method
from workloads.spec.checks import build, flag, mapping, number, whole_number
from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.cluster_fields import cluster_from_dict, to_dict
from workloads.spec.mistakes import Mistakes

Launcher = Literal["local", "rehearse", "slurm"]
Device = Literal["cuda", "cpu"]

PHASE_LIMITS_S: Mapping[str, float] = {
    "spawn": 120.0,
    "rendezvous": 180.0,
    "build": 600.0,
    "warmup": 900.0,
    "replay": 600.0,
    "step": 600.0,
    "teardown": 10.0,
}
"""Seconds that a rank may stay in a phase without a new heartbeat before this counts as a hang. Warm-up includes
compilation. Once a rank has made some steps, the watchdog expects the next heartbeat much sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """How a pilot runs the points of its queue. Times are in seconds."""

    launcher: Launcher = "local"
    device: Device = "cpu"
    num_devices: int
    """Devices (CPU: processes) that one pilot may use at a time."""
    cluster: ClusterSpec
    measure: MeasureSpec = field(default_factory=MeasureSpec)
    method: Method = "measured"
    max_attempts: int = 3
    """Most attempts at a point that fails because of the infrastructure. A point that hangs is tried twice, one that
    runs out of memory once."""
    phase_limits_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase. They override `PHASE_LIMITS_S`."""
    point_deadline_s: float | None = None
    """Maximum time from the start of a point's processes to their end; None: each point's own ``deadline_s``."""
    collective_timeout_s: float = 120.0
    """Time after which an unfinished collective makes its ranks fail."""
    failure_grace_s: float = 0.5
    """Time that the other ranks may continue after one has failed, so that they can record their own errors."""
    device_free_limit_s: float = 30.0
    """Time that device memory may take to become free after a point's processes have ended."""
    lease_s: float = 60.0
    """Another pilot takes over the claims of a pilot whose heartbeat has stalled for this long."""
    breaker_failures: int = 4
    """Number of points of one kind that must fail in the same way, without any success, before the others of that kind
    are
    paused.
    """
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every rank (NCCL's, gloo's)."""
    node_check: bool | None = None
    """Whether to measure the speed of every node before the first point (`launchers.pilot.node_check`). None: on
    GPUs."""
    exclude_slow_nodes: bool = False
    """Whether to exclude nodes that the check finds far slower than their peers."""
    linger_s: float = 0.0
    """Time that a pilot without a point waits before it ends: new points may be about to be added."""
    probe: ProbeKind | None = None
    """Measurement that points make instead of training steps, for ``python -m sweep probe``."""

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        for name in ("num_devices", "max_attempts", "breaker_failures"):
            with mistakes.collected():
                whole_number(f"launcher: {name}", getattr(self, name), 1)
        with mistakes.collected():
            if unknown := set(self.phase_limits_s) - set(PHASE_LIMITS_S):
                raise InvalidSweep(
                    f"launcher: phase_limits_s has no phase {', '.join(sorted(unknown))}; it has "
                    f"{', '.join(PHASE_LIMITS_S)}"
                )
        for phase, limit_s in self.phase_limits_s.items():
            with mistakes.collected():
                number(f"launcher: phase_limits_s.{phase}", limit_s, above=0, unit="seconds")
        for name in ("collective_timeout_s", "failure_grace_s", "device_free_limit_s", "lease_s", "point_deadline_s"):
            with mistakes.collected():
                if name != "point_deadline_s" or self.point_deadline_s is not None:
                    number(f"launcher: {name}", getattr(self, name), above=0, unit="seconds")
        for name in ("node_check", "exclude_slow_nodes"):
            with mistakes.collected():
                if name != "node_check" or self.node_check is not None:
                    flag(f"launcher: {name}", getattr(self, name))
        mistakes.refuse()

    @property
    def checks_nodes(self) -> bool:
        """Whether a pilot measures its nodes before the first point."""
        return self.device == "cuda" if self.node_check is None else self.node_check

    def phase_limit_s(self, phase: str) -> float:
        """Maximum seconds without a heartbeat in ``phase``. ``done`` counts as teardown: only the exit is left."""
        key = "teardown" if phase == "done" else phase
        return self.phase_limits_s.get(key, PHASE_LIMITS_S[key])


def settings_to_dict(settings: LaunchSettings) -> dict[str, Any]:
    """Plain data, ready for JSON."""
    return dataclasses.asdict(settings) | {"cluster": to_dict(settings.cluster)}


def settings_from_dict(fields: Mapping[str, Any]) -> LaunchSettings:
    """Inverse of `settings_to_dict`. Raises `InvalidSweep` with the name of an unknown or missing field."""
    values = dict(fields)
    if "cluster" in values:
        values["cluster"] = cluster_from_dict(mapping("launcher: cluster", values["cluster"]))
    if "measure" in values:
        values["measure"] = build(MeasureSpec, "launcher: measure", mapping("launcher: measure", values["measure"]))
    return build(LaunchSettings, "launcher", values)
