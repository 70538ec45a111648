"""Heartbeats: how a rank tells its node's agent where it is, in memory that both share, without a file or a message.

The agent makes one `HeartbeatSlot` for a rank before it forks the rank. The rank writes its latest heartbeat there at
every change of phase and at every step; a write is a copy of about a hundred bytes, cannot block, and replaces the one
before. The agent reads the slot when it likes. It sends what has changed to the pilot, in one message for all ranks of
the node (`launchers.node.agent` describes it). So ranks may beat a thousand times a second, and neither the network nor
a shared disk notices.

A slot holds the length and the CRC-32 of a text, then the text: a heartbeat as JSON. A reader that meets a half-written
slot sees that the sum does not fit, and keeps what it knew.
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
    """Where one rank was last."""

    rank: int
    phase: Phase
    step: int | None
    """Number of the step, from 0 with the first warm-up step; None in phases without steps."""
    time: float
    """Unix time in seconds, by the clock of the rank's node."""
    pid: int
    """On the rank's node."""
    failed: bool = False
    """The rank has failed and has written why; only its exit is left."""


class Beat(Protocol):
    """What a rank calls when it enters a phase or a step."""

    def __call__(self, phase: Phase, step: int | None = None, *, failed: bool = False) -> None: ...


class HeartbeatSlot:
    """Memory for the latest heartbeat of one rank, shared with processes that are forked later."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SLOT_BYTES)

    def writer(self, rank: int) -> Beat:
        """What the process of ``rank`` calls after the fork."""

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
