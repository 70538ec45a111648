"""Prints the answer of ``advise``: the fastest layouts that fit, and the search that would measure them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from results.text.numbers import GIB, format_bytes, format_hours, plural
from results.text.terminal import plain_table
from sweep.advising.answer import Advice, Costed, GoalAnswer, SizeAnswer, settling_words
from sweep.advising.facts import ahead_of_best, narrowed_of, search_hours
from sweep.advising.published import PublishedLayout
from sweep.advising.question import Question
from sweep.advising.ranked import RankedLayout
from sweep.composing.planned_only import planned_only
from sweep.grids.step_time import ALIKE
from sweep.planning.mfu import mfu_cell, mfu_note
from sweep.planning.point_verdict import too_big_for_host
from sweep.planning.summary import layout
from sweep.predicting.power import JOULES
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.rules.captured_steps import is_captured
from workloads.rules.engine_kinds import engine_lacks
from workloads.spec.experiment import ENGINE

_LEAST_SHARE = 0.005
_MOST_NAMED = 8
"""Most numbers of devices that a title names."""
_LEAST = {"time": "time", "energy": "energy a token", "cost": "GPU-hours a token"}
_CAUTIOUS = "ranked by the step time that three in four such predictions keep: a wide interval counts against a layout"
_SAME_POWER = "energy and cost rank alike: every layout is taken to draw the same power a device"


def print_answer(answer: Advice, console: Console) -> None:
    """Print the answer of ``advise``."""

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    q, found = answer.question, answer.rankings
    say(
        f"{q.model.name} on {q.cluster.name}{_engine(q)}, {q.precision}: steps of {q.global_batch_size:,} sequences of "
        f"{q.seq_len:,} tokens, {q.tokens_per_step:,} tokens in all"
    )
    budget = f" (memory_budget={q.memory_budget:g} GiB)" if q.memory_budget is not None else ""
    say(
        f"fit: {found.allowed:,} layouts obey the rules, in {found.families:,} families of degrees, micro-batch and "
        f"ZeRO stage; {found.may_fit:,} of these may fit in the {format_bytes(q.usable_bytes)} that training can have "
        f"of {q.cluster.device.name}{budget}"
    )
    if q.where:
        say(f"only layouts with {' and '.join(one.text for one in q.where)}")
    for size in answer.sizes:
        if answer.optimise is None or not size.ranked.best:
            _print_size(answer, size, console)
    if answer.ranked:
        _print_ranked(answer, console)
    if answer.best and answer.goal is None:
        say(_CAUTIOUS)
    for one in answer.published:
        say(_published(answer, one))
    if answer.goal is None and (without := sorted(set(q.sizes) - {one.ranked.size for one in answer.sizes})):
        say(
            f"no layout obeys the rules on {', '.join(f'{size:,}' for size in without)} GPUs: dp * micro_batch_size "
            f"must divide global_batch_size={q.global_batch_size:,}, and pp is at most {q.model.num_layers}"
        )
    if answer.goal is not None:
        _print_goal(answer, answer.goal, console)
    if note := mfu_note([q.precision], q.cluster):
        say(note)
    if answer.best and answer.power.source is not None:
        say(f"energy of the devices alone, at the predicted speed: {answer.power.source}")
    narrowed = narrowed_of(answer)
    intervals = f", {narrowed.in_words}" if narrowed is not None else ""
    products = f"with {format_bytes(_workspace(q))} for matrix products"
    say(f"times: {answer.times.source}{intervals}; memory: the closed form, {products}")
    if text := _captured(answer):
        say(text)
    if answer.best:
        _print_settling(answer, console)


def _published(answer: Advice, one: PublishedLayout) -> str:
    """A published layout, and how far its predicted speed is from that of the best layout."""
    text = f"published: {layout(one.experiment)} on {one.experiment.world_size:,} GPUs in {one.precision}"
    text += f" ({one.source}, {one.date}, {one.url}): "
    if one.ranked is None:
        return f"{text}not predicted here, {one.why_not}"
    text += f"{one.ranked.tokens_per_s_per_device:,.0f} tokens/s/GPU predicted for this question"
    if (ahead := ahead_of_best(answer, one)) is None:
        return text
    return f"{text}, {100 * abs(ahead):.0f} % {'less' if ahead < 0 else 'more'} than the first"


def _captured(answer: Advice) -> str:
    """Text of what captured steps save of the first layout that has such steps, since another engine may launch its
    kernels one by one; empty if none has."""
    backend = answer.question.cluster.backend
    first = next((one for one in answer.best if is_captured(one.experiment, backend)), None)
    if first is None:
        return ""
    (eager,) = answer.times.of_layouts([first.experiment.replace(cuda_graph="none")])
    text = "steps: captured as CUDA graphs (cuda_graph=auto), so that they wait for no host"
    if eager is None:
        return text
    which = f"{layout(first.experiment)} on {first.experiment.world_size:,} GPUs"
    if abs(eager.step_time_s / first.time.step_time_s - 1) <= ALIKE:
        return f"{text}; eager steps of {which} take as long"
    return f"{text}; with eager steps {which} takes {eager.step_time_s:.3g} s instead of {first.time.step_time_s:.3g} s"


def _engine(q: Question) -> str:
    if q.engine == ENGINE and q.compile == "none":
        return ""
    return f", {q.engine} {q.engine_version}" + (" compiled" if q.compile != "none" else "")


def _print_size(answer: Advice, one: SizeAnswer, console: Console) -> None:
    ranked, q = one.ranked, answer.question
    title = f"{ranked.size:,} GPUs: the fastest that fit, {ranked.timed:,} layouts timed"
    if ranked.open_bound_s is not None:
        title += f", then given up: a remaining layout may rank as if it took {ranked.open_bound_s:.4g} s"
    if not ranked.best:
        least = ""
        if one.smallest is not None:
            experiment, memory = one.smallest
            needs = format_bytes(memory.peak_bytes + _workspace(q), 1)
            least = f"; {layout(experiment)} needs least: {needs}"
            of_host = node_host_bytes(experiment, q.cluster.devices_per_node)
            if (why := too_big_for_host(of_host, experiment, q.cluster)) is not None:
                least += f", but {why}"
        console.print(f"\n{ranked.size:,} GPUs: nothing fits{least}", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(_table(answer, ranked.best, title))
    tied = [one for one in ranked.best if one.time.cautious_s <= ranked.best[0].time.cautious_s * (1 + ALIKE)]
    if len(tied) > 1:
        console.print(
            f"the first {len(tied)} rank within {ALIKE * 100:g} %: no prediction tells them apart",
            highlight=False,
        )


def _print_ranked(answer: Advice, console: Console) -> None:
    """Print the best layouts of all numbers of devices by the objective."""
    assert answer.optimise is not None
    sizes = [one.ranked.size for one in answer.sizes]
    on = f"{', '.join(f'{size:,}' for size in sizes)} GPUs"
    if len(sizes) > _MOST_NAMED:
        on = f"{len(sizes):,} numbers of GPUs, {sizes[0]:,} to {sizes[-1]:,}"
    console.print(_table(answer, answer.ranked, f"least {_LEAST[answer.optimise]} first, on {on}"))
    if answer.optimise != "time":
        console.print(_SAME_POWER, markup=False, highlight=False, soft_wrap=True)


def _table(answer: Advice, layouts: Sequence[RankedLayout], title: str) -> Table:
    """Layouts with their numbers; with an objective also their number of devices and device-hours."""
    table = plain_table(title=f"\n{title}")
    sized = ["GPUs"] if answer.optimise is not None else []
    cost = ["GPU-h/10⁹"] if answer.optimise == "cost" else []
    energy = ["J/token"] if answer.power.is_known else []
    for name in (*sized, "tokens/s/GPU", "90 %", "step", "MFU %", "GiB", *energy, *cost):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("layout")
    table.add_column("where the time goes")
    for ranked_layout in layouts:
        _add_row(table, answer, ranked_layout)
    return table


def _add_row(table: Table, answer: Advice, ranked_layout: RankedLayout) -> None:
    q, time, rate = answer.question, ranked_layout.time, ranked_layout.tokens_per_s_per_device
    table.add_row(
        *([f"{ranked_layout.experiment.world_size:,}"] if answer.optimise is not None else []),
        f"{rate:,.0f}",
        f"{rate * time.step_time_s / time.high_s:,.0f} to {rate * time.step_time_s / time.low_s:,.0f}",
        f"{time.step_time_s:.3g} s",
        mfu_cell(q.model, q.seq_len, q.precision, rate, q.cluster),
        f"{(ranked_layout.memory.peak_bytes + _workspace(q)) / GIB:.1f}",
        *([answer.power.joules_per_token(rate).cell(JOULES)] if answer.power.is_known else []),
        *([f"{1e9 / rate / 3600:.1f}"] if answer.optimise == "cost" else []),
        escape(layout(ranked_layout.experiment)),
        where_time_goes(answer, ranked_layout),
    )


def where_time_goes(answer: Advice, ranked_layout: RankedLayout) -> str:
    """Shares of a predicted step: first the work, then the losses, largest first."""
    parts = answer.times.shares(ranked_layout.experiment)
    lost = sorted(
        ((parts.fill, "pipeline"), (parts.traffic, "traffic"), (parts.after, "optimizer")), key=lambda one: -one[0]
    )
    words = [
        f"work {100 * parts.work:.0f} %",
        *(f"{name} {100 * share:.0f} %" for share, name in lost if share > _LEAST_SHARE),
    ]
    return ", ".join(words)


def _print_goal(answer: Advice, goal: GoalAnswer, console: Console) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    wanted = f"{_amount(goal.goal.tokens)} tokens in {goal.goal.days:g} days"
    looked = f"of {plural(len(goal.sizes), 'number')} of GPUs from {goal.sizes[0]:,} to {goal.sizes[-1]:,}"
    if goal.fewest is None:
        say(f"{wanted}: not reached, {looked}")
        return
    say(f"{wanted}, {looked}:")
    table = plain_table()
    money = ["money"] if answer.question.price is not None else []
    for name in ("", "GPUs", "days", "90 %", "GPU-hours", *money, *(["MWh"] if answer.power.is_known else [])):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for name in ("GiB", "layout"):
        table.add_column(name)
    least = "least energy" if answer.optimise == "energy" else "least money"
    rows = [("fewest", goal.fewest), ("surely", goal.surely), (least, goal.cheapest), ("soonest", goal.soonest)]
    asked = {None: "fewest", "time": "soonest"}.get(answer.optimise, least)
    for name, one in sorted(rows, key=lambda row: row[0] != asked):
        if one is not None:
            table.add_row(name, *_costs(answer, one))
    console.print(table)
    if goal.surely is None:
        say("no number of these GPUs reaches it at the slow end of its prediction")
    if answer.question.price is not None:
        say(f"money: {answer.question.price:g} a GPU-hour ({answer.question.price_source})")


def _costs(answer: Advice, one: Costed) -> list[str]:
    recommended, price = one.ranked_layout, answer.question.price
    fast = one.days * recommended.time.low_s / recommended.time.step_time_s
    return [
        f"{recommended.experiment.world_size:,}",
        f"{one.days:.3g}",
        f"{fast:.3g} to {one.slow_days:.3g}",
        format_hours(one.device_hours),
        *([f"{one.device_hours * price:,.0f}"] if price is not None else []),
        *([answer.power.mwh(one.device_hours).cell(",.4g")] if answer.power.is_known else []),
        f"{(recommended.memory.peak_bytes + _workspace(answer.question)) / GIB:.1f}",
        escape(layout(recommended.experiment)),
    ]


def _print_settling(answer: Advice, console: Console) -> None:
    q = answer.question
    if (why := planned_only(q.cluster)) is not None:
        console.print(why, markup=False, highlight=False, soft_wrap=True)
        return
    if lacking := engine_lacks(q.model, q.precision):
        say = f"{q.model.name} cannot be run yet: the engine lacks {'; '.join(lacking)}"
        console.print(say, markup=False, highlight=False, soft_wrap=True)
        return
    hours = search_hours(answer)
    command = " ".join(shlex.quote(word) for word in settling_words(q, answer.best))
    takes = "this layout takes" if len(answer.best) == 1 else f"these {len(answer.best):,} layouts take"
    money = f" ({hours * q.price:,.2f} at {q.price:g} a GPU-hour)" if q.price is not None else ""
    console.print(
        f"to settle it: {takes} {format_hours(hours)} GPU-hours{money}; a search among them and their mixtures:\n"
        f"    python -m sweep search {command}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _workspace(q: Question) -> int:
    return q.cluster.device.workspace_bytes


def _amount(tokens: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if tokens >= size:
            return f"{tokens / size:g} {word}"
    return f"{tokens:,.0f}"
