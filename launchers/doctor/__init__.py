"""``python -m sweep doctor``: checks what must be true on a compute node, on the node itself."""
