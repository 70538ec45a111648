"""The study's claims on its MFU: the formula, and how it counts tied embeddings."""

from __future__ import annotations

import pandas as pd

from analysis.claims import published
from analysis.claims.verdicts import FAIL, PASS, UNKNOWN, Tally, Verdict, is_study
from analysis.rows import metrics, winners
from analysis.rows.derived import SHAPE, add_formulas
from results.text.numbers import listed, plural

_FORMULA = (*SHAPE, "seq_len", "pp", "recompute", "peak_flops", "tokens_per_s_per_gpu", "mfu_playbook")
"""Columns from which `add_formulas` computes the MFU, and the recorded one."""


def mfu_formula(frame: pd.DataFrame) -> Verdict:
    """``(6 N + 12 L h s) * tokens/s/GPU / peak`` gives the recorded MFU."""
    if is_study(frame):
        ok = frame[frame["outcome"] == "ok"]
        known = ok[ok["counted_params"].notna()]
        flops = 6 * known["counted_params"] + 12 * known["num_layers"] * known["hidden_size"] * known["seq_len"]
        recorded, again = known["published_mfu"], flops * known["tokens_per_s_per_gpu"] / known["peak_flops"]
    else:
        ok = frame.loc[frame["outcome"] == "ok", [*_FORMULA]]
        known = ok[ok["mfu_playbook"].notna() & ok[[*SHAPE]].notna().all(axis=1)]
        recorded, again = known["mfu_playbook"], add_formulas(known)["mfu_playbook"]
    if known.empty:
        return Verdict(UNKNOWN, "no finished run has an MFU and its shape")
    error = (again / recorded - 1).abs()
    wrong = int((error > 1e-6).sum())
    again_text = f"{len(known) - wrong:,} of {plural(len(known), 'value')} reproduced"
    tally = Tally(len(known) - wrong, len(known))
    return Verdict(FAIL if wrong else PASS, f"{again_text}, largest relative difference {error.max():.0e}", tally)


def tied_embeddings(frame: pd.DataFrame) -> Verdict:
    """The study's MFU of pipelines counts tied embeddings twice."""
    ok = frame[(frame["outcome"] == "ok") & frame["tie_embeddings"].eq(True) & frame[metrics.MFU].notna()]
    share = winners.published_mfu(ok) / ok[metrics.MFU]
    piped = ok["pp"] > 1
    split = ok.assign(_share=share, _piped=piped).groupby(["workload", "_piped"])["_share"].median().unstack()
    if True not in split or False not in split or split.dropna().empty:
        return Verdict(UNKNOWN, "no model with tied embeddings finished both with and without a pipeline")
    inflation = (split[True] / split[False]).dropna()
    expected = [
        abs(value - published.INFLATION[str(name)]) < 0.01 if name in published.INFLATION else value > 1.01
        for name, value in inflation.items()
    ]
    text = listed([f"× {value:.3f} for {name}" for name, value in inflation.items()])
    runs = f"medians of {int(piped.sum()):,} runs with and {int((~piped).sum()):,} without a pipeline"
    evidence = f"the MFU of a pipeline is higher by {text} at the same throughput ({runs})"
    return Verdict(PASS if all(expected) else FAIL, evidence, Tally(sum(expected), len(expected)))
