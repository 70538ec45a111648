"""``python -m docs.tools.write_cards``: writes the cards of the rows that ship with the program, one file a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from results.errors import InvalidResults
from results.tables.store import sweep_dirs
from sweep.cards.card import to_yaml
from sweep.cards.make import make_card
from sweep.inspecting.lookup import Results

OTHER_ALLOCATOR = {"h100x2_validation_growing"}
"""Sweeps that ran with allocator settings that the engine no longer has: their reserved memory is not found again."""
ROOT = Path(__file__).resolve().parents[2] / "results"


def shipped_cards() -> Mapping[Path, str]:
    """The text of every file of cards. Points that never finished have none."""
    texts = {}
    for sweep in sorted(sweep_dirs(ROOT / "recorded")):
        if sweep.name in OTHER_ALLOCATOR:
            continue
        results, cards = Results(sweep), []
        for id in results.ids():
            try:
                cards.append(make_card(results.find(id)))
            except InvalidResults:
                continue
        texts[ROOT / "cards" / f"{sweep.name}.yaml"] = to_yaml(cards)
    return texts


def main() -> None:
    for path, text in shipped_cards().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
