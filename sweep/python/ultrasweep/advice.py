"""``ultrasweep.advise``: the fastest layouts that fit, as frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from results.errors import UltrasweepError
from sweep.advising.answer import answer
from sweep.advising.facts import advice_facts, goal_of, layouts_of, sizes_of
from sweep.advising.question import read_question
from ultrasweep.given import Conf, changes, folders, frame_of_rows, several, words
from workloads.spec.record import config_columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Advice:
    """The answer of `advise`."""

    layouts: pd.DataFrame = field(repr=False)
    """One row for each of the fastest layouts of each number of GPUs, best first: ``gpus``, ``place`` (1 is the
    fastest), ``layout`` in words, the predictions with the bounds of their 90 % intervals (``predicted_step_time_s``,
    ``_low``, ``_high``, ``predicted_tokens_per_s_per_gpu``, ``predicted_mfu``, ``predicted_peak_bytes`` with the
    workspace of matrix products), joules of a token by the measured power and, as an upper bound, by the power limit
    (``predicted_energy_per_token_j``, ``predicted_energy_per_token_at_most_j``), the shares of a step, and the columns
    of the configuration. With ``optimise`` the best layouts of all numbers of GPUs together. Empty for a question with
    ``tokens`` and ``days``."""
    goal: pd.DataFrame = field(repr=False)
    """One row for each ``choice`` (``fewest`` GPUs, ``surely``, ``cheapest``, with ``optimise="time"`` also
    ``soonest``) that trains ``tokens`` in ``days``: also ``days``, ``days_low``, ``days_high``, ``gpu_hours``,
    ``price``, ``energy_mwh`` by the measured power, ``energy_at_most_mwh`` by the power limit. Empty if no number of
    GPUs does, or for a question with ``gpus`` alone."""
    sizes: pd.DataFrame = field(repr=False)
    """One row for each number of GPUs with a valid layout: ``layouts_timed``, ``given_up_at_s`` (null: the search was
    complete), ``least_bytes`` (null: something fits)."""
    facts: Mapping[str, Any]
    """What holds for the whole answer, by the names of ``advise --json`` (docs/json.md): ``limit_bytes`` of a device,
    ``times_from``, ``search_command`` ..."""


def advise(
    model: str | Path,
    cluster: str,
    gpus: int | str | Sequence[int] | None = None,
    *,
    tokens: float | None = None,
    days: float | None = None,
    price: float | None = None,
    seq_len: int | None = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    top: int = 5,
    optimise: str | None = None,
    overrides: Mapping[str, object] | None = None,
    where: str | Sequence[str] | None = None,
    conf: Conf = (),
) -> Advice:
    """The layouts that train a model fastest on ``gpus`` GPUs, of all that fit, as predicted. Or, with ``tokens`` and
    ``days``, the fewest GPUs and the least money to train so many tokens in time.

    ``model``: a name, or the path of a published config.json. ``cluster``: a name. ``gpus``: one number, several, or a
    span such as "16-1024" (all whole nodes). ``price``: of a GPU-hour. ``seq_len`` in tokens, ``global_batch_size`` in
    sequences a step, ``precision`` such as "bf16"; None: the defaults of the command. ``top``: layouts for each number
    of GPUs. ``optimise``: "time", "energy" (joules a token) or "cost" (GPU-hours a token), by which the layouts of all
    numbers of GPUs are ranked together. ``overrides``: other options by their names, such as ``{"tp": [1, 2],
    "recompute": "none", "cluster.nodes": 4}``. ``where``: conditions on a layout's fields such as ``"tp * cp <= 8"``.
    ``conf``: folders with your own model/ and cluster/ files. Raises
    `UltrasweepError` with one line for a mistake.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise UltrasweepError(f"top={top!r} is not a whole number of at least 1")
    asked: dict[str, object] = {"model": model, "cluster": cluster, "gpus": gpus, "tokens": tokens, "days": days}
    asked |= {"price": price, "seq_len": seq_len, "global_batch_size": global_batch_size, "precision": precision}
    conditions = [] if where is None else several("where", where)
    question = read_question([*words(asked), *changes(overrides)], folders(conf), conditions)
    advice = answer(question, top, optimise=optimise)
    layouts, goal = (
        [{**numbers, **config_columns(ranked.experiment)} for ranked, numbers in rows]
        for rows in (layouts_of(advice), goal_of(advice))
    )
    return Advice(
        layouts=frame_of_rows(layouts),
        goal=frame_of_rows(goal),
        sizes=frame_of_rows(sizes_of(advice)),
        facts=advice_facts(advice),
    )
