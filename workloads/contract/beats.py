"""Heartbeats: each rank reports its phase and step to its node's agent through shared memory, without files or
messages.

The agent makes one `HeartbeatSlot` for a rank before it forks the rank. The rank writes its latest heartbeat there at
every change of phase and at every step. A write copies about a hundred bytes, cannot block, and replaces the previous
heartbeat. The agent reads the slot whenever it likes and sends what has changed to the pilot, in one message for all
ranks of the node (see `launchers.node.agent`). So a thousand heartbeats a second per rank load neither the network nor
a shared disk.

A slot holds the length and the CRC-32 of a text, then the text: a heartbeat as JSON. If a reader meets a half-written
slot, the checksum does not match, and the reader keeps the previous heartbeat.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import time
import zlib
from dataclasses import dataclass
from typing import Protocol

from workloads.contract.protocol import Phase

_SLOT_BYTES = mmap.PAGESIZE
_HEAD = struct.Struct("<HI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The latest reported position of one rank."""

    rank: int
    phase: Phase
    step: int | None
    """Number of the step, from 0 with the first warm-up step; None in phases without steps."""
    time: float
    """Unix time in seconds, by the clock of the rank's node."""
    pid: int
    """Process id on the rank's node."""
    failed: bool = False
    """The rank has failed and has written its error file; it is about to exit."""


class Beat(Protocol):
    """Function that a rank calls when it enters a phase or a step."""

    def __call__(self, phase: Phase, step: int | None = None, *, failed: bool = False) -> None: ...


class HeartbeatSlot:
    """Memory for the latest heartbeat of one rank, shared with processes that are forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOT_BYTES)

    def writer(self, rank: int) -> Beat:
        """Returns the function with which the process of ``rank`` writes its heartbeats after the fork."""

        def beat(phase: Phase, step: int | None = None, *, failed: bool = False) -> None:
            self.write(Heartbeat(rank=rank, phase=phase, step=step, time=time.time(), pid=os.getpid(), failed=failed))

        return beat

    def write(self, heartbeat: Heartbeat) -> None:
        """Replace the heartbeat in the slot."""
        text = json.dumps(dataclasses.asdict(heartbeat)).encode()
        whole = _HEAD.pack(len(text), zlib.crc32(text)) + text
        self._memory[: len(whole)] = whole

    def read(self) -> Heartbeat | None:
        """The latest heartbeat; None before the first one, and while it is being written."""
        length, checksum = _HEAD.unpack_from(self._memory)
        text = self._memory[_HEAD.size : _HEAD.size + length]
        if not length or zlib.crc32(text) != checksum:
            return None
        return Heartbeat(**json.loads(text))
