"""Every figure of the report, in the order of the questions it answers."""

from __future__ import annotations

from analysis.data import bandwidth as bandwidth_data
from analysis.data import bubble as bubble_data
from analysis.data import scaling as scaling_data
from analysis.data import winners
from analysis.figures import (
    all_runs,
    bandwidth,
    best_heatmaps,
    bubble,
    memory_specs,
    memory_stacks,
    outcomes,
    overhead,
    parallel_coordinates,
    predicted,
    scaling,
    why_specs,
)
from analysis.figures.spec import FigureSpec

FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "best_configurations",
        "best",
        "Best configuration of each model and size",
        "Each cell is the configuration with the most tokens/s/GPU among those that finished: parallel degrees with "
        "ZeRO stage, and micro-batch × number of micro-batches. Grey cells have no finished run.",
        best_heatmaps.draw,
        winners.table,
    ),
    FigureSpec(
        "best_by_published_mfu",
        "best",
        "Best configuration as the Ultra-Scale Playbook ranks it",
        "The study's own pair: best by its MFU, which counts tied embeddings twice once a pipeline splits them, and "
        "the reserved memory of that configuration. Models under the study's labels. Both rankings are in "
        "best_configurations.csv.",
        best_heatmaps.draw_published,
        winners.published_table,
    ),
    FigureSpec(
        "all_runs",
        "best",
        "All runs",
        "One mark for each point, fastest first. Area: throughput relative to the best of the row. Grey markers: "
        "failures.",
        all_runs.draw,
        all_runs.data,
    ),
    FigureSpec(
        "parallel_coordinates",
        "best",
        "Every finished run over its degrees",
        "One line a finished run, the best twentieth of each panel in full strength. Degrees and batching stand at "
        "equal distances; memory and throughput are to scale.",
        parallel_coordinates.draw,
        parallel_coordinates.data,
    ),
    FigureSpec(
        "dp_scaling",
        "scaling",
        "Scaling of data parallelism",
        "Data parallelism alone, at the ZeRO stage with the most degrees: the fastest of the n runs of each degree "
        "and its memory, at the tokens a step that most runs of the model have.",
        scaling.draw_data_parallel,
        scaling_data.data_parallel,
    ),
    FigureSpec(
        "tp_scaling",
        "scaling",
        "Scaling of tensor parallelism",
        "Tensor parallelism without a pipeline, each degree on the fewest devices it was run on: the fastest of its n "
        "runs, and the largest micro-batch that fitted, at the tokens a step that most runs of the model have.",
        scaling.draw_tensor_parallel,
        scaling_data.tensor_parallel,
    ),
    FigureSpec(
        "pp_scaling",
        "scaling",
        "Scaling of pipelines",
        "Pipelines without tensor parallelism, with few micro-batches (m = p − 1, or m = p where those are powers of "
        "two) and with 32: the fastest run of each depth, on whatever number of devices.",
        scaling.draw_pipeline_parallel,
        scaling_data.pipeline_parallel,
    ),
    FigureSpec(
        "bubble",
        "scaling",
        "Pipeline bubble",
        "Idle over busy time by the closed form for m micro-batches and v virtual stages; where waiting was timed, "
        "what pipelines really waited against it.",
        bubble.draw,
        bubble_data.table,
    ),
    FigureSpec(
        "bandwidth",
        "scaling",
        "Collective bandwidth",
        "Bus bandwidth that runs measured before training. Fast and slow are two regimes of one network, told apart by "
        "the all-reduce from 8 nodes on (the border is 120 GB/s).",
        bandwidth.draw,
        bandwidth_data.by_nodes,
    ),
    FigureSpec(
        "memory_by_category",
        "why",
        "Memory by category",
        "The fastest layouts of each model and size, fastest first: memory of the fullest rank at its peak.",
        memory_stacks.draw,
        memory_stacks.data,
    ),
    FigureSpec(
        "outcomes",
        "failed",
        "Outcomes",
        "What became of the points; a retried point counts by its last attempt.",
        outcomes.draw,
        outcomes.data,
    ),
    FigureSpec(
        "predicted_vs_found",
        "trust",
        "Prediction and finding",
        "The closed-form prediction made before the run against what the run showed; the band is ± 10 %.",
        predicted.draw,
        predicted.data,
    ),
    FigureSpec(
        "overhead",
        "trust",
        "Overhead",
        "Median wall time of a finished point by phase; white diamonds: the time lost between two points.",
        overhead.draw,
        overhead.data,
    ),
    *memory_specs.FIGURES,
    *why_specs.FIGURES,
)
