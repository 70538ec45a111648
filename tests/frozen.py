"""Imported last by a fork server of tests: collections in processes that it forks pass over what it has imported."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
