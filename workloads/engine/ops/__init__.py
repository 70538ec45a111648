"""Fused operations of the transformer: the memory-bound parts between its matmuls.

Each is one autograd function that saves the same tensors on every backend, so memory traced without a GPU equals the
GPU's. `backend` chooses the backend; the Triton kernels are in ``triton_*.py`` and imported at first use.
"""
