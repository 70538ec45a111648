"""What an optimizer keeps for each parameter."""

from __future__ import annotations

from typing import NamedTuple


class OptimizerSpec(NamedTuple):
    """State of an optimizer, sharded like the master weights."""

    name: str
    moments: int
    """Numbers that it keeps for each parameter between two updates, in the dtype of the master weights."""

    def state_bytes(self, master_bytes: int) -> int:
        """Bytes of the state of parameters whose master weights take ``master_bytes``."""
        return self.moments * master_bytes


ADAMW = OptimizerSpec(name="AdamW", moments=2)
"""Means of the gradients and of their squares (arXiv:1711.05101)."""
