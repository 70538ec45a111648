"""Panels of stacked bars: memory of the fullest rank along one axis, and from one device to every axis at once.

If a family of rows differs in the axis only, bars come from rows: the measured split of finished rows, the closed form
for rows of this project's engine that have only shape and layout, the measured peak of other engines' rows. Without
such a family, bars are the closed form of the fastest finished run's layout with the axis changed. Every bar names its
source; no panel has bars of two engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.memory.families import Family, FamilyAxis, countable, families, like, matching_of, twin
from analysis.memory.peak_split import (
    PREDICTED,
    UNSPLIT,
    Stack,
    experiment_of,
    is_of_another_engine,
    predicted,
    stack_of,
)
from analysis.memory.variants import steps_to_all, variant
from analysis.rows import metrics
from analysis.rows.frame_cache import cache_per_frame
from analysis.rows.labels import MEMORY_CATEGORIES, records
from results.text.numbers import plural
from workloads.spec.experiment import ENGINE
from workloads.spec.record import config_columns

MOST_MODELS = 2
"""Number of models whose families of rows are drawn: those with most values of the axis, then the largest."""
_CLOSED_FORM_MODELS = {"seq_len": 3, "recompute": 2}
"""Number of models (the largest) for which the closed form is drawn, by axis; 1 for other axes. Models differ most in
activations."""
ROWS, CLOSED_FORM = "rows", "closed form"
ALL_AXES = "5d"
_MICRO_BATCHES, _BATCH = "num_microbatches", "global_batch_size"
_MEASURED = ("peak_allocated_bytes", "peak_reserved_bytes", "device_memory_bytes")
_COLUMNS = (
    *(
        "model",
        "variant",
        "held",
        "value",
        "basis",
        "split",
        "outcome",
        *MEMORY_CATEGORIES,
        "stack_bytes",
        "closed_form_bytes",
    ),
    *(*_MEASURED, "repeats", "stack_engine", "engine", "experiment_id", "attempt_id"),
)
_CHAIN_COLUMNS = (
    *(
        "model",
        "dp_replicate",
        "dp_shard",
        "zero_stage",
        "tp",
        "sequence_parallel",
        "cp",
        "pp",
        "pp_schedule",
        "ep",
        "etp",
    ),
    *("virtual_stages", "micro_batch_size", "global_batch_size", "seq_len", "recompute", "recompute_every"),
    "precision",
)
_OF_THE_ROW = ("attention", "compile", "seed", "engine", "engine_version")
"""Columns that must match the row only if the row has them; rows of other engines do not."""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    """Value of the axis."""
    stack: Stack
    row: Mapping[str, Any] | None
    """Row with this configuration; None if there is none."""
    closed_form: Stack | None = None
    """Closed form of the same layout, for comparison with a measured or traced split; None if ``stack`` is the closed
    form."""


@dataclass(frozen=True, slots=True)
class Panel:
    model: str
    variant: str
    """Difference from the model's other panel; empty if there is none."""
    held: str
    """Choices that all bars share, in two lines."""
    bars: tuple[Bar, ...]

    @property
    def basis(self) -> str:
        return ROWS if any(bar.row is not None for bar in self.bars) else CLOSED_FORM


@cache_per_frame
def along(frame: pd.DataFrame, axis: FamilyAxis) -> list[Panel]:
    """Panels of one axis, smallest model first; empty if no finished run's memory is known or computable.

    For tensor parallelism each model has two panels: with and without sequence parallelism.
    """
    rows = countable(frame)
    best = families(rows, axis, matching_of(frame))
    best = sorted(best, key=lambda family: (len(family.rows), family.num_params))[-MOST_MODELS:]
    best.sort(key=lambda family: (family.num_params, family.model))
    panels = [panel for family in best for panel in _of_family(rows, family, axis)]
    panels = [panel for panel in panels if len(panel.bars) > 1]
    if panels:
        return panels
    fastest = _best_of_each_model(rows, [metrics.RANK_BY])[-_CLOSED_FORM_MODELS.get(axis.name, 1) :]
    return [panel for base in fastest for panel in _of_variants(base, axis)]


