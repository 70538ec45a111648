"""What is known of a code base before any of its rows is seen: a profile, read from a data file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one code base lays a model out and what its steps are made of."""

    name: str
    also: tuple[str, ...] = ()
    """Other names of it, without regard to case, signs and what follows."""
    partition: str = "equal"
    """A rule of `workloads.predict.stages`."""
    gated: bool | None = True
    """Whether feed-forward layers have a gate; None: read from their size."""
    sequence_parallel: bool = True
    attention: str = "flash"
    """``flash`` or ``unfused``."""
    recompute_stops_early: bool = False
    """Whether full recomputation ends with the last tensor that backward needs."""
    host_runs_ahead: bool = False
    """Whether the host issues what follows a pipeline message before the message is there."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 44.0
    sharding: int = 0
    """ZeRO stage where a table does not say it."""
    host_launch_s: float | None = None
    """Seconds to launch one small operation on the hosts of which ``time`` tells; None: not known."""
    host_spread: float = 1.0
    """Factor on the spreads of what the host has to do: below 1 where rows of many hosts have told it."""
    host_noise: float = 2.0
    """How much noisier a row is whose pace the host sets, over one whose pace the device sets, less 1."""
    slow_host_below: float | None = None
    """B/s of the all-reduce inside a node below which hosts are slow to issue tensor-parallel layers."""
    slow_message_versions: tuple[str, ...] = ()
    """Regular expressions of versions whose pipeline messages are slow."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Values of `workloads.predict.parameters.TIME` that differ from the general ones."""
    memory: Mapping[str, float] = field(default_factory=dict)
    reserved_of: str = "peak"
    """Whose reserved memory its tables tell: of the ``first`` rank, or of the fullest, ``peak``."""
    source: str = ""

    def has_slow_messages(self, version: str) -> bool:
        return any(re.search(pattern, version, re.IGNORECASE) for pattern in self.slow_message_versions)


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """A name without case and signs: ``Megatron-LM`` and ``megatron_lm`` are one."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_profile(name: str, profiles: Iterable[Profile], general: Profile) -> Profile:
    """The profile of a code base by its name in a table; ``general`` where none is known."""
    wanted = plain(name)
    best, length = general, 0
    for profile in profiles:
        for known in (profile.name, *profile.also):
            key = plain(known)
            if key and wanted.startswith(key) and len(key) > length:
                best, length = profile, len(key)
    return best
