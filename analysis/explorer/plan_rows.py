"""A plan's points as rows of the explorer: verdict, predicted memory and throughput. None of them has run."""

from __future__ import annotations

import pandas as pd

from analysis.rows.cohorts import Cohort
from analysis.rows.labels import add_labels
from results.text.numbers import listed

SLUG = "planned"


FITS, MAY_NOT, DOES_NOT = "fits", "may not fit", "does not fit"


def fit(ledger: pd.DataFrame) -> pd.Series:
    """Whether the predicted peak of each point fits in a device; "may not fit" if it exceeds the device's memory, but
    by less than the margin that the plan allows. Null without a prediction."""
    known = ledger["predicted_peak_bytes"].notna() & ledger["limit_bytes"].notna()
    over = ledger["predicted_peak_bytes"].gt(ledger["limit_bytes"]).fillna(False).astype(bool)
    words = pd.Series(FITS, index=ledger.index).mask(over, MAY_NOT)
    return words.mask(ledger["verdict"].eq("predicted_oom"), DOES_NOT).where(known)


def cohort(ledger: pd.DataFrame) -> Cohort:
    """Labelled points of a ledger; the page identifies them by ``attempt_id``."""
    names = listed(sorted(str(name) for name in ledger["sweep"].dropna().unique()))
    ids = ledger["sweep"].fillna("plan") + " point " + ledger["point"].astype("Int64").astype(str)
    return Cohort(
        slug=SLUG,
        title=f"Planned: {names}" if names else "Planned",
        meaning="None of these points has run. Memory and throughput are the planner's closed-form predictions; the "
        "verdict says what the plan does with the point.",
        frame=add_labels(ledger.reset_index(drop=True)).assign(attempt_id=ids.to_numpy(), fit=fit(ledger).to_numpy()),
        stamp="predicted, nothing was run",
    )
