"""The study's claims as named checks, on the study's rows and on any other rows: pass, fail or not enough data.

Each check reports what it compared, how many runs or pairs, and the numbers. A check with too few rows says so instead
of deciding. On other rows than the study's, a check tests whether the claim holds there.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.claims import mfu_claims, pair_claims, pipeline_claims, published, scaling_claims, winner_claims
from analysis.claims.verdicts import AUDIT, STUDY, StudyClaim, is_study
from analysis.rows.cohorts import Cohort
from results.text.numbers import format_percent

CLAIMS = (
    StudyClaim(
        name="published_winners",
        statement="The published best configurations are the best by the study's MFU",
        source=STUDY,
        said_in="The pair of heatmaps: the best configuration of each model and number of nodes",
        computed=(
            "The run with the highest MFU, by the study's count, in each cell against the published cell:"
            " layout, and on the study's rows also MFU and memory"
        ),
        holds_if="all agree",
        counted="cells of the heatmaps",
        tables=("best_configurations.csv",),
        check=winner_claims.published_winners,
    ),
    StudyClaim(
        name="mfu_formula",
        statement="(6 N + 12 L h s) · tokens/s/GPU over the peak gives every recorded MFU",
        source=STUDY,
        said_in="The definition of its MFU",
        computed="The formula on every finished run against the recorded value",
        holds_if="all agree to a millionth",
        counted="finished runs",
        tables=("ranked.csv",),
        check=mfu_claims.mfu_formula,
    ),
    StudyClaim(
        name="data_parallel_falls",
        statement="Each doubling of pure data parallelism costs throughput per GPU",
        source=STUDY,
        said_in="The scaling figure of data parallelism",
        computed="The fastest run of each degree of dp with no other parallelism, each degree against the one before",
        holds_if="no step gains more than 3 %",
        counted="steps to a higher degree",
        tables=("dp_scaling.csv",),
        check=scaling_claims.data_parallel_falls,
    ),
    StudyClaim(
        name="zero_one_matched",
        statement="ZeRO 1 saves memory and costs no throughput against ZeRO 0",
        source=STUDY,
        said_in="The chapter on ZeRO: it moves as many bytes as plain data parallelism",
        computed="Pairs of runs that agree in everything but the ZeRO stage",
        holds_if=(
            "the interval of the median throughput ratio stays above 0.97 and the median memory falls; a pair "
            "holds if both are true for it"
        ),
        counted="pairs of runs",
        tables=("effects.csv", "ranked.csv"),
        check=pair_claims.zero_one_matched,
    ),
    StudyClaim(
        name="tensor_beyond_node",
        statement="Tensor parallelism beyond the node costs more than inside it",
        source=STUDY,
        said_in="The scaling figure of tensor parallelism",
        computed=(
            "The fastest run of each model, size and network regime without a pipeline, at tp of one node "
            "against tp of two, and the same doubling inside the node"
        ),
        holds_if="the interval of the first lies below that of the second",
        counted="models, sizes and regimes",
        tables=("tp_scaling.csv",),
        check=pair_claims.tensor_beyond_node,
    ),
    StudyClaim(
        name="pipeline_rewrite",
        statement="Rewriting the pipeline's communication made pipelines faster",
        source=STUDY,
        said_in="The column of its table that marks runs before and after the rewrite",
        computed="The best MFU of a pipeline before and after, of each model and size",
        holds_if="the cell with published values reproduces them and all cells with enough runs are faster after",
        counted="models and sizes",
        tables=("ranked.csv",),
        check=pipeline_claims.pipeline_rewrite,
    ),
    StudyClaim(
        name="bubble_is_waited",
        statement="A pipeline waits at least (p − 1) / (v m) of its busy time",
        source=STUDY,
        said_in="The figure of bubble sizes",
        computed="The measured waiting over the busy time of each pipeline, against the closed form",
        holds_if="95 % wait at least 97 % of it and the order agrees",
        counted="pipelines",
        tables=("bubble.csv",),
        check=pipeline_claims.bubble_is_waited,
    ),
    StudyClaim(
        name="short_pipelines_are_slower",
        statement="A pipeline with 32 micro-batches is faster than one with m = p − 1 (or m = p)",
        source=STUDY,
        said_in="The scaling figure of pipelines",
        computed=(
            "The fastest run with few micro-batches against the fastest with 32, at the same depth on as many "
            "devices in one network regime"
        ),
        holds_if="all are slower",
        counted="models, sizes and depths",
        tables=("pp_scaling.csv",),
        check=scaling_claims.short_pipelines_are_slower,
    ),
    StudyClaim(
        name="no_pipeline_wins_from_16_nodes",
        statement="From 16 nodes on, pp = 1 with tensor parallelism wins",
        source=STUDY,
        said_in="The trend that the study reads off the heatmaps",
        computed="The winners by the study's MFU on 16 nodes and more",
        holds_if="all have pp = 1 and tp above 1",
        counted="models and sizes",
        tables=("best_configurations.csv",),
        check=pipeline_claims.no_pipeline_wins_from_16_nodes,
    ),
    StudyClaim(
        name="bandwidths_are_medians",
        statement="The published bandwidths are medians over the runs, as captioned",
        source=STUDY,
        said_in="The caption of the bandwidth figure",
        computed="The plotted values against means and medians of the bandwidths that runs measured before training",
        holds_if="all are medians",
        counted="plotted values",
        tables=("bandwidth.csv",),
        check=scaling_claims.bandwidths_are_medians,
    ),
    StudyClaim(
        name="winners_by_throughput",
        statement="Ranked by tokens/s/GPU, other configurations win",
        source=AUDIT,
        said_in="The study's MFU counts tied embeddings twice in pipelines, throughput does not",
        computed="The winner of each cell by the study's MFU against the winner by throughput",
        holds_if="one differs; the count is of cells that differ",
        counted="models and sizes",
        tables=("best_configurations.csv",),
        check=winner_claims.winners_by_throughput,
    ),
    StudyClaim(
        name="tied_embeddings",
        statement="The study's MFU counts tied embeddings twice in pipelines",
        source=AUDIT,
        said_in="Its count of parameters is the sum over pipeline stages",
        computed="Study's MFU over PaLM's, with a pipeline over without (medians), by model with tied embeddings",
        holds_if="all are above 1, for the study's models by the weight of a second copy",
        counted="models",
        tables=("ranked.csv",),
        check=mfu_claims.tied_embeddings,
    ),
    StudyClaim(
        name="cells_are_of_their_model",
        statement="Every published winner has the model of its label",
        source=AUDIT,
        said_in="Runs of one label have several shapes",
        computed="Layers, width, heads and vocabulary of each winner against those of its label",
        holds_if="all agree",
        counted="models and sizes",
        tables=("best_configurations.csv",),
        check=winner_claims.cells_are_of_their_model,
    ),
    StudyClaim(
        name="no_pipeline_wins_in_one_regime",
        statement="From 16 nodes on, pp = 1 wins among runs on the same network regime",
        source=AUDIT,
        said_in="Runs without a pipeline mostly had the fast network, others the slow one",
        computed="The fastest run with and without a pipeline of each model and size in one network regime",
        holds_if=(
            "pp = 1 leads in all cells with enough runs; not decided if fewer than half of the models and sizes "
            "have such a cell"
        ),
        counted="models, sizes and regimes",
        tables=("ranked.csv",),
        check=pipeline_claims.no_pipeline_wins_in_one_regime,
    ),
    StudyClaim(
        name="published_bars",
        statement="Every bar of the published scaling figures is a row of the table",
        source=AUDIT,
        said_in="Figures and table were published separately",
        computed="Search for each plotted throughput among the finished runs",
        holds_if="all are found",
        counted="bars",
        tables=("ranked.csv",),
        check=scaling_claims.published_bars,
    ),
    StudyClaim(
        name="bandwidth_falls_in_one_regime",
        statement="From 8 nodes on, more nodes slow the all-reduce down also inside one network regime",
        source=AUDIT,
        said_in="The published curve averages two regimes",
        computed="The median all-reduce bandwidth by number of nodes in each regime",
        holds_if="it falls in all",
        counted="regimes",
        tables=("bandwidth.csv",),
        check=scaling_claims.bandwidth_falls_in_one_regime,
    ),
    StudyClaim(
        name="failures_take_devices",
        statement=f"Runs that fail take about {format_percent(published.FAILED_SHARE, 0)} of the requested GPUs",
        source=AUDIT,
        said_in="The cost of a sweep without a plan",
        computed="Devices of the points that did not finish over devices of all points",
        holds_if="the share is within 5 percentage points",
        counted="points",
        tables=("outcomes.csv", "failures.csv"),
        check=scaling_claims.failures_take_devices,
    ),
    StudyClaim(
        name="throughputs_repeat",
        statement="Runs of one configuration have the same throughput",
        source=AUDIT,
        said_in="No spread is published",
        computed="Highest over lowest throughput of configurations that ran more than once",
        holds_if="all are within 6 %",
        counted="configurations that ran more than once",
        tables=("ranked.csv",),
        check=pair_claims.throughputs_repeat,
    ),
)
"""The study's claims, then our audits of them."""

