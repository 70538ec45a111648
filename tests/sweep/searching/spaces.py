"""Small spaces and tables to search in, whose truth is known."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sweep.predicting.predict_table import predict_frame
from sweep.searching.space import Floats, SearchSpace
from tests.workloads.predict.tables import row


def space(count: int = 40, cells: int = 2, seed: int = 0, spread: float = 0.2) -> tuple[SearchSpace, Floats]:
    """Candidates with a prior, and the logarithms of their true step times: the prior off by something smooth."""
    random = np.random.default_rng(seed)
    cell = np.repeat(np.arange(cells), count)
    layout = random.integers(0, 5, size=(count * cells, 3)).astype(float)
    log_time = random.normal(0.0, 0.5, count * cells)
    wrong = 0.15 * np.sin(layout @ np.array([0.5, 0.3, 0.2]) + cell) + 0.1 * cell
    found = SearchSpace(
        cell=cell,
        model=np.zeros(count * cells, np.int64),
        gpus=np.full(count * cells, 8.0),
        layout=layout,
        family=np.where(layout[:, 0] > 2, "tp", "dp"),
        log_time=log_time,
        time_spread=np.full(count * cells, spread),
        log_load=np.full(count * cells, -1.0),
        load_spread=np.full(count * cells, 0.1),
        same_but_memory=np.array([f"{c} {one[0]}" for c, one in zip(cell, layout, strict=True)]),
    )
    return found, log_time + wrong


def table(seed: int = 0) -> pd.DataFrame:
    """Runs of three models on 8 and 16 devices: every layout once, off from what is predicted by a smooth factor, and
    out of memory where little is predicted to be left."""
    rows = []
    for model in (1, 3, 8):
        for gpus in (8, 16):
            for tp in (1, 2, 4):
                for pp in (1, 2, 4):
                    for mbs in (1, 2, 4, 8):
                        dp = gpus // tp // pp
                        if dp and 64 % (dp * mbs) == 0:
                            layout = {"gpus": gpus, "dp": dp, "tp": tp, "pp": pp, "mbs": mbs}
                            rows.append(row(model, **layout, grad_accum=64 // dp // mbs))
    frame = pd.DataFrame(rows)
    said = predict_frame(frame, None).predictions
    random = np.random.default_rng(seed)
    wrong = 0.1 * np.log2(frame["tp"]) - 0.05 * np.log2(frame["pp"]) + random.normal(0, 0.01, len(frame))
    fits = said["predicted_peak_reserved_bytes"].astype(float) < 110e9
    return frame.assign(
        status=np.where(fits, "ok", "oom"),
        step_time_s=(said["step_time_s"].astype(float) * np.exp(wrong)).where(fits),
        reserved_gib=(said["predicted_peak_reserved_bytes"].astype(float) / 2**30).where(fits),
    )
