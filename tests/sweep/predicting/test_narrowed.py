"""By how much measurements narrow intervals: said by ``plan`` and ``advise``, in words and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sweep.__main__ import main
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import read_known
from sweep.predicting.narrowed import narrowed
from tests.sampling import sampled
from tests.sweep.predicting.measured_rows import H200, of, slow_rows

ADVISE = ("advise", "model=llama1b", "cluster=h200", "gpus=8", "global_batch_size=64", "pp=1", "cp=1", "tp=1")
PLAN = ("plan", "+grid=one_point", "model=llama1b", "cluster=h200")


def test_measured_rows_narrow_intervals(tmp_path: Path) -> None:
    slow_rows("h200", tmp_path, 1.1)
    experiments = [of(dp=8, zero_stage=zero) for zero in (0, 1, 3)]
    assert narrowed(Forecast.of(H200), experiments) is None
    measured = Forecast.of(H200, read_known(H200, tmp_path))
    found = narrowed(measured, experiments)
    assert found is not None and narrowed(measured, []) is None
    assert found.with_measurements < 0.8 * found.without
    (time,) = Forecast.of(H200).times(experiments[:1])
    assert time is not None and found.without == pytest.approx(time.high_s / time.step_time_s - 1, rel=0.05)
    assert found.in_words == f"± {100 * found[0]:.0f} % (± {100 * found[1]:.0f} % with nothing measured)"


@pytest.mark.parametrize("command", sampled([(ADVISE,), (PLAN,)], 1, seconds=5))
def test_commands_say_it(command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, f"results_dir={tmp_path / 'none'}"]) == 0
    assert "with nothing measured" not in capsys.readouterr().out
    slow_rows("h200", tmp_path, 1.1)
    assert main([*command, f"results_dir={tmp_path}"]) == 0
    said = re.search(r"6 measured experiments on h200.*± (\d+) % \(± (\d+) % with nothing measured\)", _text(capsys))
    assert said is not None and int(said[1]) < int(said[2])
    assert main([*command, f"results_dir={tmp_path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [round(100 * found[name]) for name in ("half_interval", "half_interval_unmeasured")] == [
        *(int(said[1]), int(said[2]))
    ]


def _text(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())
