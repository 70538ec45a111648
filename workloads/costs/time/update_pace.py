"""How long the device's update of a parameter takes, as bytes that the memory moves in that time.

AdamW in fp32 is bound by the memory: its 40 bytes a parameter set the scale. Others take longer than their bytes:
Adafactor is a row of single operations, half of them reductions, and rounding stochastically computes Philox's ten
rounds for each number. Measured on one H200 with Llama 1B (results/recorded/h200x1_updates/NOTE.md): AdamW 10.18 ms,
Adafactor 38.43 ms for 88 bytes, one number in bf16 11.04 ms, two and three 13.06 and 13.12 ms.
"""

from __future__ import annotations

from workloads.spec.updates.optimizer import OptimizerSpec

_ADAMW_S, _ADAMW_BYTES = 10.18e-3, 40
ADAFACTOR_PACE = _ADAMW_S / _ADAMW_BYTES * 88 / 38.43e-3
"""Bytes a second that Adafactor moves over those of AdamW."""
ROUNDED_BYTES = tuple(seconds / _ADAMW_S * _ADAMW_BYTES for seconds in (0.0, 11.04e-3, 13.06e-3, 13.12e-3))
"""Least bytes of an update by how many numbers of a parameter it rounds."""


def paced_bytes(spec: OptimizerSpec) -> int:
    """Bytes that AdamW in fp32 would move while one parameter is updated, with its norm and its clipping."""
    rounded = (spec.moments if spec.moment_bytes == 2 else 0) + (spec.master_bytes == 2)
    moved = spec.traffic_bytes / (ADAFACTOR_PACE if spec.keeps_lines else 1.0)
    return round(max(moved, ROUNDED_BYTES[rounded]))
