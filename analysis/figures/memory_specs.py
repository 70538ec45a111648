"""The figures of where memory goes."""

from __future__ import annotations

from functools import partial

from analysis.figures import memory_axes, memory_timeline
from analysis.figures.spec import FigureSpec

_HOW = (
    " Runs that differ in nothing else, those with most values of the axis; bars in full colour are measured, pale "
    "ones the planner's closed form of the same layout. Where no runs differ in this only, the closed form for the "
    "fastest run of each of the largest models with the axis changed."
)


def _spec(axis: str, title: str, caption: str) -> FigureSpec:
    return FigureSpec(
        f"memory_{axis}" if axis == "5d" else f"memory_by_{axis}",
        "why",
        title,
        caption,
        partial(memory_axes.draw, axis=axis),
        partial(memory_axes.data, axis=axis),
    )


FIGURES: tuple[FigureSpec, ...] = (
    FigureSpec(
        "memory_timeline",
        "why",
        "Memory over the first steps",
        "The fastest run of the largest model. Areas: what the closed form says is held between operations, which are "
        "drawn in their order and not to their times. Lines: the highest moment of each step, with what an operation "
        "needs while it runs. The optimizer's state appears with the first optimizer step. Right: the highest moment "
        "of the timed steps by category.",
        memory_timeline.draw,
        memory_timeline.data,
    ),
    _spec(
        "seq_len",
        "Memory against sequence length",
        "Activations grow with the sequence, everything else stays." + _HOW,
    ),
    _spec(
        "recompute",
        "Memory against recomputation",
        "Selective recomputation makes norms, rotated queries and keys and the SwiGLU product again; full "
        "recomputation keeps the input of each block only." + _HOW,
    ),
    _spec(
        "dp",
        "Memory against data parallelism",
        "More data-parallel ranks save memory only where ZeRO shards something over them." + _HOW,
    ),
    _spec(
        "zero",
        "Memory against ZeRO stage",
        "Stage 1 shards the optimizer's state over the data-parallel ranks, 2 the gradients too, 3 the parameters. The "
        "engine keeps master weights sharded from stage 1 on." + _HOW,
    ),
    _spec(
        "tp",
        "Memory against tensor parallelism, without and with sequence parallelism",
        "With it, which is how the engine runs unless told otherwise, activations between the divided matrices are "
        "divided over the ranks as well." + _HOW,
    ),
    _spec(
        "cp",
        "Memory against context parallelism",
        "Context parallelism divides the tokens of each sequence: activations only." + _HOW,
    ),
    _spec(
        "pp",
        "Memory against pipeline parallelism",
        "A stage holds 1/p of the layers, but under 1F1B the first one holds p micro-batches at a time: parameters "
        "shrink, activations hardly do where there are micro-batches enough." + _HOW,
    ),
    _spec(
        "5d",
        "Memory from one device to all axes",
        "One axis added after another to what stands left of it: the finished run of each model with the most axes in "
        "use, those that it lacks at degree 2 (ZeRO: stage 3). Bars in full colour are measured, pale ones the "
        "planner's closed form. Totals are written on bars that are cut off.",
    ),
)