@cache_per_frame
def together(frame: pd.DataFrame) -> list[Panel]:
    """Panel for the largest model from one device to all axes, which are added one by one.

    The target is the finished run with the most axes in use, then on the most devices, then the fastest. The steps keep
    either the number of micro-batches or the global batch, whichever matches more rows.
    """
    rows = countable(frame)
    axes_in_use = (rows[["dp", "zero_stage", "tp", "pp", "cp", "ep"]] > [1, 0, 1, 1, 1, 1]).sum(axis=1)
    rows = rows.assign(_in_use=axes_in_use)
    panels = []
    for row in _best_of_each_model(rows, ["_in_use", "world_size", metrics.RANK_BY])[-1:]:
        chains = [(_chain(rows, row, fixed), fixed) for fixed in (_MICRO_BATCHES, _BATCH)]
        bars, fixed = max(chains, key=lambda chain: sum(bar.row is not None for bar in chain[0]))
        if len(bars) > 1:
            panels.append(Panel(str(row["model"]), "", _held(row, ALL_AXES, fixed), bars))
    return panels


def table(panels: list[Panel]) -> pd.DataFrame:
    """One line per bar: bytes by category, their source, and the measurements of its row if there is one.

    ``basis``: rows, or closed form if no row has the configuration. ``split``: measured, traced, predicted, or not
    split; then the bytes by category are null. ``stack_engine`` is the engine of the bytes by category, ``engine`` that
    of the row's measurements.
    """
    lines = []
    for panel in panels:
        for bar in panel.bars:
            row = bar.row or {}
            lines.append(
                {
                    "model": panel.model,
                    "variant": panel.variant,
                    "held": panel.held.replace("\n", " · "),
                    "value": bar.label.replace("\n", " "),
                    "basis": CLOSED_FORM if bar.row is None else ROWS,
                    "split": bar.stack.source,
                    "outcome": row.get("outcome"),
                    **_by_category(bar.stack),
                    "stack_bytes": bar.stack.total,
                    "closed_form_bytes": None if bar.closed_form is None else bar.closed_form.total,
                    **{name: row.get(name) for name in (*_MEASURED, "repeats", "experiment_id", "attempt_id")},
                    "stack_engine": ENGINE if bar.stack.source == PREDICTED else row.get("engine"),
                    "engine": row.get("engine"),
                }
            )
    return pd.DataFrame(lines, columns=list(_COLUMNS))


def _by_category(stack: Stack) -> dict[str, int | None]:
    if stack.source == UNSPLIT:
        return dict.fromkeys(MEMORY_CATEGORIES)
    return dict(zip(MEMORY_CATEGORIES, stack.bytes, strict=True))


def _bar(label: str, stack: Stack, row: Mapping[str, Any] | None) -> Bar:
    experiment = None if row is None or stack.source in (PREDICTED, UNSPLIT) else experiment_of(row)
    return Bar(label, stack, row, None if experiment is None else predicted(experiment))


def _of_family(rows: pd.DataFrame, family: Family, axis: FamilyAxis) -> list[Panel]:
    held = _held(family.rows[-1], axis.name, family.fixed)
    if axis.name != "tp":
        return [Panel(family.model, "", held, _bars(family, axis))]
    with_it = bool(family.rows[-1]["sequence_parallel"])
    family_panel = Panel(family.model, _variant(with_it), held, _bars(family, axis))
    other = Panel(family.model, _variant(not with_it), held, _flipped(rows, family, axis, not with_it))
    return [other, family_panel] if with_it else [family_panel, other]


def _bars(family: Family, axis: FamilyAxis) -> tuple[Bar, ...]:
    stacks = [(row, stack_of(row)) for row in family.rows]
    return tuple(_bar(_text(row[axis.column]), stack, row) for row, stack in stacks if stack is not None)


def _flipped(rows: pd.DataFrame, family: Family, axis: FamilyAxis, sequence_parallel: bool) -> tuple[Bar, ...]:
    """The family with the other setting of sequence parallelism: matching rows, otherwise the closed form if the family
    is of this project's engine."""
    others = twin(rows, family, axis, sequence_parallel=sequence_parallel)
    bars = []
    for row in family.rows:
        pair = row if row["tp"] == 1 else others.get(row["tp"])  # with one rank, sequence parallelism has no effect
        stack = None if pair is None else stack_of(pair)
        if stack is None and not is_of_another_engine(row) and (e := experiment_of(row)) is not None:
            changed = variant(e, "tp", e.tp, sequence_parallel=sequence_parallel)
            stack = None if changed is None else predicted(changed)
        if stack is not None:
            bars.append(_bar(_text(row["tp"]), stack, pair))
    return tuple(bars)


