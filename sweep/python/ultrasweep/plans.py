"""``ultrasweep.plan``: every point of a grid with its verdict, its predictions and its price, as a frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.rows.frames import frame_of
from results.tables.rows import table_from_rows
from results.tables.schema import LEDGER
from sweep.planning.best_layouts import listed
from sweep.planning.facts import plan_facts, point_facts
from sweep.planning.ledger import ledger_rows
from sweep.running.plan_only import plan_only
from ultrasweep.given import Conf, changes, folders, frame_of_rows, several, words


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The answer of `plan`."""

    points: pd.DataFrame = field(repr=False)
    """One row for each point, those to run first and in the order in which they would run: the columns of the ledger
    (docs/reference/tables.md). A value that is not predicted is null."""
    fastest: pd.DataFrame = field(repr=False)
    """The points that ``plan`` lists: the predicted fastest layouts of each model and size that can run, with
    ``layout`` in words, ``may_not_fit`` and ``predicted_mfu``."""
    facts: Mapping[str, Any]
    """What holds for the whole plan, by the names of ``plan --json`` (docs/json.md): ``verdicts``, ``rules``,
    ``left_out``, ``limit_bytes`` of a device, ``expected_gpu_hours``, ``jobs`` ..."""


def plan(
    grid: str | Sequence[str],
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    cluster: str | None = None,
    axes: Mapping[str, object] | None = None,
    where: str | Sequence[str] | None = None,
    top: int | None = None,
    overrides: Mapping[str, object] | None = None,
    conf: Conf = (),
) -> Plan:
    """Every point of one or several grids with its verdict, its predicted memory and step time, and its price.

    ``grid``: names of shipped grids, or of your own in ``conf``. ``model``: names or paths of published config.json
    files, instead of the grid's models. ``cluster``: instead of the grid's. ``axes``: axes to change or to add, each a
    value or a list, such as ``{"tp": [1, 2], "global_batch_size": 256}``. ``where``: conditions such as
    ``"predicted_peak_bytes < 60e9"``. ``top``: layouts of each model and size in `Plan.fastest`. ``overrides``: other
    options by their dotted names, such as ``{"plan.oom_margin": 1.2}``. Like ``python -m sweep plan``, it reads the
    measurements of ``results_dir`` for its predictions. Raises `UltrasweepError` with one line for a mistake; a plan of
    which no point can run is returned all the same.
    """
    options = {"model": model, "cluster": cluster}
    of_axes = {f"grid.axes.{name}": value for name, value in (axes or {}).items()}
    given = [*words({"+grid": several("grid", grid), **options}), *changes(of_axes), *changes(overrides)]
    made = plan_only(given, folders(conf), [] if where is None else several("where", where))
    return Plan(
        points=frame_of(table_from_rows(ledger_rows(made), LEDGER)),
        fastest=frame_of_rows([point_facts(first, made) for first, *_ in listed(made, top=top)]),
        facts=plan_facts(made),
    )
