"""Predictions of single rows, for the tests of ``predict``."""

from __future__ import annotations

from typing import Any

import pandas as pd

from sweep.predicting.predict_table import OUT, predict_frame
from tests.workloads.predict.tables import row

EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn": 4096}
"""The columns of a model with experts."""


def one(**changes: Any) -> pd.Series[Any]:
    """The prediction of one row."""
    predictions = predict_frame(pd.DataFrame([row(**changes)]), None).predictions
    assert tuple(predictions.columns) == OUT
    return predictions.iloc[0]
