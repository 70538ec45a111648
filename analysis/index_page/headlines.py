"""The page's first sentences on a part of the results, and on how far to trust it; each is computed from the rows."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import pandas as pd

from analysis.page.render import Sentence
from analysis.rows import answer, labels, metrics
from analysis.rows.cohorts import Cohort
from analysis.rows.load import decided, last_attempts
from analysis.rows.stats import MIN_FOR_INTERVAL, median_interval
from results.text.numbers import format_percent, listed, plural

_CLOSE = 0.05
"""Largest median error of step times for which their prediction counts as good."""


def of_part(part: Cohort) -> list[Sentence]:
    """Sentences on the whole part: which layouts win, how much the choice matters, how many winners are ties."""
    answers = answer.of_every_cell(part.frame)
    won = [one for one in answers if one.best is not None]
    # Times that were not measured cannot say which kind of parallelism wins.
    layouts = _layouts(part.frame, won) if set(part.frame["method"].unique()) == {"measured"} else None
    sentences = [layouts, _worth(part.frame, won), _ties(part.frame, answers, won)]
    return [sentence for sentence in sentences if sentence is not None]


def _layouts(frame: pd.DataFrame, won: list[answer.Answer]) -> Sentence | None:
    """The number of devices from which every winner uses tensor parallelism, or else the kinds of parallelism of the
    winners. Sizes of one device are left out because they allow no parallelism."""
    if len(won) == 1:
        [only] = [one.best for one in won if one.best is not None]
        return Sentence(f"One model and size has a fastest layout: {only['layout']}", ".")
    all_won, won = won, [one for one in won if one.query.world_size > 1]
    if not won:
        return None
    noun = labels.device_noun(frame)
    tp = [(one.query.world_size, _degree(one, "tp") > 1) for one in won]
    alone = [one for one in won if all(_degree(one, axis) == 1 for axis in ("tp", "cp", "pp", "ep"))]
    sizes = sorted({size for size, _ in tp})
    from_size = next((size for size in sizes if all(uses for at, uses in tp if at >= size)), None)
    if from_size is not None and len(won) > 3:
        above = [one for one in won if one.query.world_size >= from_size]
        below = [one for one in alone if one.query.world_size < from_size]
        fewer = len(won) - len(above)
        rest = f" ({len(above)} of {len(above)} models and sizes)"
        if fewer:
            rest += f"; on fewer, {len(below)} of {fewer} are data parallelism alone"
        start = f"From {from_size} {noun} on every" if fewer else "Every"
        return Sentence(f"{start} fastest layout uses tensor parallelism", f"{rest}.")
    used = [f"{count} {'uses' if count == 1 else 'use'} {name}" for name, count in _uses(won).items() if count]
    kinds = f"; {listed(used)} parallelism" if used else ""
    few = "None" if not alone else str(len(alone))
    verb = "is" if len(alone) == 1 else "are"
    where = f" on several {noun}" if any(one.query.world_size == 1 for one in all_won) else ""
    return Sentence(f"{few} of {len(won)} fastest layouts{where} {verb} data parallelism alone", f"{kinds}.")


def _uses(won: list[answer.Answer]) -> dict[str, int]:
    names = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
    return {name: sum(_degree(one, axis) > 1 for one in won) for axis, name in names.items()}


def _degree(one: answer.Answer, axis: str) -> int:
    assert one.best is not None
    value = one.best[axis]
    return 1 if pd.isna(value) else int(value)


def _worth(frame: pd.DataFrame, won: list[answer.Answer]) -> Sentence | None:
    """How much faster the best layout is than the median one, on the fewest and on the most devices."""
    enough = [one for one in won if len(one.layouts) >= MIN_FOR_INTERVAL]
    if not enough:
        return None
    ratios: dict[int, list[float]] = {}
    for one in enough:
        rates = [layout[metrics.RANK_BY] for layout in one.layouts]
        ratios.setdefault(one.query.world_size, []).append(rates[0] / statistics.median(rates))
    low, high = min(ratios), max(ratios)
    noun = labels.device_noun(frame)
    first = f"The choice is worth {_span(ratios[low])} on {labels.devices(low, noun)}"
    rest = ": the best finished layout is that much faster than the median one"
    return Sentence(first if low == high else f"{first} and {_span(ratios[high])} on {high}", f"{rest}.")


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    if high - low < 0.15:
        return f"{high:.1f}×"
    return f"{low:.1f} to {high:.1f}×" if high < 10 else f"{low:.1f} to {high:.0f}×"


def _ties(frame: pd.DataFrame, found: list[answer.Answer], won: list[answer.Answer]) -> Sentence | None:
    """How many winners are ties, and the outcomes of the points."""
    points, oom = sum(one.points for one in found), sum(one.out_of_memory for one in found)
    failed = sum(one.failed for one in found)
    ended = [f"{points - oom - failed:,} finished"]
    ended += [f"{oom:,} ran out of memory"] if oom else []
    ended += [f"{failed:,} failed otherwise"] if failed else []
    outcomes = f"Of {plural(points, 'point')} {listed(ended)}."
    two = [one for one in won if len(one.layouts) > 1]
    if not two:
        return Sentence(outcomes) if points else None
    close = sum(len(one.ties) > 1 for one in two)
    untimed = sum(one.untimed for one in two)
    why = (
        "the runner-up is within 5 %, and the spread of steps within a run is not known"
        if untimed == len(two)
        else "the others may be slower only by noise"
        + (f" (5 % is assumed where noise is not known: {untimed})" if untimed else "")
    )
    if len(two) == 1:
        only = f"The winner of the one model and size with a runner-up is {'a tie' if close else 'no tie'}"
        return Sentence(only, f". {outcomes}")
    if not close:
        return Sentence(f"None of {plural(len(two), 'winner')} is a tie", f". {outcomes}")
    return Sentence(
        f"{close} of {plural(len(two), 'winner')} {'is a tie' if close == 1 else 'are ties'}", f": {why}. {outcomes}"
    )


def trust(part: Cohort) -> list[Sentence]:
    """Evidence for and against these numbers, each with its counts."""
    return list(_trust(part.frame, part))


def _trust(frame: pd.DataFrame, part: Cohort) -> Iterator[Sentence]:
    if frame["method"].ne("measured").any():
        yield Sentence("Not measured.", f" {part.meaning}", "bad")
    ok = last_attempts(frame)
    read = [name for name in ("network_regime", "engine_version", "loss_agrees") if name in ok]
    ok = ok.loc[ok["outcome"] == "ok", read]
    rows = metrics.ranked(frame)
    once = int(rows["timed_steps"].eq(1).sum())
    if once:
        all_of = "all" if once == len(rows) else f"{once:,} of"
        yield Sentence(
            f"One timed step, no repeat, for {all_of} {plural(len(rows), 'finished layout')}.",
            " Differences under 5 % are not conclusive there.",
            "bad",
        )
    elif len(rows):
        again = int((rows["repeats"] > 1).sum())
        spread = median_interval(metrics.step_spread(frame))
        steps = (
            f" the slowest takes {format_percent(spread.median)} longer than the fastest (median);" if spread else ""
        )
        what = f"{plural(again, 'layout')} ran more than once" if again else "no layout ran twice"
        yield Sentence("Several timed steps a run:", f"{steps} {what}.", "good" if again else "doubt")
    if "network_regime" in frame and ok["network_regime"].nunique() > 1:
        counts = ok["network_regime"].value_counts()
        regimes = [f"{count:,} ran in the {name} one" for name, count in counts.items()]
        missing = int(ok["network_regime"].isna().sum())
        regimes += [f"{missing:,} were not timed"] if missing else []
        yield Sentence(
            f"{len(counts)} network regimes.",
            f" Of the finished runs {listed(regimes)}. Network above separates them.",
            "bad",
        )
    versions = ok["engine_version"].dropna().value_counts()
    if len(versions) > 1:
        each = listed([f"{version} ({count:,})" for version, count in versions.items()])
        yield Sentence(f"{len(versions)} engine versions are ranked together:", f" {each}.", "doubt")
    differ = int(metrics.losses_differ(ok).sum())
    agree = int(ok["loss_agrees"].eq(True).sum())
    if differ:
        yield Sentence(
            f"The losses of {plural(differ, 'run')} differ from the reference's:", " they are not ranked.", "bad"
        )
    elif agree:
        yield Sentence(
            "Losses agree.", f" Those of {plural(agree, 'run')} match the reference layout's within tolerance."
        )
    final = decided(frame, ["outcome"])
    unknown = int((~final["outcome"].isin(["ok", "oom"])).sum())
    if unknown:
        share = format_percent(unknown / len(final), 0)
        yield Sentence(
            f"{share} of the points failed for other reasons than memory;", " a winner may be among them.", "doubt"
        )
    yield from _predictions(frame, rows)


def _predictions(frame: pd.DataFrame, rows: pd.DataFrame) -> Iterator[Sentence]:
    memory = metrics.prediction_errors(frame, "predicted_peak_bytes", "peak_allocated_bytes").dropna()
    if len(memory):
        yield Sentence(
            f"Predicted memory was off by {format_percent(memory.abs().median())} in the median",
            f", {format_percent(memory.abs().max())} at most ({plural(len(memory), 'run')}).",
        )
    times = metrics.prediction_errors(frame, "predicted_step_time_s", "step_time_s").dropna()
    if len(times):
        middle, size = times.median(), times.abs().median()
        sign = "too short" if middle < 0 else "too long"
        measured = frame["method"].eq("measured").all()
        inside, known = metrics.inside_interval(frame)
        covered = f"; {inside:,} of {known:,} in their 90 % interval" if known else ""
        yield Sentence(
            f"Predicted step times were off by {format_percent(size)} in the median",
            f", their bias is {format_percent(abs(middle))} {sign} ({plural(len(times), 'run')}{covered})."
            + ("" if measured else " They are compared with a rehearsal, not with measured steps."),
            "good" if size < _CLOSE and measured else "doubt",
        )
    if not len(memory) and not len(times) and len(rows):
        yield Sentence("No prediction to check:", " these rows were not planned by ultrasweep.", "doubt")
