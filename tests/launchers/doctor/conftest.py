"""The fake cluster of the tests of Slurm runs."""

from __future__ import annotations

from tests.launchers.slurm.conftest import fake as fake
