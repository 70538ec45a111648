"""Updates of weights from gradients, over plain tensors: one kernel for each tensor, or torch's."""
