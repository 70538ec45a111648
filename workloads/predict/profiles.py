"""Profiles: prior knowledge of a code base, read from a data file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

FORM_SPREAD = 0.15
"""Standard deviation of log(step seconds) around the closed form on a cluster without rows, beside what its parameters
have."""
BUCKET_OF_RANK = 1e6
"""Least parameters of a bucket for each of its ranks: Megatron-Core's DistributedDataParallel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """How one code base partitions a model and which properties its steps have."""

    name: str
    engine: str = ""
    """Value of the field ``engine`` whose rows this profile describes, `ANY_ENGINE` for engines without a profile;
    empty: the rows of tables."""
    engine_version: str = ""
    """Regular expression of the engine's versions to which the profile applies; empty: all."""
    also: tuple[str, ...] = ()
    """Other names of the code base; case, punctuation and suffixes are ignored."""
    partition: str = "equal"
    """Name of a rule of `workloads.predict.stages`."""
    ends_as_layers: bool = False
    """Whether a pipeline may count the embedding and the loss as layers (`workloads.predict.stages`)."""
    gated: bool | None = True
    """Whether feed-forward layers have a gate; None: derived from their size."""
    sequence_parallel: bool = True
    attention: str = "flash"
    """``flash`` or ``unfused``."""
    recompute_stops_early: bool = False
    """Whether full recomputation ends with the last tensor that backward needs."""
    host_runs_ahead: bool = False
    """Whether the host launches the work after a pipeline message before the message has arrived."""
    captures: str = ""
    """Steps whose passes are a CUDA graph, which no host launches: ``block``, those with ``compile=block``, which then
    have the kernels of eager ones; ``unpipelined``, all without a pipeline; ``dense``, all without routed experts;
    empty: none."""
    autocasts: bool = False
    """Whether weights that are not sharded stay in fp32, so that every product casts its operands (torch.autocast)."""
    adds: bool = False
    """Whether products add weight gradients to their sums; ``accumulate`` of ``time`` is then for that."""
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 44.0
    once_bytes: float = 0.0
    """Of these, what each stage of a pipeline moves before its first forward and in its last backward: stages do so one
    after another, not side by side as their optimizers."""
    sharding: int = 0
    """ZeRO stage if a table does not state it."""
    host_launch_s: float | None = None
    """Seconds to launch one small operation on the hosts to which the values of ``time`` apply; None: unknown."""
    host_spread: float = 1.0
    """Factor on the spreads of host parameters: below 1 if they come from rows of many hosts."""
    form_spread: float = FORM_SPREAD
    """`FORM_SPREAD` of layouts inside a node, or inside nodes that one link joins."""
    host_doubt: float = 0.0
    """What host-bound steps have in addition, since hosts differ."""
    host_noise: float = 2.0
    """Extra noise of a host-bound row: its noise divided by that of a device-bound row, minus 1."""
    slow_host_below: float | None = None
    """Bandwidth in B/s of the all-reduce inside a node below which hosts are slow to launch tensor-parallel layers."""
    slow_message_versions: tuple[str, ...] = ()
    """Regular expressions of versions whose pipeline messages are slow."""
    gather_keeping_versions: tuple[str, ...] = ()
    """Regular expressions of versions that keep the gathered inputs of tensor-parallel products for the backward."""
    time: Mapping[str, float] = field(default_factory=dict)
    """Values of `workloads.predict.parameters.TIME` that differ from the general ones."""
    memory: Mapping[str, float] = field(default_factory=dict)
    dispatches: bool = False
    """Whether a token goes once to every rank that has some of its experts (`workloads.predict.experts.dispatched`),
    rather than once to each of them."""
    fuses_experts: tuple[str, ...] = ()
    """Precisions in which the code base's recipes run the experts of a layer as one kernel, exchange tokens beside
    another micro-batch and capture whole passes as CUDA graphs."""
    states: str = ""
    """``bf16``: gradients, moments and weights have no copy in 32 bits."""
    gathers_once: bool = False
    """Whether ZeRO 3 with routed experts gathers weights and reduces gradients once a step, not in every
    micro-batch."""
    overlaps_messages: bool = False
    """Whether the bytes of messages travel beside the compute of other chunks under an interleaved schedule."""
    bucket: float = 0.0
    """Parameters of a bucket in which gradients are reduced, at least, and `BUCKET_OF_RANK` times the ranks; 0: layer
    by layer."""
    fitted_ring: float = 8.0
    """Most ranks of a ring in the rows from which ``ring_start`` was set."""
    fp8_hidden: float = 0.0
    """Values of 2 bytes, a token and hidden unit, by which a layer in fp8 keeps less."""
    fp8_ffn: float = 0.0
    """The same a token and feed-forward column."""
    reserved_of: str = "peak"
    """Rank whose reserved memory its tables contain: ``first``, or the fullest one, ``peak``."""
    source: str = ""

    def has_slow_messages(self, version: str) -> bool:
        return _is_one_of(self.slow_message_versions, version)

    def keeps_gathers(self, version: str) -> bool:
        return _is_one_of(self.gather_keeping_versions, version)


def _is_one_of(patterns: Iterable[str], version: str) -> bool:
    return any(re.search(pattern, version, re.IGNORECASE) for pattern in patterns)


ANY_ENGINE = "any"


@lru_cache(maxsize=4096)
def plain(name: str) -> str:
    """Name in lower case without punctuation: ``Megatron-LM`` and ``megatron_lm`` become equal."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_profile(name: str, profiles: Iterable[Profile], general: Profile) -> Profile:
    """Profile of a code base by its name in a table; ``general`` if none matches. The longest match wins."""
    wanted = plain(name)
    best, length = general, 0
    for profile in profiles:
        for known in (profile.name, *profile.also):
            key = plain(known)
            if key and wanted.startswith(key) and len(key) > length:
                best, length = profile, len(key)
    return best