def _of_variants(base: Mapping[str, Any], axis: FamilyAxis) -> list[Panel]:
    """Closed form for one row's layout with the axis changed."""
    experiment = experiment_of(base)
    assert experiment is not None
    panels = []
    for kind in (False, True) if axis.name == "tp" else (None,):
        layouts = [variant(experiment, axis.name, value, sequence_parallel=kind) for value in axis.values]
        possible = [(value, e) for value, e in zip(axis.values, layouts, strict=True) if e is not None]
        if len(possible) > 1:
            bars = tuple(Bar(_text(value), predicted(e), None) for value, e in possible)
            held = _held(config_columns(possible[-1][1]), axis.name, _MICRO_BATCHES)
            panels.append(Panel(str(base["model"]), "" if kind is None else _variant(kind), held, bars))
    return panels


def _chain(rows: pd.DataFrame, row: Mapping[str, Any], fixed: str) -> tuple[Bar, ...]:
    target = experiment_of(row)
    assert target is not None
    rows = rows[(rows["model"] == row["model"]) & (rows["micro_batch_size"] == row["micro_batch_size"])]
    bars = []
    for name, experiment in steps_to_all(target, same_batch=fixed == _BATCH):
        columns = config_columns(experiment)
        wanted = {column: columns[column] for column in _CHAIN_COLUMNS} | {name: row[name] for name in _OF_THE_ROW}
        matching_row = None if is_of_another_engine(row) else like(rows, wanted)
        bars.append(
            _bar(name, (stack_of(matching_row) if matching_row else None) or predicted(experiment), matching_row)
        )
    return tuple(bars)


def _best_of_each_model(rows: pd.DataFrame, by: list[str]) -> list[dict[str, Any]]:
    """The first finished row of each model by these columns, highest first; smallest model first."""
    ok = rows[rows["outcome"] == "ok"]
    keys = ok[[*dict.fromkeys([*by, "attempt_id", "model"])]]
    order = keys.sort_values([*by, "attempt_id"], ascending=[*[False] * len(by), True], na_position="last")
    first = records(ok.loc[order.drop_duplicates("model").index])
    chosen = {str(row["model"]): row for row in first if experiment_of(row) is not None}
    size = {name: row["num_params"] if pd.notna(row["num_params"]) else 0 for name, row in chosen.items()}
    return [chosen[name] for name in sorted(chosen, key=lambda name: (size[name], name))]


def _held(row: Mapping[str, Any], axis: str, fixed: str) -> str:
    """Choices that a panel's bars share: degrees in one line, batch and sequence length in the next."""
    degrees = []
    if axis == ALL_AXES:
        pass
    elif axis == "dp":
        degrees.append(f"ZeRO {int(row['zero_stage'])}")
    else:
        replicas, shards, dp = (int(row[name]) for name in ("dp_replicate", "dp_shard", "dp"))
        stage = "" if axis == "zero" or dp == 1 else f" z{int(row['zero_stage'])}"
        degrees.append(f"dp{f'{replicas}×{shards}' if min(replicas, shards) > 1 else dp}{stage}")
    if axis != ALL_AXES:
        degrees += [f"{name}{int(row[name])}" for name in ("tp", "cp", "pp", "ep") if name != axis and row[name] > 1]
    if axis != "recompute" and row["recompute"] != "none":
        degrees.append(f"{row['recompute']} recompute" + _every(row))
    if isinstance(row["compile"], str) and row["compile"] != "none":
        degrees.append("compiled")
    if row["precision"] != "bf16":
        degrees.append(str(row["precision"]).replace("_", " "))
    count = int(row[fixed])
    batch = [f"mbs {int(row['micro_batch_size'])}"]
    batch.append(plural(count, "micro-batch", "micro-batches") if fixed == _MICRO_BATCHES else f"batch {count:,}")
    if axis != "seq_len":
        batch.append(f"{int(row['seq_len']):,} tokens")
    return "\n".join(" · ".join(line) for line in (degrees, batch) if line)


def _every(row: Mapping[str, Any]) -> str:
    every = row["recompute_every"]
    return f" of 1 layer in {int(every)}" if pd.notna(every) and every > 1 else ""


def _variant(sequence_parallel: bool) -> str:
    return f"{'with' if sequence_parallel else 'without'} sequence parallelism"


def _text(value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{int(value):,}"
