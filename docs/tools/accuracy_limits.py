"""Limits of the accuracy of predictions: differences between machines, host-bound rows, and contradictory verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from docs.tools.accuracy_scores import percent, spearman, table
from docs.tools.other_hosts import ON_OTHER_HOSTS
from results.tables.load import load
from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.measured_tables import RECORDED, columns_of_attempts, has_experts, has_more_than_columns
from sweep.predicting.predict_table import predict_frame
from workloads.predict.predictor import Predictor
from workloads.predict.table import read_points
from workloads.spec.experiment import ENGINE, from_dict, layout_id

SPREADS = (0.0, 0.05, 0.1, 0.15, 0.2)
"""Standard deviations of the logarithm of a row's time."""
DRAWS = 200
"""Draws of random errors for each of `SPREADS`."""


def host_sets_pace(rows: pd.DataFrame) -> Any:
    """Whether each row is host-bound by the form before any fit: a layer waits more for the host than for the device.
    False for rows that no table can state, such as those with ``recompute: full:17``."""
    profiles = read_profiles()
    read = read_points(rows.reset_index(drop=True), read_clusters(), profiles, profiles[GENERAL])
    found = np.zeros(len(rows), dtype=bool)
    found[read.rows] = Predictor.learn(None, profiles).host_share(read.points) > 0.5
    return found


def rows_of_machines(*folders: Path) -> pd.DataFrame:
    """Rows of dense models that ran, in the columns of ``predict`` and of:

    ``layout``; ``machine``: its set of devices, by their identifiers; ``plain``: whether columns say all of it;
    ``waits``: whether the layout is host-bound on a usual host. Runs whose allocator had to free its cache are left
    out.
    """
    parts = []
    for folder in folders:
        rows = load(folder).table.to_pandas()
        ran = (rows["engine"] == ENGINE) & (rows["method"] == "measured") & (rows["outcome"] == "ok")
        rows = rows[ran & ~(rows["allocator_retries"] > 0) & rows["device_ids"].notna()]
        rows = rows[~has_experts(rows)].reset_index(drop=True)
        layouts = [layout_id(from_dict(json.loads(text))) for text in rows["config_json"]]
        machines = rows["device_ids"].map(lambda ids: ",".join(sorted(ids)))
        plain = ~has_more_than_columns(rows)
        parts.append(columns_of_attempts(rows).assign(layout=layouts, machine=machines, plain=plain))
    every = pd.concat(parts, ignore_index=True)
    # With the launch time of each host a layout could be host-bound on one machine and device-bound on another.
    every["waits"] = host_sets_pace(every.drop(columns="host_launch_s"))
    return every


def machines_apart(every: pd.DataFrame) -> pd.DataFrame:
    """Layouts of `rows_of_machines` that ran on two machines or more.

    ``ratio``: longest step over shortest, each the median of one machine's runs.
    """
    times = every.groupby(["gpu", "layout", "waits", "machine"])["step_time_s"].median()
    extremes = times.groupby(["gpu", "layout", "waits"]).agg(["size", "max", "min"]).reset_index()
    extremes = extremes[extremes["size"] > 1]
    return extremes.assign(ratio=extremes["max"] / extremes["min"])[["gpu", "layout", "waits", "ratio"]].reset_index(
        drop=True
    )


def least_errors(every: pd.DataFrame) -> pd.DataFrame:
    """What a predictor would still miss that knows every layout's mean over machines, from runs of one layout and
    version of the engine on two machines or more: one row for each pair of runs on two machines.

    ``off``: difference of the two runs' log(time) over the root of two, which is distributed as the error of a single
    run around the mean if errors are normal; ``with_launches``: the same of the times over those that the form
    predicts, before any fit, for a host with the row's launch time. ``weight``: one over the pairs of the layout.
    """
    rows = every[every["plain"]].reset_index(drop=True)
    said = rows.drop(columns=["status", "step_time_s", "reserved_gib", "layout", "machine", "plain", "waits"])
    predicted = predict_frame(said, None).predictions["step_time_s"].astype(float)
    rows = rows.assign(time=np.log(rows["step_time_s"]), left=np.log(rows["step_time_s"] / predicted))
    found = []
    for (gpu, layout, _), runs in rows.groupby(["gpu", "layout", "code_version"]):
        pairs = [(a, b) for a, b in combinations(runs.index, 2) if runs["machine"][a] != runs["machine"][b]]
        if pairs:
            one, other = (list(side) for side in zip(*pairs, strict=True))
            found.append(
                pd.DataFrame(
                    {
                        "gpu": gpu,
                        "layout": layout,
                        "waits": bool(runs["waits"].iloc[0]),
                        "off": np.abs(runs["time"][one].to_numpy() - runs["time"][other].to_numpy()) / np.sqrt(2),
                        "with_launches": np.abs(runs["left"][one].to_numpy() - runs["left"][other].to_numpy())
                        / np.sqrt(2),
                        "weight": 1 / len(pairs),
                    }
                )
            )
    return pd.concat(found, ignore_index=True)