COLUMNS = (
    *("claim", "data", "verdict", "evidence", "holds_in", "holds_in_kept", "left_out", "name"),
    *("source", "said_in", "computed", "holds_if", "counted", "tables", "attempts", "finished"),
)


def table(cohorts: Sequence[Cohort]) -> pd.DataFrame:
    """Every claim on every measured cohort, one row each.

    ``claim`` is its statement, ``data`` names the cohort, ``verdict`` and ``evidence`` are those of
    `analysis.claims.verdicts.Verdict`, and ``name`` is short. ``holds_in`` is the number of cells in which the claim
    holds, of all comparable cells (``counted`` names the kind of cell); ``holds_in_kept`` is the same for the cells
    kept by the rule ``left_out``. ``source`` is the study or an audit of ours, ``tables`` are files of the report with
    the rows, ``attempts`` and ``finished`` count the cohort's rows.
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
                    "source": claim.source,
                    "said_in": claim.said_in,
                    "computed": claim.computed,
                    "holds_if": claim.holds_if,
                    "counted": claim.counted,
                    "tables": " ".join(claim.tables),
                    "attempts": len(cohort.frame),
                    "finished": int((cohort.frame["outcome"] == "ok").sum()),
                }
            )
    return pd.DataFrame(rows, columns=[*COLUMNS])
