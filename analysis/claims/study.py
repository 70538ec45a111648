"""The study's claims as named checks, on the study's rows and on anyone's: pass, fail or not enough data.

Each check says what it compared, how many runs or pairs, and the numbers. A check of few rows says so instead of
deciding. On rows that are not the study's a claim is asked of those rows: whether the same holds there.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.claims import mfu_claims, pair_claims, pipeline_claims, published, scaling_claims, winner_claims
from analysis.claims.verdicts import Claim, is_study
from analysis.rows.cohorts import Cohort
from results.text import format_percent

CLAIMS = (
    Claim(
        "published_winners",
        "The published best configurations are the best by the study's MFU",
        winner_claims.published_winners,
    ),
    Claim(
        "winners_by_throughput", "Ranked by tokens/s/GPU, other configurations win", winner_claims.winners_by_throughput
    ),
    Claim(
        "cells_are_of_their_model",
        "Every published winner is of the model it is labelled as",
        winner_claims.cells_are_of_their_model,
    ),
    Claim(
        "mfu_formula", "(6 N + 12 L h s) · tokens/s/GPU over the peak gives every recorded MFU", mfu_claims.mfu_formula
    ),
    Claim("tied_embeddings", "The study's MFU counts tied embeddings twice in pipelines", mfu_claims.tied_embeddings),
    Claim(
        "pipeline_rewrite",
        "Rewriting the pipeline's communication made pipelines faster",
        pipeline_claims.pipeline_rewrite,
    ),
    Claim(
        "zero_one_matched", "ZeRO 1 saves memory and costs no throughput against ZeRO 0", pair_claims.zero_one_matched
    ),
    Claim(
        "tensor_beyond_node",
        "Tensor parallelism beyond the node costs more than inside it",
        pair_claims.tensor_beyond_node,
    ),
    Claim(
        "bubble_is_waited",
        "A pipeline waits at least (p − 1) / (v m) of its busy time",
        pipeline_claims.bubble_is_waited,
    ),
    Claim(
        "no_pipeline_wins_from_16_nodes",
        "From 16 nodes on, pp = 1 with tensor parallelism wins",
        pipeline_claims.no_pipeline_wins_from_16_nodes,
    ),
    Claim(
        "no_pipeline_wins_in_one_regime",
        "From 16 nodes on, pp = 1 wins among runs on the same regime of the network",
        pipeline_claims.no_pipeline_wins_in_one_regime,
    ),
    Claim(
        "data_parallel_falls",
        "Each doubling of pure data parallelism costs throughput per GPU",
        scaling_claims.data_parallel_falls,
    ),
    Claim(
        "short_pipelines_are_slower",
        "A pipeline with 32 micro-batches is faster than one with m = p − 1 (or m = p)",
        scaling_claims.short_pipelines_are_slower,
    ),
    Claim(
        "published_bars",
        "Every bar of the published scaling figures is a row of the table",
        scaling_claims.published_bars,
    ),
    Claim(
        "bandwidths_are_medians",
        "The published bandwidths are medians over the runs, as captioned",
        scaling_claims.bandwidths_are_medians,
    ),
    Claim(
        "bandwidth_falls_in_one_regime",
        "From 8 nodes on, more nodes slow the all-reduce down also inside one regime of the network",
        scaling_claims.bandwidth_falls_in_one_regime,
    ),
    Claim(
        "failures_take_devices",
        f"Runs that fail take about {format_percent(published.FAILED_SHARE, 0)} of the requested GPUs",
        scaling_claims.failures_take_devices,
    ),
    Claim("throughputs_repeat", "Runs of one configuration have the same throughput", pair_claims.throughputs_repeat),
)

COLUMNS = ("claim", "data", "verdict", "evidence", "holds_in", "holds_in_kept", "left_out", "name")


def table(cohorts: Sequence[Cohort]) -> pd.DataFrame:
    """Every claim on every measured cohort, one row each.

    ``claim`` is its statement, ``data`` names the cohort, ``verdict`` and ``evidence`` are as in
    `analysis.claims.verdicts.Verdict`, and ``name`` is short. ``holds_in`` counts the cells in which the claim holds,
    of all that could be compared; ``holds_in_kept`` those after ``left_out``, the rule by which some were left out.
    """
    rows = []
    for cohort in cohorts:
        if (cohort.frame["method"] != "measured").any():
            continue
        for claim in CLAIMS:
            verdict = claim.check(cohort.frame)
            rows.append(
                {
                    "claim": claim.statement,
                    "data": "the study" if is_study(cohort.frame) else cohort.title,
                    "verdict": verdict.verdict,
                    "evidence": verdict.evidence,
                    "holds_in": None if verdict.compared is None else str(verdict.compared),
                    "holds_in_kept": None if verdict.kept is None else str(verdict.kept),
                    "left_out": verdict.left_out or None,
                    "name": claim.name,
                }
            )
    return pd.DataFrame(rows, columns=[*COLUMNS])
