"""Fused operations of the transformer: the memory-bound parts between its matmuls.

Each is one autograd function that saves the same tensors whichever backend computes it, so memory traced without a GPU
is the GPU's. `backend` says who computes what; the Triton kernels are in ``triton_*.py`` and imported at first use.
"""

from workloads.engine.ops.linear_cross_entropy import linear_cross_entropy
from workloads.engine.ops.rms_norm import rms_norm
from workloads.engine.ops.rope import apply_rope
from workloads.engine.ops.swiglu import swiglu

__all__ = ["apply_rope", "linear_cross_entropy", "rms_norm", "swiglu"]
