"""Grades predictions of other engines: each from nothing, from ten of its own rows, and from rows of other models.

``python -m docs.tools.accuracy_of_engines`` prints the table of docs/accuracy_details.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from docs.tools.accuracy_scores import percent, table
from results.tables.load import load
from sweep.predicting.codebases import key_of_engine, read_clusters
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import READ, Known, MeasuredLayout, ran_layouts
from sweep.predicting.measured_tables import RECORDED
from workloads.spec.experiment import ENGINE

TEN, DRAWS = 10, 5


class Pair(NamedTuple):
    """A measured layout beside its prediction."""

    time_off: float
    in_time: bool
    memory_off: float
    in_memory: bool


def layouts_of_engines() -> dict[tuple[str, str], dict[str, MeasuredLayout]]:
    """Recorded layouts of other engines that ran, by (engine and version, cluster) and layout."""
    rows: pd.DataFrame = load(RECORDED).table.to_pandas()
    rows = rows[(rows["method"] == "measured") & (rows["outcome"] == "ok") & (rows["engine"] != ENGINE)]
    found = {}
    for (engine, version, cluster), own in rows.groupby(["engine", "engine_version", "cluster"], sort=True):
        values = own[READ].astype(object).where(own[READ].notna(), None).to_dict("records")
        ran = ran_layouts({str(name): value for name, value in row.items()} for row in values)
        found[key_of_engine(str(engine), str(version)), str(cluster)] = ran
    return found


def graded(cluster: str, ran: Mapping[str, MeasuredLayout], given: Sequence[str], asked: Sequence[str]) -> list[Pair]:
    """Predictions of the layouts ``asked`` from the rows ``given``."""
    on = read_clusters()[cluster]
    forecast = Forecast.of(on, Known({name: ran[name] for name in given}))
    pairs = []
    for name, time in zip(asked, forecast.times([ran[name].experiment for name in asked]), strict=True):
        peak, measured = forecast.memory.peak(ran[name].experiment), ran[name]
        if time is None or peak is None or measured.peak_bytes is None:
            continue
        bytes_of_tensors = measured.peak_bytes - on.device.workspace_bytes
        pairs.append(
            Pair(
                time.step_time_s / measured.step_time_s - 1,
                time.low_s <= measured.step_time_s <= time.high_s,
                peak.peak_bytes / bytes_of_tensors - 1,
                peak.low_bytes <= bytes_of_tensors <= peak.high_bytes,
            )
        )
    return pairs


def draws(names: Sequence[str], count: int) -> Iterator[list[str]]:
    for seed in range(DRAWS):
        chosen = np.random.default_rng(seed).choice(len(names), min(count, len(names)), replace=False)
        yield [names[at] for at in sorted(chosen)]


def section() -> str:
    lines = []
    for (engine, cluster), ran in layouts_of_engines().items():
        names = sorted(ran)
        grades = {f"{engine} on {cluster}, nothing measured": graded(cluster, ran, [], names)}
        if len(names) > TEN:
            grades[f"{engine}, {TEN} rows, {DRAWS} draws"] = of_draws(cluster, ran, names, names)
        others: list[Pair] = []
        left_out: list[Pair] = []
        for model in sorted({one.experiment.model.name for one in ran.values()}):
            asked = [name for name in names if ran[name].experiment.model.name == model]
            rest = [name for name in names if name not in asked]
            left_out += graded(cluster, ran, rest, asked) if rest else []
            others += of_draws(cluster, ran, rest, asked) if len(rest) >= TEN else []
        grades[f"{engine}, {TEN} rows of the other models, {DRAWS} draws"] = others
        grades[f"{engine}, all rows of the other models"] = left_out
        lines += [(of, _scores(pairs)) for of, pairs in grades.items() if pairs]
    return table(lines, "engine, predicted from")


def of_draws(cluster: str, ran: Mapping[str, MeasuredLayout], given: Sequence[str], asked: Sequence[str]) -> list[Pair]:
    """Predictions from every draw of ten of the rows ``given``, of the layouts ``asked`` that are not drawn."""
    return [
        pair
        for drawn in draws(given, TEN)
        for pair in graded(cluster, ran, drawn, [name for name in asked if name not in drawn])
    ]


def _scores(pairs: Sequence[Pair]) -> dict[str, str]:
    times, memory = (np.abs([getattr(one, name) for one in pairs]) for name in ("time_off", "memory_off"))
    return {
        "predictions": f"{len(pairs):,}",
        "step time": percent(times.mean()),
        "p90": percent(np.quantile(times, 0.9)),
        "inside 90 %": percent(np.mean([one.in_time for one in pairs])),
        "memory": percent(memory.mean()),
        "largest": percent(memory.max()),
        "memory inside 90 %": percent(np.mean([one.in_memory for one in pairs])),
    }


if __name__ == "__main__":
    print(section())
