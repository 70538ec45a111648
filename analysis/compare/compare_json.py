"""``analysis.compare --json``: a comparison as one JSON document; docs/json.md has its fields."""

from __future__ import annotations

from pathlib import Path

from analysis.compare import verdicts
from analysis.compare.comparison import Comparison
from analysis.compare.write_comparison import table
from results.text.json_document import json_document

VERSION = 1
"""Version of the document. It rises when a field changes its meaning or goes; new fields may come."""


def compare_json(comparison: Comparison, a: Path, b: Path) -> str:
    """The comparison as JSON text: sentences, and one entry for each point of either side; what is unknown is null.

    ``a``, ``b``: the paths that were compared.
    """
    judged_by = comparison.noise
    fields = {
        "a": {"path": str(a), "description": comparison.sides[0]},
        "b": {"path": str(b), "description": comparison.sides[1]},
        "verdicts": dict(verdicts.counts(comparison.pairs)),
        "alarms": comparison.alarms,
        "cautions": comparison.cautions,
        "problems": list(comparison.problems),
        "matching": comparison.matching,
        "found": comparison.found,
        "noise_fraction": judged_by.fraction,
        "noise_from": judged_by.why,
        "noise_judges": judged_by.judges,
        "points": table(comparison).to_dict("records"),
        "by_axis": comparison.by_axis.to_dict("records"),
    }
    return json_document("compare", VERSION, fields)
