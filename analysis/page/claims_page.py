"""The page of the study's claims beside the report: the study's claims and, separately, our audits of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from analysis.claims.verdicts import AUDIT, FAIL, PASS, STUDY, UNKNOWN
from analysis.page.render import GENERATOR, environment
from analysis.rows import labels
from results.text.numbers import plural

WORDS = {PASS: "holds", FAIL: "does not hold", UNKNOWN: "not enough data"}
_SEVERAL = {"holds": "hold", "does not hold": "do not hold"}
_PARTS = {
    STUDY: ("What the study says", "The study's statements in our words, each with a check."),
    AUDIT: (
        "Our audits",
        "These are not claims of the study. They check whether its table supports the conclusions drawn from it.",
    ),
}


@dataclass(frozen=True, slots=True)
class ClaimCard:
    """One claim checked on one set of rows, as texts."""

    name: str
    statement: str
    verdict: str
    """A value of `WORDS`."""
    said_in: str
    computed: str
    holds_if: str
    evidence: str
    counts: tuple[str, ...]
    """Two tallies: in how many of all cells the claim holds; in how many of the cells kept, with the rule that left out
    others."""
    tables: tuple[str, ...]
    """Names of the linked table files that hold its rows."""


@dataclass(frozen=True, slots=True)
class Part:
    """The claims of one source on one set of rows."""

    slug: str
    title: str
    about: str
    counts: tuple[tuple[str, int], ...]
    """(words, number of claims) for each of `WORDS`, singular or plural to match the number."""
    cards: tuple[ClaimCard, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """One set of rows on which claims were checked."""

    title: str
    about: str
    parts: tuple[Part, ...]


def write(checked: pd.DataFrame, path: Path) -> Path | None:
    """Write the claims of `analysis.claims.study.table` as a page. Without claims, writes no file and returns None.

    Tables are linked in ``tables/`` beside ``path``.
    """
    if checked.empty:
        return None
    folder = path.parent / "tables"
    there = {table.name for table in folder.iterdir()} if folder.is_dir() else set()
    text = environment().get_template("claims.html").render(rows=sections(checked, there), generator=GENERATOR)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def sections(checked: pd.DataFrame, there: Sequence[str] | set[str]) -> list[Rows]:
    """Content of the page, one entry for each set of rows; ``there`` names the tables that can be linked."""
    rows_shown = []
    for place, (title, rows) in enumerate(checked.groupby("data", sort=False)):
        about = f"{plural(int(rows['attempts'].iloc[0]), 'attempt')}, {int(rows['finished'].iloc[0]):,} finished."
        if title != "the study":
            about += " These are not the study's rows: the question is whether the claims hold here too."
        parts = []
        for source, (heading, meaning) in _PARTS.items():
            cards = tuple(_card(row, there) for row in labels.records(rows[rows["source"] == source]))
            counts = [(word, sum(card.verdict == word for card in cards)) for word in WORDS.values()]
            counts = [(word if count == 1 else _SEVERAL.get(word, word), count) for word, count in counts]
            parts.append(Part(f"{source.split()[-1]}-{place}", heading, meaning, tuple(counts), cards))
        rows_shown.append(Rows(str(title), about, tuple(parts)))
    return rows_shown


def _card(row: dict[str, object], there: Sequence[str] | set[str]) -> ClaimCard:
    counts = []
    if isinstance(row["holds_in"], str):
        counts.append(f"{_grouped(row['holds_in'])} {row['counted']}")
    if isinstance(row["holds_in_kept"], str):
        before, after = (_whole(str(row[name])) for name in ("holds_in", "holds_in_kept"))
        left = f"{before - after:,} left out" if after < before else "nothing left out"
        counts.append(f"{_grouped(row['holds_in_kept'])} with {left} by the rule: {row['left_out']}")
    return ClaimCard(
        name=str(row["name"]),
        statement=str(row["claim"]),
        verdict=WORDS[str(row["verdict"])],
        said_in=str(row["said_in"]),
        computed=str(row["computed"]),
        holds_if=str(row["holds_if"]),
        evidence=str(row["evidence"]),
        counts=tuple(counts),
        tables=tuple(name for name in str(row["tables"]).split() if name in there),
    )


def _grouped(tally: str) -> str:
    """Tally with thousands separators: ``1,765 of 1,765``."""
    return " of ".join(f"{int(number):,}" for number in tally.split(" of "))


def _whole(tally: str) -> int:
    """Second number of a tally: 24 of ``23 of 24``."""
    return int(tally.rpartition(" of ")[2])
