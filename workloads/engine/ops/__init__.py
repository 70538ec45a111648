"""Fused operations of the transformer: the memory-bound parts between its matmuls.

Each is one autograd function that saves the same tensors whichever backend computes it, so memory traced without a GPU
is the GPU's. `backend` chooses between them; the Triton kernels are in ``triton_*.py`` and imported at first use.
"""
