"""Step time lost when memory is nearly full: the allocator stops to free its cached blocks.

PyTorch's allocator caches freed blocks separately for each stream, and keeps parts of large blocks once small tensors
use them. So no block is left before the tensors alone fill a device. Then every rank waits for the device, returns
cached blocks and allocates new ones, a few times in every step (``allocator_retries``).

The numbers are from recorded runs of one to four H200 and two H100 (docs/accuracy_details.md). While gathered weights
and reduced gradients had memory of their own streams, none of 481 runs whose tensors needed less than 0.75 of the
device's memory stopped, and 31 of 36 that needed 0.8 and more did, one to four times per step and rank; half of them
lost 30 ms and more each time on H200, 60 on H100. Since gradients reuse the memory of freed activations
(`workloads/engine/training/gradient_memory.py`; most of these runs with a variant of it that also reduces on the
compute stream), two of seventeen runs of H100 between 0.74 and 0.94 stopped in their steps, those that needed 0.89 and
0.935, and one of 0.82 stopped once; of the 29 of a sample with the released version, up to 0.91, none did.
"""

from __future__ import annotations

FROM = 0.88
"""Share of a device's memory, as stated in its file in ``conf/device``, above which steps lose time."""
SECONDS = 0.8
"""Seconds lost in a step for each 1.0 of the share above `FROM`."""
WIDER = 2.5
"""Factor on the lost time in the worst of twenty runs; in the best nothing is lost."""


def freeing_s(peak_bytes: int, memory_bytes: int, start: float = FROM) -> float:
    """Seconds that a step loses. ``peak_bytes``: bytes of tensors on the fullest device, which has ``memory_bytes``."""
    return SECONDS * max(0.0, min(1.0, peak_bytes / memory_bytes) - start)
