"""How long the device's update of a parameter takes, as bytes that the memory moves in that time.

AdamW in fp32 is bound by the memory: its 40 bytes a parameter set the scale. Others take longer than their bytes.
Rounding stochastically computes Philox's ten rounds for each number. Measured on one H200 with Llama 1B
(results/recorded/h200x1_updates/NOTE.md): AdamW 10.18 ms, one number in bf16 11.04 ms, two and three 13.06 and 13.12
ms. SGD is torch's fused kernel after a pass that clips, 43.4 of these bytes (DeepSeek-V2-Lite with 10 layers 50.3 ms,
of which that pass takes 12.5; Nemotron 3 Nano with 14 layers 76.5 ms), and since version 7 of the engine one pass of a
Triton kernel, 29.5 of them (34.2 and 51.8 ms).

Adafactor is a row of some thirty single operations for equal matrices of a layer, such as its experts' down
projections: a third of them read and write all elements, the others so few numbers that they take as long as a kernel
does at least. Ten updates in captured steps of Llama 1B and 3B, SmolLM 1.7B and Qwen3-30B-A3B on one and two H200 (tp,
ZeRO 1 and 3, ep), 0.6 to 3.2 billion parameters and 58 to 169 such rows on a rank, are 24.0 ps a parameter and 80 us a
row, 2 % off in the mean square and 5 % at most.
"""

from __future__ import annotations

from workloads.costs.shape.partition import StageParams
from workloads.costs.shape.updates import rank_matrices
from workloads.spec.engine_versions import BEFORE_7
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import optimizer_of

_ADAMW_S, _ADAMW_BYTES, _LLAMA_1B = 10.18e-3, 40, 1.2358e9
ADAFACTOR_PACE = _ADAMW_S / _ADAMW_BYTES * 88 / (24.0e-12 * _LLAMA_1B)
"""Bytes a second that Adafactor moves over those of AdamW."""
ADAFACTOR_ROW_S = 80e-6
"""Seconds of the kernels of a row of operations on equal matrices of a layer, as far as these have no elements."""
ROUNDED_BYTES = tuple(seconds / _ADAMW_S * _ADAMW_BYTES for seconds in (0.0, 11.04e-3, 13.06e-3, 13.12e-3))
"""Least bytes of an update by how many numbers of a parameter it rounds."""


_SGD_APART_BYTES, _SGD_BYTES = 43.4, 29.5
"""Bytes of SGD that clips in a pass of its own, and in the kernel's."""


def paced_bytes(e: Experiment) -> int:
    """Bytes that AdamW in fp32 would move while one parameter is updated, with its norm and its clipping."""
    spec = optimizer_of(e)
    if spec.name == "sgd":
        return round(_SGD_APART_BYTES if e.engine_version in BEFORE_7 else _SGD_BYTES)
    rounded = (spec.moments if spec.moment_bytes == 2 else 0) + (spec.master_bytes == 2)
    moved = spec.traffic_bytes / (ADAFACTOR_PACE if spec.keeps_lines else 1.0)
    return round(max(moved, ROUNDED_BYTES[rounded]))


def rows_of_operations_s(e: Experiment, held: StageParams) -> float:
    """Seconds that an update of a rank that holds ``held`` takes whatever the size of its matrices; 0 for an optimizer
    whose operations are few."""
    if not optimizer_of(e).keeps_lines:
        return 0.0
    return ADAFACTOR_ROW_S * sum(one.number // one.together for one in rank_matrices(e, held))
