"""The work of a run with many points does not repeat what was done for each of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.state.point_index import LEAST
from tests.launchers.many_points import ManyPoints, jobs

pytestmark = pytest.mark.slow


@pytest.mark.slow(seconds=3)
def test_only_the_first_command_opens_a_file_for_each_point(tmp_path: Path) -> None:
    many = ManyPoints(tmp_path, LEAST)
    first = many.run("--detach")
    assert first.opens > LEAST and jobs(first.output) == 4
    again, look = many.run("--detach"), many.measured("tests.launchers.first_look", str(many.sweep))
    assert again.opens < LEAST
    assert look.output == f"{LEAST}\n" and look.opens < 10
