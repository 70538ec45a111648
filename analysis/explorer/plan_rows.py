"""A plan's points as rows of the explorer: verdict, predicted memory and throughput. None of them has run."""

from __future__ import annotations

import pandas as pd

from analysis.rows.cohorts import Cohort
from analysis.rows.labels import add_labels
from results.text.numbers import listed

SLUG = "planned"


def cohort(ledger: pd.DataFrame) -> Cohort:
    """Labelled points of a ledger; the page identifies them by ``attempt_id``."""
    names = listed(sorted(str(name) for name in ledger["sweep"].dropna().unique()))
    ids = ledger["sweep"].fillna("plan") + " point " + ledger["point"].astype("Int64").astype(str)
    return Cohort(
        slug=SLUG,
        title=f"Planned: {names}" if names else "Planned",
        meaning="None of these points has run. Memory and throughput are the planner's closed-form predictions; the "
        "verdict says what the plan does with the point.",
        frame=add_labels(ledger.reset_index(drop=True)).assign(attempt_id=ids.to_numpy()),
        stamp="predicted, nothing was run",
    )
