"""Writes, on request of the launcher, the last collectives of a rank from torch's flight recorder, to show where it
waits.

The main thread of a hanging rank is blocked in C++, so it runs no Python signal handler. But Python's C handler still
writes a byte to a pipe. A second thread reads that pipe, and it can run, because a waiting collective does not hold the
interpreter's lock.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workloads.contract import protocol

ENTRIES = 20
"""Number of last collectives of a rank that are written."""


def answer_requests(folder: Path, rank: int, device: str) -> None:
    """Start to write ``rank_r.flight.json`` whenever the signal `protocol.FLIGHT_SIGNAL` arrives.

    Call this on the main thread, before the process group is created.
    """
    if device == "cpu":  # NCCL records by default, gloo only with a buffer size
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(protocol.FLIGHT_SIGNAL, lambda _number, _frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def answer() -> None:
        while number := os.read(reader, 1):
            if number[0] == protocol.FLIGHT_SIGNAL:
                write_flight(folder, rank)

    threading.Thread(target=answer, name="flight", daemon=True).start()


def write_flight(folder: Path, rank: int) -> None:
    """Write the last collectives of this rank, oldest first; the list is empty if torch keeps no record."""
    entries = [_entry(entry) for entry in _recorded()[-ENTRIES:]]
    protocol.write_json(protocol.flight_path(folder, rank), {"rank": rank, "entries": entries})


def _recorded() -> list[dict[str, Any]]:
    import torch._C._distributed_c10d as c10d

    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump: Callable[..., bytes] | None = getattr(c10d, name, None)
        if dump is None:
            continue
        try:
            record = json.loads(dump(includeCollectives=True, onlyActive=False))
        except (RuntimeError, ValueError):
            continue
        if record.get("entries"):
            return list(record["entries"])
    return []


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "operation": entry.get("profiling_name"),
        "group": (entry.get("process_group") or [None])[-1],
        "number": entry.get("p2p_seq_id") if entry.get("is_p2p") else entry.get("collective_seq_id"),
        "sizes": entry.get("input_sizes"),
        "state": entry.get("state"),
        "retired": entry.get("retired"),
    }
