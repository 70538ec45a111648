"""The table of a plan's best points: the predicted fastest of each model and size, or the first by any column."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from results.text.numbers import GIB, format_number, plural
from results.text.terminal import plain_table
from sweep.grids.columns import POINT_NAMES, PREDICTED_NAMES, value_of
from sweep.planning.mfu import mfu_cell, mfu_note
from sweep.planning.plan import Plan
from sweep.planning.point_verdict import PlannedPoint, may_not_fit
from sweep.planning.summary import layout, workload
from sweep.predicting.power import JOULES
from workloads.spec.checks import did_you_mean
from workloads.spec.errors import InvalidSweep
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import canonical_model

CAN_RUN = ("run", "cached", "over_budget")
"""Verdicts of the points that are listed when nothing else is asked for."""
DEFAULT_TOP = 10
_MOST_ROWS = 40
"""By default the rows per model and size are limited so that the table has about this many rows in all."""
_RATE = "predicted_tokens_per_s_per_gpu"
_SHOWN = {_RATE, "predicted_peak_bytes", "world_size", "model"}
"""Columns that the table always has."""
_CHOSEN_SHOWN = 3
"""Number of points of which the plan says why they recompute what they do (``recompute: auto``)."""
_VARIES = ("dp_replicate", "zero_stage", "gradient_accumulation_fusion", "recompute", "recompute_every")
"""Fields in which the variants of a layout differ. How gradients are added follows from the ZeRO stage."""
_FAMILY = tuple(
    field.name for field in dataclasses.fields(Experiment) if field.name not in ("model", "dp_shard", "seed", *_VARIES)
)


@dataclass(frozen=True, slots=True)
class Order:
    """A column to sort by, and whether its largest values come first."""

    column: str
    descending: bool


def parse_order(text: str) -> Order:
    """Parses ``COLUMN``, ``COLUMN:asc`` or ``COLUMN:desc``; without a direction the better values come first.

    Raises `InvalidSweep` with the closest name for a column that no point has.
    """
    name, colon, direction = text.partition(":")
    known = POINT_NAMES | set(PREDICTED_NAMES)
    if name not in known:
        columns = sorted({*PREDICTED_NAMES.values(), *POINT_NAMES})
        raise InvalidSweep(
            f"--sort {text}: no column {name!r}{did_you_mean(name, known) or ';'} known: {', '.join(columns)}"
        )
    if colon and direction not in ("asc", "desc"):
        raise InvalidSweep(f"--sort {text}: write {name}:asc (smallest first) or {name}:desc (largest first)")
    column = PREDICTED_NAMES.get(name, name)
    return Order(column, direction == "desc" if colon else column == _RATE)


def print_best(
    plan: Plan, console: Console, *, top: int | None = None, order: Order | None = None, verdicts: Sequence[str] = ()
) -> None:
    """Print the best points of the plan with their ids.

    ``order``: print the first ``top`` points by this column. Without it, print the ``top`` predicted fastest of each
    model and world size. ``verdicts``: print only points with these verdicts, with the reason of each; by default,
    points that can run. A point whose peak lies between the device limit and ``plan.oom_margin`` times that limit can
    run, is marked "may not fit", and without ``order`` stands after every layout of its model and size that fits.
    """
    shown = [point for point in plan.points if point.verdict in (verdicts or CAN_RUN)]
    if not shown:
        named = " or ".join(verdicts or CAN_RUN)
        console.print(f"no point has the verdict {named}", highlight=False, markup=False)
        return
    if all(point.time is None for point in shown):
        console.print(_without_times(plan, shown), highlight=False, markup=False)
        if top is None and order is None and not verdicts:
            return
    families = listed(plan, top=top, order=order, verdicts=verdicts)
    rows = [first for first, *_ in families]
    variants = {first.experiment.id: others for first, *others in families}
    title = "fastest predicted of each model and size"
    if order is not None:
        title = f"by {order.column}, {'largest' if order.descending else 'smallest'} first"
    console.print(_table(plan, rows, title, order, bool(verdicts), variants))
    timed = any(point.time is not None for point in rows)
    if timed and (note := mfu_note((point.experiment.precision for point in rows), plan.config.cluster)):
        console.print(note, highlight=False, markup=False)
    if timed and not verdicts and plan.power.source is not None:
        console.print(f"J/token: {plan.power.source}", highlight=False, markup=False)
    if not verdicts:
        chosen = [f"{one.experiment.hash}  {one.detail}" for one in rows if one.verdict == "run" and one.detail]
        for line in chosen[:_CHOSEN_SHOWN]:
            console.print(line, highlight=False, markup=False)
    if len(rows) < len(shown):
        console.print(_how_to_see_more(len(rows), len(shown), order), highlight=False, markup=False)


def listed(
    plan: Plan, *, top: int | None = None, order: Order | None = None, verdicts: Sequence[str] = ()
) -> list[list[PlannedPoint]]:
    """The points that `print_best` prints, each with its variants; the parameters are those of `print_best`."""
    shown = [point for point in plan.points if point.verdict in (verdicts or CAN_RUN)]
    if order is not None:
        return [[point] for point in _ordered(shown, order)[: top or DEFAULT_TOP]]
    return fastest(shown, top, together=not verdicts)  # each refused point has its own reason


def fastest(
    points: Iterable[PlannedPoint], top: int | None = None, *, together: bool = True
) -> list[list[PlannedPoint]]:
    """The ``top`` layouts with the most predicted tokens/s/GPU of every model and world size, best first, each with
    its variants.

    A different routing counts as a different model. The variants of a layout differ from it in what is sharded and
    recomputed alone (see `_family`); they follow it in its list, best first, and one layout counts once however many
    seeds it has. With ``together`` False each variant is a layout of its own. ``top`` None: 10, or fewer if there are
    many models and sizes. Layouts that may not fit follow all that fit, and layouts whose speed is not predicted come
    last of either.
    """
    cells: dict[tuple[str, int], list[PlannedPoint]] = defaultdict(list)
    models: dict[str, int] = {}
    for point in points:
        name = workload(point.experiment)
        models.setdefault(name, len(models))
        cells[name, point.experiment.world_size].append(point)
    each = top if top is not None else max(1, min(DEFAULT_TOP, _MOST_ROWS // max(1, len(cells))))
    order = Order(_RATE, True)
    result = []
    for cell in sorted(cells, key=lambda cell: (models[cell[0]], cell[1])):
        ordered = sorted(_ordered(cells[cell], order), key=may_not_fit)
        result += list(_families(ordered, together).values())[:each]
    return result


def _families(points: Iterable[PlannedPoint], together: bool) -> dict[tuple[object, ...], list[PlannedPoint]]:
    """Points by layout, in the order of the points, without those that differ from an earlier one in the seed alone."""
    families: dict[tuple[object, ...], list[PlannedPoint]] = defaultdict(list)
    seen: set[tuple[object, ...]] = set()
    for point in points:
        family = _family(point.experiment)
        one = (*family, *(getattr(point.experiment, name) for name in _VARIES))
        if one not in seen:
            seen.add(one)
            families[family if together else one].append(point)
    return families


def _family(experiment: Experiment) -> tuple[object, ...]:
    """What the variants of a layout have in common: every field but the seed, the ZeRO stage, the sharding of the data
    parallel ranks, and recomputation."""
    same = (getattr(experiment, name) for name in _FAMILY)
    return (canonical_model(experiment.model), experiment.dp, *same)


def _ordered(points: Sequence[PlannedPoint], order: Order) -> list[PlannedPoint]:
    """Sorts stably by one column: points with equal values keep their order, unknown values come last."""
    values = [(value_of(point, order.column), point) for point in points]
    known = [pair for pair in values if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=order.descending)
    return [point for _, point in known] + [point for value, point in values if value is None]


def _table(
    plan: Plan,
    rows: Sequence[PlannedPoint],
    title: str,
    order: Order | None,
    reasons: bool,
    variants: Mapping[str, Sequence[PlannedPoint]],
) -> Table:
    table = plain_table(title=f"\n{title}")
    table.add_column("model")
    extra = order.column if order is not None and order.column not in _SHOWN else None
    processes = "processes" if plan.config.cluster.backend == "cpu" else "GPUs"
    energetic = plan.power.is_known and not reasons and any(point.time is not None for point in rows)
    energy = ["J/token"] if energetic else []
    interval = ["90 %"] if any(_interval(point) for point in rows) else []
    for name in (processes, "tokens/s/GPU", *interval, "MFU %", "GiB", *([extra] if extra else []), *energy):
        table.add_column(name, justify="right", no_wrap=name == "90 %")
    table.add_column("layout")
    table.add_column("id", no_wrap=True)
    table.add_column("")
    last = ""
    for point in rows:
        experiment, rate = point.experiment, point.tokens_per_s_per_gpu
        name = workload(experiment)
        cells = (
            name if name != last else "",
            str(experiment.world_size),
            f"{rate:,.0f}" if rate is not None else "",
            *([_interval(point)] if interval else []),
            mfu_cell(experiment.model, experiment.attended_length, experiment.precision, rate, plan.config.cluster),
            f"{point.peak_bytes / GIB:.1f}" if point.peak_bytes is not None else "",
            *([_cell(value_of(point, extra))] if extra else []),
            *([plan.power.joules_per_token(rate).cell(JOULES)] if energy else []),
            layout(experiment),
            experiment.hash,
            "; ".join(filter(None, [_remark(point, reasons), _also(experiment, variants.get(experiment.id, ()))])),
        )
        table.add_row(*map(escape, cells))
        last = name
    return table


def _interval(point: PlannedPoint) -> str:
    """Range that covers the middle 90 % of predicted tokens/s/GPU; empty if nothing is predicted."""
    time = point.time
    if time is None:
        return ""
    tokens = point.experiment.tokens_per_step / point.experiment.world_size
    return f"{tokens / time.high_s:,.0f} to {tokens / time.low_s:,.0f}"


def _cell(value: object) -> str:
    if value is None:
        return ""
    return format_number(value) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _remark(point: PlannedPoint, reasons: bool) -> str:
    parts = [] if point.verdict == "run" and not reasons else [point.verdict]
    if (imbalance := point.experiment.attention_imbalance) is not None:
        parts.append(f"attention imbalance {imbalance:.3f}")
    if reasons and point.broken:
        return "\n".join(("; ".join(parts), *(f"{one.rule}: {one.message}" for one in point.broken)))
    if reasons and point.detail is not None:
        parts.append(f"{point.rule}: {point.detail}" if point.rule is not None else point.detail)
    if point.verdict in CAN_RUN and may_not_fit(point) and point.peak_bytes and point.limit_bytes:
        parts.append(f"may not fit ({100 * point.peak_bytes / point.limit_bytes:.0f} %)")
    return "; ".join(parts)


def _also(first: Experiment, variants: Sequence[PlannedPoint]) -> str:
    """Number of variants of a layout, and in what the best of them differs, with its rate; empty if there is none."""
    if not variants:
        return ""
    best, rate = variants[0].experiment, variants[0].tokens_per_s_per_gpu
    differs = []
    if best.dp_replicate != first.dp_replicate:
        differs.append(f"dp {best.dp_replicate}x{best.dp_shard}")
    if best.zero_stage != first.zero_stage:
        differs.append(f"ZeRO {best.zero_stage}")
    if (best.recompute, best.recompute_every) != (first.recompute, first.recompute_every):
        every = f" every {best.recompute_every}" if best.recompute_every > 1 else ""
        differs.append(f"recompute {best.recompute}{every}")
    if not differs:
        differs.append("gradients added in products" if best.gradient_accumulation_fusion else "gradients added apart")
    count = f"+{plural(len(variants), 'variant')}"
    return f"{count}: {', '.join(differs)}" + (f" {rate:,.0f}" if rate is not None else "")


def _how_to_see_more(shown: int, of: int, order: Order | None) -> str:
    each = "" if order is not None else " of each model and size"
    return (
        f"{shown:,} of {plural(of, 'point')} shown; --top N for more{each}, --sort COLUMN, --show all includes points "
        "that cannot run, --out FILE writes every point"
    )


def _without_times(plan: Plan, points: Sequence[PlannedPoint]) -> str:
    """Explains why no step time is predicted: the values missing in the cluster file."""
    cluster = plan.config.cluster
    precisions = sorted({point.experiment.precision for point in points})
    absent = [f"device.peak_flops.{name}" for name in precisions if cluster.device.peak_of(name) is None]
    absent += ["device.memory_bandwidth"] if cluster.device.memory_bandwidth is None else []
    absent += ["matmul_efficiency"] if cluster.matmul_efficiency is None else []
    if not absent:
        return "no step time is predicted: these points break a rule of the layout"
    return f"no step time is predicted: the file of cluster {cluster.name} lacks {', '.join(absent)}"
