"""Power of a cluster's devices, for the energy of layouts that have not run: the mean that rows of such devices have
measured, as it is, and their limit as an upper bound."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from results.text.numbers import plural
from workloads.spec.cluster import ClusterSpec

JOULES = ".3g"
"""How tables format joules of a token."""
_WH_PER_MWH = 1e6


class MeasuredPower(NamedTuple):
    """Power of one device over the timed steps of measured rows, in watts."""

    mean_w: float
    least_w: float
    most_w: float
    rows: int


def power_of_rows(rows: Iterable[Mapping[str, Any]]) -> MeasuredPower | None:
    """Power of rows, each with the same weight, by their ``power_w``; None if no row has it."""
    watts = [row["power_w"] for row in rows if row["power_w"]]
    return MeasuredPower(statistics.fmean(watts), min(watts), max(watts), len(watts)) if watts else None


class Amount(NamedTuple):
    """An amount of energy."""

    measured: float | None
    """By the measured power; None: none was measured."""
    most: float | None
    """By the power limit: an upper bound; None: the limit is not known."""

    def cell(self, decimals: str) -> str:
        """The amount in a table, ``at most`` written as ``≤``; empty if nothing is known."""
        if self.measured is not None:
            return format(self.measured, decimals)
        return f"≤ {format(self.most, decimals)}" if self.most is not None else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What is known of the power of one device, without hosts, network and cooling."""

    device: str
    measured: MeasuredPower | None = None
    limit_w: float | None = None

    @classmethod
    def of(cls, cluster: ClusterSpec, measured: MeasuredPower | None) -> Power:
        return cls(device=cluster.device.name, measured=measured, limit_w=cluster.device.power_w)

    @property
    def is_known(self) -> bool:
        return self.measured is not None or self.limit_w is not None

    def joules_per_token(self, tokens_per_s_per_device: float | None) -> Amount:
        """Joules of all devices for one token: watts of a device over its tokens per second."""
        rate = tokens_per_s_per_device
        return Amount(*(watts / rate if watts is not None and rate else None for watts in self._watts()))

    def mwh(self, device_hours: float) -> Amount:
        """Megawatt-hours of so many device-hours."""
        return Amount(*(watts * device_hours / _WH_PER_MWH if watts is not None else None for watts in self._watts()))

    @property
    def source(self) -> str | None:
        """One line on where the power is from; None: it is not known."""
        if self.measured is not None:
            mean, least, most, rows = self.measured
            return (
                f"{mean:.0f} W a device, the mean of {plural(rows, 'measured row')} of {self.device} "
                f"({least:.0f} to {most:.0f} W), whatever they ran"
            )
        if self.limit_w is not None:
            return f"at most, by the power limit of {self.device}, {self.limit_w:g} W; no row has its measured power"
        return None

    def _watts(self) -> tuple[float | None, float | None]:
        return self.measured.mean_w if self.measured is not None else None, self.limit_w
