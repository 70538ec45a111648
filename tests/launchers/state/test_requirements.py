"""Wall time that points need."""

from __future__ import annotations

from launchers.state.requirements import needed_s
from tests.launchers.scripted import points, settings


def test_a_point_is_given_its_predicted_time_with_room_and_never_more_than_its_deadline() -> None:
    import dataclasses

    [point] = points("ok", deadline_s=600.0)
    assert needed_s(point, settings()) == 600.0
    predicted = dataclasses.replace(point, predicted_step_time_s=10.0)
    assert needed_s(predicted, settings()) == 30.0 + 1.5 * 3 * 10.0
    assert needed_s(dataclasses.replace(point, predicted_step_time_s=1e4), settings()) == 600.0
