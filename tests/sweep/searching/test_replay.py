"""``search --replay``: on a small table in every detail, and on the study's where it is there."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from docs.tools import draw_search_regret as search_regret
from docs.tools import search_under_noise
from results.errors import UltrasweepError
from results.tables import reference
from sweep.__main__ import main
from sweep.composing.search_settings import Settings
from sweep.predicting.measured_tables import RECORDED
from sweep.searching.baselines import at_random, by_hand, by_prediction, in_order
from sweep.searching.recorded import RecordedSpace, read_recorded, recorded_space
from sweep.searching.replay import CellResult, Trouble, coverage, quantiles, replay, settled
from sweep.searching.search_replay import SEARCH
from tests.sweep.searching.spaces import table

pytestmark = pytest.mark.drawn(one_in=2)

TROUBLE = Trouble(noise=0.05, failures=0.1, slow_node=1.3)
STUDY = Path(__file__).resolve().parents[4] / "shared" / "study" / "bench_final2_mfu2.csv"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "rows.csv"
    table().to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def recorded(written: Path) -> RecordedSpace:
    return recorded_space(read_recorded(written), calibrated=False)


@pytest.mark.slow
def test_a_space_has_every_layout_of_the_table_once(written: Path, recorded: RecordedSpace) -> None:
    frame = pd.read_csv(written)
    assert len(recorded.space) == len(frame)
    assert len(recorded.names) == len(recorded.space.cells) == 6
    assert sorted(recorded.step_time_s[np.isfinite(recorded.step_time_s)]) == pytest.approx(
        sorted(frame["step_time_s"].dropna())
    )
    twice = pd.concat([frame, frame.assign(status="oom", step_time_s=np.nan)]).assign(candidate=True)
    assert len(recorded_space(twice, calibrated=False).space) == len(frame), "the run that went well counts"


@pytest.mark.slow
def test_a_search_needs_fewer_runs_than_others(recorded: RecordedSpace) -> None:
    search = replay(recorded, Settings(repeats=0))
    assert settled(search, 0.01) == 6
    assert sum(len(one.runs) for one in search) < 0.4 * len(recorded.space)
    random = in_order(recorded, at_random(recorded, 0))
    assert quantiles(search, 0.01)[0] < quantiles(random, 0.01)[0]
    for one in (*search, *random, *by_hand(recorded), *in_order(recorded, by_prediction(recorded), patience=3)):
        assert len(one.runs) == len(one.regret) == len(one.gpu_hours)
        assert len(set(one.runs)) == len(one.runs), "nothing runs twice"
        assert (np.diff(one.gpu_hours) > 0).all()
        assert all(later <= before for before, later in pairwise(one.regret))
        assert all(recorded.space.cell[run] == one.cell for run in one.runs)


@pytest.mark.slow
def test_the_price_of_runs_by_hand(recorded: RecordedSpace) -> None:
    order = by_prediction(recorded)
    whole = in_order(recorded, order)[0]
    steps = np.nansum([8 * recorded.step_time_s[one] for one in whole.runs])
    gpus = recorded.space.gpus[whole.runs[0]]
    assert whole.gpu_hours[-1] == pytest.approx(gpus * (60 * len(whole.runs) + steps) / 3600)
    early = in_order(recorded, order, slow=1.5)[0]
    best, saved = np.inf, 0.0
    for one in whole.runs:
        time_s = recorded.step_time_s[one]
        saved += 5 * time_s if time_s > 1.5 * best else 0.0  # two of warm-up and one that is timed, instead of eight
        best = np.fmin(best, time_s)
    assert saved and early.gpu_hours[-1] == pytest.approx(whole.gpu_hours[-1] - gpus * saved / 3600)


@pytest.mark.slow
def test_trouble_is_mended_by_repeats_and_judged_by_the_truth(recorded: RecordedSpace) -> None:
    quiet = replay(recorded, Settings())
    assert sum(len(one.runs) - len(set(one.runs)) for one in quiet) <= 8, "a few repeats show that there is no noise"
    noisy = replay(recorded, Settings(), trouble=TROUBLE, seed=1)
    assert noisy == replay(recorded, Settings(), trouble=TROUBLE, seed=1)
    assert any(len(set(one.runs)) < len(one.runs) for one in noisy), "the top has run again"
    assert all(one.regret[-1] < 0.1 for one in noisy)
    assert all(one.regret[-1] >= 0 for one in (*quiet, *noisy))


def test_coverage_and_runs_until_by_hand() -> None:
    one = CellResult(
        cell=0,
        runs=(3, 4, 5),
        regret=(inf, 0.2, 0.0),
        gpu_hours=(1.0, 2.0, 3.0),
        decisions=((1.0, True), (0.05, False)),
    )
    assert (one.until(0.01), one.until(0.5)) == (3, 2)
    never = CellResult(cell=1, runs=(1,), regret=(0.5,), gpu_hours=(1.0,), decisions=((0.1, True),))
    assert never.until(0.01) == inf
    assert coverage([one, never], (0.0, 0.1, 1.0)) == [
        (0.0, 0.1, 2, pytest.approx(0.075), 0.5),
        (0.1, 1.0, 1, 1.0, 1.0),
    ]
    assert settled([one, never], 0.01) == 1


@pytest.mark.slow
def test_the_command_and_its_figure(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "runs.parquet"
    assert main(["search", "--replay", str(written), "search.batch=2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "| other models | search |" in said
    rows = pd.read_parquet(out)
    search = rows[rows["strategy"] == SEARCH]
    assert search.groupby("fitted_on")["cell"].nunique().tolist() == [6, 6]
    assert rows["regret"].min() == 0
    assert search_regret.main([str(out), "--out", str(tmp_path / "regret.svg")]) == 0
    assert "Cells within 1 %" in (tmp_path / "regret.svg").read_text()


@pytest.mark.slow
def test_the_tool_counts_what_trouble_costs(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert search_under_noise.main([str(written), "--draws", "1", "search.repeats=1"]) == 0
    head, _, noise, slow = capsys.readouterr().out.splitlines()
    assert head.startswith("| fitted on | trouble |")
    assert noise.startswith("| other models | noise 4.0% |") and " of 6 | " in noise
    assert "one node 20% slower" in slow
    assert search_under_noise.main([str(written), "+grid=tiny"]) == 2
    assert "a replay takes only options of the section search" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["+grid=tiny"], "a replay takes only options of the section search"),
        (["search.batch=0"], "search.batch=0"),
        (["search.within=2"], "search.within=2 must be a share below 1"),
        (["search.btch=2"], "btch"),
        (["search.stop=["], "cannot read"),
        (["--out", "runs.txt"], "must end in .parquet or .csv"),
    ],
)
def test_mistakes_are_one_line(written: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "--replay", str(written), *words]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu,gpus\nH100,8\n", "lacks the columns status, step_time_s"),
        ("gpu,status,step_time_s\nH100,oom,\n", "no model and size of the table has 3 successful runs"),
        ("a,b\n1,2\n", "has none of the columns"),
    ],
)
def test_tables_in_which_nothing_can_be_searched(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(text)
    assert main(["search", "--replay", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.splitlines()) == 1


def test_rows_of_a_sweep_are_a_table() -> None:
    rows = read_recorded(RECORDED / "h200x2_search" / "attempts.parquet")
    assert set(rows["status"]) <= {"ok", "oom"} and (rows["step_time_s"] > 0).any()


@pytest.mark.exhaustive(seconds=45)
def test_the_study_needs_two_hundred_runs() -> None:
    if not STUDY.exists():
        pytest.skip(f"the study's raw table is not at {STUDY}")
    frame = read_recorded(STUDY)
    for calibrated, most_runs, cells, median, p90 in ((True, 200, 26, 2, 7), (False, 350, 25, 2, 18)):
        found = replay(recorded_space(frame, calibrated), Settings())
        assert len(found) == 27
        assert sum(len(one.runs) for one in found) <= most_runs
        assert settled(found, 0.01) >= cells
        assert quantiles(found, 0.01) <= (median, p90)
        stopped = [one.decisions[-1] for one in found]
        wrong = np.mean([was for _, was in stopped])
        assert wrong <= 0.1, "the rule keeps what it says"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "cannot be read as a table: No columns"),
        (b"\xff\xfe\x00junk", "cannot be read as a table: 'utf-8' codec"),
        (b"a,b\n1,2\n", "has none of the columns gpu, gpus"),
        (b"gpu,gpus\nH100,8\n", "lacks the columns status, step_time_s, which --replay needs"),
        (b"tok/s/gpu,nodes\n1,2\n", "is not the study's table: it has no column job_id"),
    ],
)
def test_what_is_no_table_of_runs_is_refused_in_one_line(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    assert main(["search", "--replay", str(tmp_path / "t.csv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ultrasweep: {tmp_path}/t.csv ") and told in line


def test_the_studys_table_with_text_for_a_number_is_refused(tmp_path: Path) -> None:
    header = ",".join(reference._READ)
    (tmp_path / "t.csv").write_text(f"{header}\n{','.join('x' for _ in reference._READ)}\n")
    with pytest.raises(UltrasweepError, match=r"t\.csv cannot be read as the study's table: "):
        read_recorded(tmp_path / "t.csv")
