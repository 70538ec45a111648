"""What a step loses where memory is nearly full: the allocator stops to free what it had kept.

PyTorch's allocator keeps freed blocks for each stream apart, and parts of large blocks once they are taken for small
tensors. So before the tensors alone fill a device nothing is left to take; then every rank waits for the device, gives
cached blocks back and takes new ones, a few times in every step (``allocator_retries``).

From recorded runs of one to four H200 and two H100 (docs/accuracy.md). While gathered weights and reduced gradients had
memory of their own streams, none of 481 runs whose tensors needed less than 0.75 of the device's own memory stopped,
and 31 of 36 that needed 0.8 and more did, one to four times a step and rank; half of them lost 30 ms and more each time
on H200, 60 on H100. Since gradients take what activations have freed (`workloads/engine/training/gradient_memory.py`;
most of these runs with a variant of it that also reduces on the stream of compute) two of seventeen runs of H100
between 0.74 and 0.94 stopped in their steps, those that needed 0.89 and 0.935, and one of 0.82 stopped once; of the 29
of a draw with what ships, up to 0.91, none did.
"""

from __future__ import annotations

FROM = 0.88
"""Share of a device's memory, as its file in ``conf/device`` states it, from which it happens."""
SECONDS = 0.8
"""Lost in a step, for each 1.0 of the share above that."""
WIDER = 2.5
"""How many times that it may be in the worst of twenty; in the best it is nothing."""


def freeing_s(peak_bytes: int, memory_bytes: int, start: float = FROM) -> float:
    """Seconds that a step loses. ``peak_bytes``: of tensors on the fullest device, which has ``memory_bytes``."""
    return SECONDS * max(0.0, min(1.0, peak_bytes / memory_bytes) - start)
