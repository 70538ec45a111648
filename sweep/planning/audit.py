"""`plan.audit`: selects points predicted not to fit that are run on purpose, to reveal wrong refusals."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

RULE = "audit"
"""Value of the ledger's column ``rule`` for audited points."""


def chosen(ids: Iterable[str], share: float, seed: int) -> frozenset[str]:
    """Returns a share of the experiment ids, rounded up: a share above 0 of a non-empty list selects at least one.

    The selection depends only on the seed and the ids: a repeated plan selects the same ones, and a plan with a few
    more points nearly the same.
    """
    order = sorted(set(ids), key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    return frozenset(order[: math.ceil(share * len(order) - 1e-9)])
