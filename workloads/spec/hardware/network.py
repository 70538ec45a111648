"""The network of a cluster: links, and the tiers of devices that they join, from the innermost outwards. No torch here.

A tier joins a number of consecutive devices; each of its *units* holds whole units of the next tier inwards, which its
link joins: the devices of a node by NVLink, the nodes of a rack, the racks under one leaf of switches, and all of these
by the spine. Ranks fill one unit after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from workloads.spec.checks import build, mapping, one_of, plausible, shown, whole_number
from workloads.spec.errors import InvalidSweep
from workloads.spec.mistakes import Mistakes
from workloads.spec.units import EXAMPLES, Unit, quantity

Range = tuple[float, float, str, str]
"""Smallest and largest plausible value, their unit, and an example of how to write such a quantity."""
BANDWIDTH: Range = (1e7, 1e13, "B/s", EXAMPLES["B/s"])
_LATENCY: Range = (0, 0.1, "s", EXAMPLES["s"])
RATES: Mapping[str, tuple[Unit, Range]] = {
    "bandwidth": ("B/s", BANDWIDTH),
    "latency_s": ("s", _LATENCY),
    "pair_bandwidth": ("B/s", BANDWIDTH),
    "pair_reduce_bandwidth": ("B/s", BANDWIDTH),
    "pair_exchange_bandwidth": ("B/s", BANDWIDTH),
    "pair_latency_s": ("s", _LATENCY),
}
"""Rates of a link, with their units and plausible values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """Rate at which one device can send (and receive at the same time) over one class of link."""

    bandwidth: float
    """Bytes per second and device that a large ring collective reaches (bus bandwidth)."""
    latency_s: float
    """Start-up time of one hop in seconds."""
    pair_bandwidth: float | None = None
    pair_reduce_bandwidth: float | None = None
    pair_exchange_bandwidth: float | None = None
    pair_latency_s: float | None = None
    """``pair_...``: rates of a group of two devices inside a node, if they are known to differ; ``reduce`` and
    ``exchange``: those of all-reduces and of all-to-alls, if these are known to differ from its others."""
    source: str = ""

    def scaled(self, share: float) -> Self:
        """The link with its bandwidths multiplied by ``share``."""
        known = {name: rate for name in RATES if "bandwidth" in name and (rate := getattr(self, name)) is not None}
        return dataclasses.replace(self, **{name: rate * share for name, rate in known.items()})

    @property
    def has_pair_rates(self) -> bool:
        return any(getattr(self, name) is not None for name in RATES if name.startswith("pair"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSpec(LinkSpec):
    """One tier of a network. ``bandwidth`` is what each device has for traffic that leaves its unit of the next tier
    inwards while all devices of that unit send: behind uplinks of half the rate it is half of a port."""

    devices: int | None = None
    """Number of devices of a unit; None for the outermost tier: not known, so no layout is too wide."""
    name: str = ""
    network: bool | None = None
    """Whether ranks reach each other through network adapters in this tier; None: if it is wider than the first tier
    that holds a whole node. Tiers that are no network form a *domain* (`ClusterSpec.domain`)."""

    @property
    def link(self) -> LinkSpec:
        return LinkSpec(**{field.name: getattr(self, field.name) for field in dataclasses.fields(LinkSpec)})


def tier_of(link: LinkSpec, devices: int | None, name: str, network: bool) -> TierSpec:
    """The tier of a link of the short form."""
    rates = {field.name: getattr(link, field.name) for field in dataclasses.fields(LinkSpec)}
    return TierSpec(**rates, devices=devices, name=name, network=network)


def with_names(tiers: Sequence[TierSpec], devices_per_node: int) -> tuple[TierSpec, ...]:
    """The tiers with a name, and with ``network`` true or false."""
    holding = next((at for at, tier in enumerate(tiers) if (tier.devices or 0) >= devices_per_node), len(tiers))
    return tuple(
        dataclasses.replace(
            tier,
            name=tier.name or (f"tier of {tier.devices} devices" if tier.devices else "outermost tier"),
            network=(tier.devices is None or at > holding) if tier.network is None else tier.network,
        )
        for at, tier in enumerate(tiers)
    )


def converted(place: str, values: Mapping[str, Any], units: Mapping[str, Unit]) -> dict[str, Any]:
    """The values with texts in units replaced by numbers. ``place`` is the text before the name of a value in
    messages."""
    numbers, mistakes = dict(values), Mistakes()
    for name, unit in units.items():
        if name in numbers:
            with mistakes.collected():
                numbers[name] = quantity(f"{place}{name}", numbers[name], unit)
    mistakes.refuse()
    return numbers


def amount(place: str, value: Any, *, unit: Unit, span: Range, optional: bool = False, may_be_0: bool = False) -> None:
    """Refuses a quantity that no hardware has."""
    if not ((value is None and optional) or (value == 0 and may_be_0)):
        plausible(place, quantity(place, value, unit), *span)


RATE_CHECKS: Mapping[str, Callable[[str, Any], None]] = {
    name: partial(amount, unit=unit, span=span, optional=name.startswith("pair"))
    for name, (unit, span) in RATES.items()
}
"""Check of each rate of a link by itself."""
_TWO = "[{devices: 8, bandwidth: 450 GB/s, latency_s: 3 us}, {bandwidth: 50 GB/s, latency_s: 10 us}]"
"""Tiers as a file may have them, for messages."""


def link_from_dict(place: str, fields: object, kind: type[LinkSpec] = LinkSpec) -> Any:
    """A link, or a tier, from plain data. Raises `InvalidSweep` for unknown and missing names and units."""
    rates, mistakes = mapping(place, fields), Mistakes()
    with mistakes.collected():
        rates = converted(f"{place}.", rates, {name: unit for name, (unit, _) in RATES.items()})
    with mistakes.collected():
        spec = build(kind, place, rates)
    mistakes.refuse()
    return spec


def tiers_from_dict(place: str, data: object) -> tuple[TierSpec, ...]:
    """Tiers from a list of plain data. Raises `InvalidSweep` as `link_from_dict`."""
    if not isinstance(data, (list, tuple)):
        raise InvalidSweep(f"{place}={shown(data)} must be a list of tiers from the innermost outwards, such as {_TWO}")
    listed, mistakes, tiers = list(data), Mistakes(), []
    if not listed:
        raise InvalidSweep(f"{place}=[] names no tier; leave it out or give the innermost one")
    for at, fields in enumerate(listed):
        with mistakes.collected():
            tiers.append(link_from_dict(f"{place}[{at}]", fields, TierSpec))
    mistakes.refuse()
    return tuple(tiers)


def check_tier_values(place: str, data: object, mistakes: Mistakes) -> None:
    """Checks each value of a list of tiers in plain data by itself."""
    for at, fields in enumerate(data if isinstance(data, (list, tuple)) else ()):
        if not isinstance(fields, Mapping):
            continue
        for name in (one for one in RATE_CHECKS if one in fields):
            with mistakes.collected():
                RATE_CHECKS[name](f"{place}[{at}].{name}", fields[name])
        with mistakes.collected():
            if fields.get("devices") is not None:
                whole_number(f"{place}[{at}].devices", fields["devices"], 1)
        with mistakes.collected():
            if fields.get("network") is not None:
                one_of(True, False).check(f"{place}[{at}].network", fields["network"])
        with mistakes.collected():
            if not isinstance(fields.get("name", ""), str):
                raise InvalidSweep(f"{place}[{at}].name={fields['name']!r} must be text; put it in quotes")


def check_tiers(place: str, tiers: Sequence[TierSpec], devices_per_node: int, nodes: int | None) -> None:
    """Raises `InvalidSweep` with every mistake in how tiers fit together and to the nodes."""
    wrong: list[str] = []
    for at, tier in enumerate(tiers):
        here = f"{place}[{at}]"
        if tier.devices is None and (at < len(tiers) - 1 or not at):
            wrong.append(f"{here}: devices must be given; only the outermost of several tiers may leave it out")
        if tier.devices is not None and max(tier.devices, devices_per_node) % min(tier.devices, devices_per_node):
            word = "is not a multiple of" if tier.devices > devices_per_node else "does not divide"
            wrong.append(f"{here}: devices={tier.devices} {word} devices_per_node={devices_per_node}")
        if tier.name and tier.name in [other.name for other in tiers[:at]]:
            wrong.append(f"{here}: name={tier.name} is that of another tier; explain tells tiers by their names")
        if at:
            wrong += _between(here, tier, f"{place}[{at - 1}]", tiers[at - 1])
    if wrong:
        raise InvalidSweep(*wrong)
    widest, named = tiers[-1].devices, with_names(tiers, devices_per_node)
    inside = max((tier.devices or 0 for tier in named if not tier.network), default=1)
    if inside < devices_per_node:
        raise InvalidSweep(
            f"{place}: the first tier of the network is inside a node of {devices_per_node} devices; list the tier "
            "that joins the devices of a node before it"
        )
    if widest is not None and nodes is not None and nodes * devices_per_node > widest:
        raise InvalidSweep(
            f"{place}: the outermost tier joins {widest} devices, fewer than the {nodes * devices_per_node} of "
            f"nodes={nodes} x devices_per_node={devices_per_node}"
        )


def _between(here: str, tier: TierSpec, before: str, inner: TierSpec) -> list[str]:
    """What is wrong with a tier beside the next one inwards."""
    wrong = []
    if tier.devices is not None and inner.devices is not None:
        if tier.devices <= inner.devices:
            wrong.append(
                f"{here}: devices={tier.devices} is not more than the {inner.devices} of {before}; tiers are listed "
                "from the innermost outwards"
            )
        elif tier.devices % inner.devices:
            wrong.append(f"{here}: devices={tier.devices} is not a multiple of the {inner.devices} of {before}")
    if tier.bandwidth > inner.bandwidth:
        wrong.append(
            f"{here}: bandwidth={tier.bandwidth:g} B/s of a device is more than the {inner.bandwidth:g} of {before} "
            "inside of it; give what a device has left of it when all of its unit send"
        )
    if tier.has_pair_rates:
        wrong.append(f"{here} has no pair rates; give them in the innermost tier")
    if inner.network and tier.network is False:
        wrong.append(f"{here}: network=false, but {before} inside of it is of the network")
    return wrong
