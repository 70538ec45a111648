"""Settings of launchers: stored and read again, and refused where they are invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launchers.settings import settings_from_dict, settings_to_dict
from tests.launchers.scripted import settings
from workloads.spec.errors import InvalidSweep


def test_settings_survive_the_trip_through_json() -> None:
    before = settings(point_deadline_s=5.0, method="rehearsed")
    assert settings_from_dict(json.loads(json.dumps(settings_to_dict(before)))) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "num_devices=0 must be a whole number of at least 1"),
        ({"phase_limits_s": {"stepp": 1.0}}, "no phase stepp; it has spawn, rendezvous"),
        ({"phase_limits_s": {"step": 0.0}}, "phase_limits_s.step=0.0 must be a number of seconds above 0"),
        ({"point_deadline_s": -1.0}, "point_deadline_s=-1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSweep, match=message):
        settings(**changes)
    with pytest.raises(InvalidSweep, match="launcher: no option 'numdevices'; did you mean 'num_devices'"):
        settings_from_dict({"numdevices": 8})
