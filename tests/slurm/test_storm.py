"""Some minutes of virtual cluster time with faults by a seed; `python -m tests.slurm.storm` runs hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import sampled
from tests.slurm.storm.storm import Storm


@pytest.mark.slow
@pytest.mark.parametrize("seed", sampled(range(1, 9), 1, seconds=3))
def test_every_point_ends_with_one_final_row_whatever_fails(seed: int, tmp_path: Path) -> None:
    storm = Storm(tmp_path, seed, points_of=((1, 3), (2, 1)), lasts_s=150.0, every_s=8.0, longest_s=60.0)
    result = storm.run()
    assert not result.complaints, "\n".join([str(result), *storm.journal.lines()])
    assert result.final == result.points >= 4 and result.faults
