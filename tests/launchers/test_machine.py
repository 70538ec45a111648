"""Devices, ports, limits and the view: what a pilot needs to know of its machine and its user."""

from __future__ import annotations

import json
import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from launchers.attempt import watchdog
from launchers.attempt.watchdog import StalledRank
from launchers.node import devices, ports
from launchers.node.devices import CudaDevices, DeviceUnavailable, open_devices
from launchers.settings import settings_from_dict, settings_to_dict
from launchers.state.pilot_state import PilotState, Running
from launchers.state.process_identity import own_identity
from launchers.state.requirements import needed_s
from launchers.status.status import SweepStatus
from launchers.status.view import PlainView, render_status
from results.text import format_duration
from tests.launchers.scripted import points, settings
from tests.launchers.test_queue import attempt
from workloads.errors import InvalidSweep
from workloads.protocol import Heartbeat

GIB = 2**30


class FakeNvml:
    """Four GPUs; what each holds may change between two looks."""

    class NVMLError(Exception):
        pass

    def __init__(self, used: list[list[int]]) -> None:
        self.used = used
        self.looks = [0] * len(used)

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}aaa"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        values = self.used[handle]
        value = values[min(self.looks[handle], len(values) - 1)]
        self.looks[handle] += 1
        return SimpleNamespace(used=value)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return [SimpleNamespace(pid=4242)]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(used: list[list[int]], visible: str | None = None) -> FakeNvml:
        fake = FakeNvml(used)
        monkeypatch.setattr(devices, "_nvml", lambda: fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return fake

    return install


def test_memory_that_becomes_free_is_waited_for(nvml: Any) -> None:
    fake = nvml([[GIB // 4], [0]])
    cuda = CudaDevices(2)
    fake.used[0] = [*[70 * GIB] * 5, *[30 * GIB] * 5, GIB // 4 + 1000]
    beats: list[int] = []
    assert cuda.wait_until_free(2, 5.0, lambda: beats.append(1)) is None
    assert len(beats) >= 5
    fake.used[0] = [*[70 * GIB] * 5000]
    assert cuda.wait_until_free(2, 0.05, lambda: None) is not None


def test_memory_that_stays_is_told_with_its_size_and_holder(nvml: Any) -> None:
    fake = nvml([[0], [0]])
    cuda = CudaDevices(2)
    fake.used[1] = [12 * GIB]
    held = cuda.wait_until_free(2, 0.05, lambda: None)
    assert held == "GPU 1 still holds 12288 MiB (pids 4242) 0 s after the last process had gone"


def test_only_the_devices_of_the_point_must_be_free(nvml: Any) -> None:
    fake = nvml([[0], [0]])
    cuda = CudaDevices(2)
    fake.used[1] = [12 * GIB]
    assert cuda.wait_until_free(1, 0.05, lambda: None) is None


def test_memory_of_others_is_told_and_does_not_hold_the_sweep_up(nvml: Any) -> None:
    nvml([[3 * GIB]])
    cuda = CudaDevices(1)
    assert cuda.notes() == ["GPU 0 already holds 3.00 GiB of memory (pids 4242); points on it will have that much less"]
    assert cuda.wait_until_free(1, 0.05, lambda: None) is None


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        (None, ("GPU-0aaa", "GPU-1aaa", "GPU-2aaa", "GPU-3aaa")),
        ("2,0", ("GPU-2aaa", "GPU-0aaa")),
        ("GPU-3aaa,GPU-1", ("GPU-3aaa", "GPU-1aaa")),
        ("1,9,2", ("GPU-1aaa",)),
    ],
)
def test_devices_are_those_that_the_scheduler_gave_in_its_order(
    nvml: Any, visible: str | None, ids: tuple[str, ...]
) -> None:
    nvml([[0]] * 4, visible)
    assert CudaDevices(len(ids)).ids == ids


def test_devices_that_are_not_there_are_refused(nvml: Any) -> None:
    def broken() -> None:
        raise DeviceUnavailable("needs a driver")

    nvml([[0]], "")
    with pytest.raises(DeviceUnavailable, match="needs a driver"):
        devices._in_child(broken, 5.0, lambda: None)
    with pytest.raises(DeviceUnavailable, match="did not answer within 0 s"):
        devices._in_child(lambda: time.sleep(30), 0.05, lambda: None)
    with pytest.raises(DeviceUnavailable, match="num_devices=8 GPUs were asked for; this machine shows 0"):
        open_devices("cuda", 8)
    assert open_devices("cpu", 8).ids is None


def test_a_reserved_port_is_free_for_a_rank_and_no_other_pilots() -> None:
    with ports.reserve_port() as first, ports.reserve_port() as second:
        assert first != second
        with socket.socket() as rank:
            rank.bind(("", first))
            rank.listen()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other, pytest.raises(OSError):
            other.bind(("127.0.0.1", first))


def test_no_port_is_one_that_the_kernel_gives_to_outgoing_connections() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        assert listener.getsockname()[1] not in ports._candidates()


@pytest.mark.parametrize(
    ("position", "longest_step_s", "expected_step_s", "limit_s"),
    [
        (("build", None), None, None, 600.0),
        (("warmup", 0), None, 100.0, 2000.0),  # 20 predicted steps
        (("step", 2), None, None, 600.0),
        (("step", 2), 0.5, None, 30.0),  # steps of half a second: no need to wait ten minutes
        (("step", 2), 10.0, None, 200.0),
        (("step", 2), 90.0, None, 600.0),
        (("done", None), None, None, 10.0),
    ],
)
def test_limits_follow_what_steps_take(
    position: tuple[str, int | None], longest_step_s: float | None, expected_step_s: float | None, limit_s: float
) -> None:
    state = watchdog._Rank(longest_step_s=longest_step_s)
    phase, step = position
    rank = StalledRank(rank=0, phase=phase, step=step, age_s=0.0)
    assert watchdog._limit_s(rank, state, settings(phase_limits_s={}), expected_step_s) == limit_s


def test_the_rank_furthest_behind_is_blamed_not_those_that_wait_for_it() -> None:
    now = time.monotonic()

    def rank(phase: Any, step: int | None, age_s: float) -> Any:
        heartbeat = Heartbeat(rank=0, phase=phase, step=step, time=0.0, pid=1)
        return watchdog._Rank(heartbeat=heartbeat, since=now - age_s)

    strict = settings(phase_limits_s={"step": 5.0, "teardown": 1.0})
    ranks = {0: rank("step", 4, 6.0), 1: rank("step", 3, 6.0), 2: rank("step", 4, 6.0)}
    assert [stalled.rank for stalled in watchdog._stalled(ranks, {}, strict, None)] == [1]
    ranks = {0: rank("step", 4, 4.0), 1: rank("step", 3, 4.0)}
    assert watchdog._stalled(ranks, {}, strict, None) == ()
    # Who has finished may wait in teardown as long as somebody still steps.
    ranks = {0: rank("teardown", None, 4.0), 1: rank("step", 3, 4.0)}
    assert watchdog._stalled(ranks, {}, strict, None) == ()
    ranks = {0: rank("teardown", None, 4.0), 1: rank("done", None, 0.0)}
    assert [stalled.rank for stalled in watchdog._stalled(ranks, {}, strict, None)] == [0]


def test_a_point_is_given_its_predicted_time_with_room_and_never_more_than_its_deadline() -> None:
    import dataclasses

    [point] = points("ok", deadline_s=600.0)
    assert needed_s(point, settings()) == 600.0
    predicted = dataclasses.replace(point, predicted_step_time_s=10.0)
    assert needed_s(predicted, settings()) == 30.0 + 1.5 * 3 * 10.0
    assert needed_s(dataclasses.replace(point, predicted_step_time_s=1e4), settings()) == 600.0


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


def status(**changes: Any) -> SweepStatus:
    running = Running(
        stem="s",
        attempt_id="a",
        experiment_id="llama-dp8",
        world_size=8,
        started_at=0.0,
        deadline_s=600.0,
        phase="step",
        step=4,
    )
    state = PilotState(
        pilot_id="p", identity=own_identity(), count=1, time=0.0, started_at=0.0, activity="running", running=(running,)
    )
    fields: dict[str, Any] = {
        "name": "study",
        "total": 10,
        "todo": 6,
        "claimed": 1,
        "done": {"ok": 2, "oom": 1},
        "pilots": (state,),
        "attempts": (attempt(1, "ok", tokens_per_s_per_gpu=11324.0), attempt(2, "oom")),
        "device_hours": 1.0,
        "expected_left_s": 4000.0,
    }
    return SweepStatus(**{**fields, **changes})


def test_the_live_view_tells_what_runs_what_is_left_and_what_failed() -> None:
    console = Console(record=True, width=160, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render_status(status()))
    text = console.export_text()
    for part in (
        "3/10 points",
        "ok 2",
        "oom 1",
        "7 left, about 67 min",
        "runs llama-dp8 on 8: in step 4",
        "11,324 tokens/s/GPU",
    ):
        assert part in text, part


def test_the_plain_view_prints_each_attempt_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView({"a1"})
    view.show(status())
    view.show(status())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("[3/10] oom")


def test_spans_are_for_people() -> None:
    assert [format_duration(s) for s in (4.2, 99.0, 150.0, 7500.0)] == ["4 s", "99 s", "2 min", "2 h 05 min"]
