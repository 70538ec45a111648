"""`plan.audit`: which points that are predicted not to fit run on purpose, so that wrong refusals are seen."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

RULE = "audit"
"""What the ledger's column ``rule`` has of them."""


def chosen(ids: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """A share of the experiments, rounded up, so that a share above 0 of any is at least one.

    Which ones depends on the seed and on their ids alone: a plan made again chooses the same, one of more points nearly
    so.
    """
    order = sorted(set(ids), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return frozenset(order[: math.ceil(share * len(order) - 1e-9)])