def weighted_quantile(values: Any, weights: Any, share: float) -> float:
    """The smallest of ``values`` up to which at least this share of the weight lies."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(np.asarray(weights)[order])
    return float(np.asarray(values)[order][np.searchsorted(below, share * below[-1] * (1 - 1e-12))])


def with_random_hosts(found: pd.DataFrame, waits: Any, spread: float) -> tuple[float, float, float]:
    """Scores if host-bound rows had independent random errors and all other rows kept their errors.

    ``found``: rows as `accuracy_scores.scores` takes them; ``waits``: whether each row is host-bound; ``spread``:
    standard deviation of the error's logarithm. Returns the mean error of host-bound rows, the 90th percentile of all
    errors and the mean Spearman correlation within a cell, each the mean of `DRAWS` draws.
    """
    draw = np.random.default_rng(14)
    waiting, p90, ranks = [], [], []
    for _ in range(DRAWS):
        random = found["step_time_s"] * np.exp(draw.normal(0.0, spread, len(found)))
        drawn = found.assign(of_step_time_s=found["of_step_time_s"].where(~waits, random))
        error = (drawn["of_step_time_s"] / drawn["step_time_s"] - 1).abs()
        waiting.append(error[waits].mean())
        p90.append(error.quantile(0.9))
        ranks.append(spearman(drawn))
    return float(np.mean(waiting)), float(np.mean(p90)), float(np.mean(ranks))


def section(left: pd.DataFrame, waits: Any) -> str:
    """``left``: rows of this engine with predictions, one model left out; ``waits``: whether each row is host-bound."""
    here = rows_of_machines(RECORDED)
    everywhere = pd.concat([here, rows_of_machines(ON_OTHER_HOSTS)], ignore_index=True)
    apart = machines_apart(everywhere)
    lines = []
    for gpu in sorted(set(apart["gpu"])):
        for name, waits_here in (("device", False), ("host", True)):
            ratios = apart[(apart["gpu"] == gpu) & (apart["waits"] == waits_here)]["ratio"]
            root = np.sqrt(ratios)
            cells = {
                "layouts": str(len(ratios)),
                "longest over shortest, geometric mean": f"{np.exp(np.log(ratios).mean()):.2f}",
                "largest": f"{ratios.max():.2f}",
                "mean error of the time between": percent((root - 1 / root).mean() / 2),
            }
            lines.append((f"{gpu}, the {name}", cells))
    limits = []
    for spread in SPREADS:
        waiting, p90, ranks = with_random_hosts(left, waits, spread)
        cells = {"error of rows whose pace the host sets": percent(waiting), "p90 of all": percent(p90)}
        limits.append((f"{spread:.2f}", cells | {"Spearman": f"{ranks:.3f}"}))
    share = float(np.mean(waits))
    (gpu,) = set(left["gpu"])
    floors = [
        _least_of(least_errors(rows[rows["gpu"] == gpu]), name, share)
        for name, rows in (("`results/recorded`", here), ("these and the rows of other hosts", everywhere))
    ]
    return f"""Layouts that ran on two machines or more, in `results/recorded` and `docs/tools/rows_of_other_hosts`:

{table(lines, "what sets the pace")}

What a predictor of {gpu} would still miss that knew the mean time of every layout over all hosts, from the same layouts
on two hosts or more, in the mean and at the 90th percentile; *with launches*: that also knew how fast each host
launches, as far as it is recorded. *All* weights host-bound rows with their share here, {percent(share)}:

{table(floors, "runs of")}

What the scores of these rows, one model left out, would be if those whose pace the host sets had random errors (each
row by itself), and all others the errors that they have:

