"""The host of a node's devices, as far as an optimizer that lives there needs it. Unknown values are None."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """Processors and memory of one node, and the links to its devices."""

    link_bandwidth: float | None = None
    """Bytes per second that one device and the memory of its host exchange in each direction, both at once, through
    pinned memory and with all devices of the node at work."""
    memory_bytes: int | None = None
    """Memory of one node; None: not known, so it is not checked."""
    memory_bandwidth: float | None = None
    """Bytes per second of the memory of one node, all processors together."""
    adamw_rate: float | None = None
    """fp32 parameters that the processors of one node update per second by AdamW; None: derived from
    ``memory_bandwidth``."""
    source: str = ""
    """Source of the numbers."""


UNKNOWN = HostSpec()
"""A host of which nothing is known."""
