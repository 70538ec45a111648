"""The ends of failed ranks' logs in the explorer: which file, how much of it, and none from outside the sweep."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from analysis.explorer import failed_logs, row_data
from analysis.rows import cohorts
from analysis.rows.load import load
from results.shared_filesystem import packed_folder
from tests.analysis import synthetic
from tests.analysis.browser import Browser
from tests.analysis.explorer_page import HOSTILE, POINTS, opened, written

pytestmark = pytest.mark.drawn(one_in=2)


def test_the_log_of_the_failed_rank_is_there(browser: Browser, tmp_path: Path) -> None:
    rows = synthetic.attempts(POINTS[:4], outcome="crash")
    rows[0] |= {"failed_rank": 1}
    rows[1] |= {"log_dir": "../../outside"}
    rows[2] |= {"failed_rank": None, "outcome": "ok"}
    sweep = synthetic.make_sweep(tmp_path / "results" / "mine", rows)
    (tmp_path / "outside").mkdir()
    for place in (sweep / rows[0]["log_dir"], sweep / rows[2]["log_dir"], tmp_path / "outside"):
        place.mkdir(parents=True, exist_ok=True)
        for rank in range(2):
            lines = [f"rank {rank} line {n}" for n in range(40)] + [HOSTILE]
            (place / f"rank_{rank}.log").write_text("\n".join(lines))
    results = load(tmp_path / "results")
    page = written(results, tmp_path)
    opened(browser, page, f"#r.row={rows[0]['attempt_id']}")
    log = browser.text("#runs-drawer pre.log").splitlines()
    assert log == [f"rank 1 line {n}" for n in range(26, 40)] + [HOSTILE]
    assert "rank 0 line" not in page.read_text()
    assert browser.js("window.pwned ?? null") is None
    found = failed_logs.tails(tmp_path / "results", row_data.table(cohorts.split(results.attempts)))
    assert len(found) == 1  # neither the finished one's nor one from outside the sweep


def test_the_log_of_a_packed_attempt_is_there(tmp_path: Path) -> None:
    [row] = synthetic.attempts(POINTS[:1], outcome="crash", failed_rank=None)
    sweep = synthetic.make_sweep(tmp_path / "mine", [row])
    folder = sweep / row["log_dir"]
    folder.mkdir(parents=True)
    for name, text in (("task.json", "{}"), ("rank_0.log", ""), ("rank_1.log", "the end")):
        (folder / name).write_text(text)
    packed_folder.pack(folder, "task.json")
    [found] = failed_logs.tails(sweep, load(sweep).attempts).values()
    assert found == {"name": f"mine/{row['log_dir']}/rank_1.log", "text": "the end"}


def test_a_log_that_is_a_link_or_a_pipe_reaches_no_page(tmp_path: Path) -> None:
    rows = synthetic.attempts(POINTS[:2], outcome="crash")
    sweep = synthetic.make_sweep(tmp_path / "mine", rows)
    (tmp_path / "secret").write_text("secret")
    first, second = (sweep / row["log_dir"] / "rank_0.log" for row in rows)
    for log in (first, second):
        log.parent.mkdir(parents=True)
    first.symlink_to(tmp_path / "secret")
    os.mkfifo(second)
    assert failed_logs.tails(sweep, load(sweep).attempts) == {}


@pytest.mark.slow
def test_logs_end_where_the_page_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = synthetic.attempts(POINTS[:5], outcome="crash")
    sweep = synthetic.make_sweep(tmp_path / "mine", rows)
    for row in rows:
        (sweep / row["log_dir"]).mkdir(parents=True)
        (sweep / row["log_dir"] / "rank_0.log").write_text("x" * 300)
    monkeypatch.setattr(failed_logs, "MOST_BYTES", 700)
    assert len(failed_logs.tails(tmp_path, load(tmp_path).attempts)) == 2
