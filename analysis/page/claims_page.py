"""The page of the study's claims, beside the report: what it says, and apart from that our audits of it."""

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
    STUDY: ("What the study says", "In our words, and checked."),
    AUDIT: (
        "Audits of our own",
        "The study says none of these. They ask whether its table bears what is concluded from it.",
    ),
}


@dataclass(frozen=True, slots=True)
class Card:
    """One claim on one set of rows, as it is read."""

    name: str
    statement: str
    verdict: str
    """A value of `WORDS`."""
    said_in: str
    computed: str
    holds_if: str
    evidence: str
    counts: tuple[str, ...]
    """In how many of all cells it holds; then in how many of those kept, and which rule left the others out."""
    tables: tuple[str, ...]
    """Files beside the page that have its rows."""


@dataclass(frozen=True, slots=True)
class Part:
    """The claims of one source on one set of rows."""

    slug: str
    title: str
    about: str
    counts: tuple[tuple[str, int], ...]
    """How many claims have each of `WORDS`, in words for that many."""
    cards: tuple[Card, ...]


@dataclass(frozen=True, slots=True)
class Rows:
    """One set of rows that was asked."""

    title: str
    about: str
    parts: tuple[Part, ...]


def write(checked: pd.DataFrame, path: Path) -> Path | None:
    """Write the claims of `analysis.claims.study.table` as a page; None, and no file, where there are none.

    Tables are linked where they lie in ``tables/`` beside ``path``.
    """
    if checked.empty:
        return None
    folder = path.parent / "tables"
    there = {table.name for table in folder.iterdir()} if folder.is_dir() else set()
    text = environment().get_template("claims.html").render(rows=sections(checked, there), generator=GENERATOR)
    path.write_text(text, encoding="utf-8", errors="replace")
    return path


def sections(checked: pd.DataFrame, there: Sequence[str] | set[str]) -> list[Rows]:
    """What the page shows, one for each set of rows; ``there``: names of tables that can be linked."""
    found = []
    for place, (title, rows) in enumerate(checked.groupby("data", sort=False)):
        about = f"{plural(int(rows['attempts'].iloc[0]), 'attempt')}, {int(rows['finished'].iloc[0]):,} finished."
        if title != "the study":
            about += " These are not the study's rows: the question is whether the same holds here."
        parts = []
        for source, (heading, meaning) in _PARTS.items():
            cards = tuple(_card(row, there) for row in labels.records(rows[rows["source"] == source]))
            counts = [(word, sum(card.verdict == word for card in cards)) for word in WORDS.values()]
            counts = [(word if count == 1 else _SEVERAL.get(word, word), count) for word, count in counts]
            parts.append(Part(f"{source.split()[-1]}-{place}", heading, meaning, tuple(counts), cards))
        found.append(Rows(str(title), about, tuple(parts)))
    return found


def _card(row: dict[str, object], there: Sequence[str] | set[str]) -> Card:
    counts = []
    if isinstance(row["holds_in"], str):
        counts.append(f"{_grouped(row['holds_in'])} {row['counted']}")
    if isinstance(row["holds_in_kept"], str):
        before, after = (_whole(str(row[name])) for name in ("holds_in", "holds_in_kept"))
        left = f"{before - after:,} left out" if after < before else "nothing left out"
        counts.append(f"{_grouped(row['holds_in_kept'])} with {left} by the rule: {row['left_out']}")
    return Card(
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
    """``1,765 of 1,765``."""
    return " of ".join(f"{int(number):,}" for number in tally.split(" of "))


def _whole(tally: str) -> int:
    """The 24 of ``23 of 24``."""
    return int(tally.rpartition(" of ")[2])
