"""The page of the study's claims: what it says, what it escapes, and how it shows on a wide screen and on a phone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from analysis.claims import study as claims
from analysis.claims import verdicts
from analysis.page import claims_page
from analysis.rows.cohorts import split
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from tests.analysis.pages import links, text_of
from tests.analysis.test_claims import study  # noqa: F401

if TYPE_CHECKING:
    from tests.analysis.browser import Browser

PUBLISHED = {
    *("published_winners", "mfu_formula", "data_parallel_falls", "zero_one_matched", "tensor_beyond_node"),
    *("pipeline_rewrite", "bubble_is_waited", "short_pipelines_are_slower", "no_pipeline_wins_from_16_nodes"),
    "bandwidths_are_medians",
}


@pytest.fixture(scope="module")
def checked() -> pd.DataFrame:
    rows = synthetic.attempts(list(synthetic.experiments(synthetic.MODELS[:2], (1, 2, 4), (1, 4))))
    return claims.table(split(frame_of(rows)))


@pytest.fixture(scope="module")
def page(checked: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("claims")
    (folder / "tables").mkdir()
    (folder / "tables" / "ranked.csv").write_text("rank\n")
    path = claims_page.write(checked, folder / "claims.html")
    assert path is not None
    return path


@pytest.mark.slow
def test_what_the_study_says_stands_apart_from_our_audits(page: Path) -> None:
    assert {claim.name for claim in claims.CLAIMS if claim.source == verdicts.STUDY} == PUBLISHED
    told = page.read_text()
    ids = re.findall(r'<article class="card [a-z-]+" id="(study|audit)-0-(\w+)"', told)
    assert [source for source, _ in ids] == sorted((source for source, _ in ids), reverse=True)
    assert {name for source, name in ids if source == "study"} == PUBLISHED
    assert {name for source, name in ids if source == "audit"} == {claim.name for claim in claims.CLAIMS} - PUBLISHED
    said = text_of(page)
    assert said.index("What the study says") < said.index("Our audits")
    assert "These are not the study's rows: the question is whether the claims hold here too." in said


@pytest.mark.slow
def test_every_claim_says_what_was_computed_what_was_found_and_when_it_holds(checked: pd.DataFrame, page: Path) -> None:
    said = text_of(page)
    for row in checked.to_dict("records"):
        for column in ("claim", "said_in", "computed", "holds_if", "evidence"):
            assert " ".join(row[column].split()) in said, (row["name"], column)
    counts = checked["verdict"].value_counts()
    shown = [int(number) for number in re.findall(r"<b>(\d+)</b>", page.read_text())]
    for place, verdict in enumerate(claims_page.WORDS):
        assert shown[place] + shown[place + 3] == counts.get(verdict, 0)


def test_counts_stand_before_and_after_what_is_left_out(checked: pd.DataFrame) -> None:
    row = checked[checked["name"] == "pipeline_rewrite"].iloc[0].to_dict()
    row |= {"holds_in": "23 of 24", "holds_in_kept": "13 of 13", "left_out": "fewer than 5 pipelines on a side"}
    [one] = claims_page.sections(pd.DataFrame([row]), ())
    [card] = one.parts[0].cards
    assert card.counts == (
        "23 of 24 models and sizes",
        "13 of 13 with 11 left out by the rule: fewer than 5 pipelines on a side",
    )


def test_only_tables_that_are_there_are_linked(page: Path) -> None:
    assert set(links(page)) == {"index.html", "tables/ranked.csv"}


def test_the_page_asks_no_server_and_escapes_what_rows_say(checked: pd.DataFrame, tmp_path: Path) -> None:
    hostile = '<script>alert("x")</script> & <img src=x onerror=alert(1)>'
    path = claims_page.write(checked.assign(evidence=hostile, data=hostile), tmp_path / "claims.html")
    assert path is not None
    told = path.read_text()
    assert "<script" not in told
    assert "<img" not in told
    assert "&lt;script&gt;alert" in told
    assert "://" not in told
    assert not re.search(r"""url\(|@import|src=["']""", told)


def test_without_a_claim_there_is_no_page(tmp_path: Path) -> None:
    assert claims_page.write(claims.table([]), tmp_path / "claims.html") is None
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_on_the_study(study: dict[str, dict[str, Any]], tmp_path: Path) -> None:  # noqa: F811
    table = pd.DataFrame([{"name": name, **row} for name, row in study.items()])
    path = claims_page.write(table, tmp_path / "claims.html")
    assert path is not None
    said = text_of(path)
    assert "4,104 attempts, 1,765 finished." in said
    assert "These are not the study's rows" not in said
    assert re.findall(r"<b>(\d+)</b>", path.read_text()) == ["6", "2", "2", "3", "3", "2"]
    assert "13 of 13 with 11 left out by the rule: fewer than 5 pipelines on a side" in said
    assert "0 of 21 plotted values" in said
    assert "6 of 11 bars" in said
    # What few runs do not decide is counted all the same.
    assert "of 2 models, sizes and depths" in said


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("width", [375, 768, 1400])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_on_screens(page: Path, browser: Browser, width: int, dark: bool) -> None:
    browser.open(page, size=(width, 900), dark=dark)
    assert browser.console() == []
    assert [url for url in browser.requests() if not url.startswith(page.resolve().as_uri())] == []
    assert browser.js("document.documentElement.scrollWidth") <= width
    assert len(browser.all(".card")) == len(claims.CLAIMS)
    ground, ink = (browser.js(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
    light, black = ("rgb(255, 255, 255)", "rgb(23, 25, 28)")
    assert (ground, ink) == (("rgb(16, 18, 20)", "rgb(236, 238, 240)") if dark else (light, black))
    columns = {round(browser.js("arguments[0].getBoundingClientRect().left", card)) for card in browser.all(".card")}
    assert len(columns) == {375: 1, 768: 1, 1400: 3}[width]