{table(limits, "standard deviation")}"""


def _least_of(least: pd.DataFrame, name: str, share: float) -> tuple[str, dict[str, str]]:
    """A line of the table of `least_errors`. ``share``: that of host-bound rows, with which "all" is weighted."""
    by_pace = [least[least["waits"] == waits] for waits in (False, True)]
    layouts = [float(part["weight"].sum()) for part in by_pace]
    device, host = (part.assign(weight=part["weight"] / whole) for part, whole in zip(by_pace, layouts, strict=True))
    every = pd.concat(
        [device.assign(weight=(1 - share) * device["weight"]), host.assign(weight=share * host["weight"])]
    )
    cells = {"layouts, device-bound": f"{layouts[0]:.0f}", "host-bound": f"{layouts[1]:.0f}"}
    for column, words in (("off", ""), ("with_launches", ", with launches")):
        for rows, of_rows in ((device, f"error{words}: device-bound"), (host, f"host{words}"), (every, f"all{words}")):
            mean = float(np.average(rows[column], weights=rows["weight"]))
            cells[of_rows] = f"{percent(mean)}, {percent(weighted_quantile(rows[column], rows['weight'], 0.9))}"
    return name, cells


def least_wrong(rows: pd.DataFrame, alike: Sequence[str] = ("code_version",)) -> int:
    """Fewest wrong verdicts of any rule that is sound: one that lets a layout through only if it lets all layouts
    through that need no more memory.

    ``rows``: of the study's table, that ran (``status`` ok) or ran out of memory (oom). A layout needs no more than
    another of the same model, ``tp`` and ``pp`` if it has no larger micro-batch, no more of them in flight (at most
    ``pp``), and no less sharded states; both must be equal in the columns ``alike``, too. Every pair of a row that ran
    and one that ran out, although it needs no more, has a wrong verdict. Fewest rows that cover all pairs: as many as
    the largest matching has (König's theorem).
    """
    rows = rows.assign(in_flight=np.minimum(rows["pp"], rows["grad_accum"]))
    pairs: dict[int, list[int]] = {}
    for _, same in rows.groupby([*_SAME_SIZE, *alike]):
        failed = same[same["status"] == "oom"]
        for at, ran in same[same["status"] == "ok"].iterrows():
            less = failed[(failed["mbs"] <= ran["mbs"]) & (failed["in_flight"] <= ran["in_flight"])]
            if ran["sharding"] != "zero0":
                less = less[(less["sharding"] != "zero0") & (less["dp"] >= ran["dp"])]
            if len(less):
                pairs[int(str(at))] = less.index.tolist()
    taken: dict[int, int] = {}

    def is_matched(ran: int, seen: set[int]) -> bool:
        for failed in pairs[ran]:
            if failed not in seen:
                seen.add(failed)
                if failed not in taken or is_matched(taken[failed], seen):
                    taken[failed] = ran
                    return True
        return False

    return sum(is_matched(ran, set()) for ran in pairs)


_SAME_SIZE = ("layers", "hidden", "kv_heads", "vocab", "tp", "pp")


def shrunken(rows: pd.DataFrame) -> Any:
    """Whether a row that ran reserved less memory than one that needs no more and is alike but for a smaller
    micro-batch, as a mask: its allocator gave memory back, or its values are of another run."""
    key = [*_SAME_SIZE, "dp", "sharding", "code_version"]
    ran = rows[rows["status"] == "ok"].sort_values("mbs")
    before = ran.groupby(key)["reserved_gib"].transform(lambda sizes: sizes.cummax().shift())
    fewer = ran.groupby(key)["grad_accum"].transform(lambda counts: counts.shift()) > ran["grad_accum"]
    in_flight = ran["grad_accum"] >= ran["pp"]
    return (ran["reserved_gib"] < before).where(fewer & in_flight, False).reindex(rows.index, fill_value=False)


def verdicts_section(memory: pd.DataFrame) -> str:
    """Wrong verdicts by kind, and what is contradictory in the rows. ``memory``: the study's rows that ran or ran out
    of memory, with predictions."""
    ok, fits = memory["status"] == "ok", memory["of_fits"] == 1
    wrong = ok != fits
    contradictory = ok & memory["says_oom"]
    left, lines = pd.Series(True, index=memory.index), []
    for name, rows in (
        ("marked as ended well, with an error about memory in the log", contradictory),
        ("reserved less than with a smaller micro-batch", shrunken(memory)),
        ("one stage", memory["pp"] == 1),
        ("a pipeline before its rewrite", memory["code_version"].str.startswith("before")),
        ("a pipeline after it", left),
    ):
        of_kind, left = rows & left, left & ~rows
        refused, let_through = of_kind & ok & wrong, of_kind & ~ok & wrong
        cells = {"rows": of_kind, "refused, but ran": refused, "let through, but ran out": let_through}
        lines.append((name, {column: f"{int(those.sum()):,}" for column, those in cells.items()}))
    number, known = int(contradictory.sum()), memory[~contradictory]
    least, least_known = least_wrong(memory, ()), least_wrong(known, ())
    return f"""Of the {number} rows that are marked as ended well, although their log has an error about memory,
{int((contradictory & wrong).sum())} are refused. Without these, whose outcome is not known, the verdict is right for
{percent(1 - wrong[~contradictory].mean())}. By layouts alone, a sound rule, one that lets a layout through only if it
lets through all that need no more memory, is wrong for {least} rows at least, {least_known} without the {number},
and {least_wrong(known)} if it also knows the version of the code. Each row under the first kind
that fits it:

{table(lines, "verdicts on rows")}"""
