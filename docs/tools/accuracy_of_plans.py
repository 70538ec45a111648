"""The tables of docs/accuracy_details.md on predictions of plans: as recorded before the runs, and as predicted now."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence

import pandas as pd

from docs.tools.hosts_of_rows import host_of, launch_s
from results.statistics import grade
from results.tables.load import load
from sweep.grids.step_time import StepTime
from sweep.predicting.codebases import read_clusters, read_profiles
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import READ, Known, ran_layouts, read_known
from sweep.predicting.measured_tables import RECORDED, has_experts
from workloads.costs.memory.estimate import peak_stage
from workloads.predict import layouts, near_full
from workloads.predict.predictor import Predictor
from workloads.predict.probed import LAUNCH_S
from workloads.rules.captured_steps import is_captured
from workloads.spec.experiment import ENGINE, Experiment, from_dict, layout_id
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.model_layers import layers_of

CLUSTER = "h200"
"""Cluster of most shipped rows."""
COLUMNS = ("rows", "MAPE", "p90", "bias", "Spearman", "top-1 regret", "inside 90 %", "half-width")
_OF_AXES = ("rows", "MAPE", "p90", "bias", "inside 90 %", "no host: rows", "no host: MAPE")
_SHOWN_AXES = ("model", "tp", "pp", "cp", "zero_stage", "recompute", "pp_schedule", "precision")


GRADIENTS_SHARE_MEMORY = pd.Timestamp("2026-11-26", tz="UTC")
"""Before this date reduced gradients had separate memory, and devices were nearly full earlier: from `FULL_BEFORE`
on."""
FULL_BEFORE = 0.76
"""Same meaning as `near_full.FROM`. The engine's version did not change, because its results and tensors did not."""
EXPERTS_HAVE_KERNELS = pd.Timestamp("2026-11-30", tz="UTC")
"""Before this date activations of experts other than SwiGLU, and their biases, were torch operations that took a fifth
of a step. Rows of such models from before are of another program, and are left out."""
ADAFACTOR_TOGETHER = pd.Timestamp("2026-11-30 03:46:30", tz="UTC")
"""Before this time Adafactor updated the matrices of experts one after another: Qwen3-30B-A3B, 8 layers, tp 2, 0.202 s
instead of 0.072."""
MUON_TOGETHER = pd.Timestamp("2026-11-29 10:16:36", tz="UTC")
"""Before this time so did Muon on stages of one rank: the same layers 1.54 s instead of 0.334."""
MOMENTS_STREAM = pd.Timestamp("2026-11-29 12:42:56", tz="UTC")
"""Before this time the host's processors updated what ``optimizer_offload`` keeps there: Llama 1B, all of it, 0.619 s a
step instead of 0.328."""
DRAWS = {
    "third": "h100x2_validation_probed",
    "fourth": "h100x2_validation_growing",
    "fifth": "h100x2_validation_gradients",
}
"""Sweeps of layouts drawn by a seed, each on one host with its own probe."""


def recorded_attempts() -> pd.DataFrame:
    """Shipped measurements of this project's engine that succeeded, without those of another program: of layouts whose
    work has changed since although their results have not."""
    rows: pd.DataFrame = load(RECORDED).table.to_pandas()
    rows = rows[(rows["method"] == "measured") & (rows["outcome"] == "ok") & (rows["engine"] == ENGINE)]
    routed = has_experts(rows)
    for before, changed in (
        (EXPERTS_HAVE_KERNELS, rows["config_json"].map(_lacked_kernels)),
        (ADAFACTOR_TOGETHER, routed & (rows["optimizer"] == "adafactor")),
        (MUON_TOGETHER, routed & (rows["optimizer"] == "muon") & (rows["world_size"] == rows["pp"])),
        (MOMENTS_STREAM, rows["optimizer_offload"] > 0),
    ):
        rows = rows[(rows["started_at"] >= before) | ~changed[rows.index]]
    return rows


def _lacked_kernels(config: str) -> bool:
    mlps = [kind.mlp for kind in layers_of(from_dict(json.loads(config)).model).kinds]
    experts = [mlp.expert for mlp in mlps if isinstance(mlp, RoutedMLP)]
    return any(one.bias or one.activation != "silu" for one in experts)


def points_of(attempts: pd.DataFrame) -> pd.DataFrame:
    """Points of attempts as ``grade`` takes them, with a column ``experiment``: of steps that ran eagerly, since too
    few came before them, the experiment without a graph. They do not count if the layout also ran with one."""
    asked = [from_dict(json.loads(text)) for text in attempts["config_json"]]
    eager = pd.Series(
        [
            run == "none" and one.cuda_graph == "auto" and is_captured(one)
            for one, run in zip(asked, attempts["cuda_graph_run"], strict=True)
        ],
        index=attempts.index,
    )
    captured = set(attempts.loc[~eager, "experiment_id"])
    again = eager & attempts["experiment_id"].isin(captured)
    points = grade.measured_points(attempts[~again])
    ran_eagerly = set(attempts.loc[eager & ~again, "experiment_id"])
    experiments = [from_dict(json.loads(text)) for text in points["config_json"]]
    as_run = [
        one.replace(cuda_graph="none") if name in ran_eagerly else one
        for name, one in zip(points["experiment_id"], experiments, strict=True)
    ]
    return points.assign(experiment=pd.Series(as_run, dtype="object"))


def planned(points: pd.DataFrame, known: Mapping[str, Known] | None = None) -> pd.DataFrame:
    """Predictions of a plan for these points, as in a file of predictions. ``known``: measurements by cluster; None:
    none."""
    parts = []
    for name, own in points.groupby("cluster", sort=True):
        experiments: Sequence[Experiment] = own["experiment"].tolist()
        forecast = Forecast.of(read_clusters()[str(name)], (known or {}).get(str(name)), map(layout_id, experiments))
        before = own["started_at"] < GRADIENTS_SHARE_MEMORY
        starts = before.map({True: FULL_BEFORE, False: near_full.FROM})
        times = [
            None if time is None else forecast.near_full(time, peak_stage(one).peak_bytes, start)
            for time, one, start in zip(forecast.times(experiments), experiments, starts, strict=True)
        ]
        parts.append(pd.DataFrame([_row(*one) for one in zip(own["experiment_id"], times, strict=True)]))
    return pd.concat(parts, ignore_index=True)


def _row(experiment_id: str, time: StepTime | None) -> dict[str, str | float | None]:
    names = {"step_time_s": "step_time_s", "step_time_low_s": "low_s", "step_time_high_s": "high_s"}
    return {"experiment_id": experiment_id, **{name: getattr(time, field, None) for name, field in names.items()}}


def without_its_model(points: pd.DataFrame, attempts: pd.DataFrame) -> pd.DataFrame:
    """As `planned`, but predicts each model from the measured attempts at all other models on its cluster."""
    parts = []
    for (_, model), own in points.groupby(["cluster", "model"], sort=True):
        cluster = str(own["cluster"].iloc[0])
        others = attempts.loc[(attempts["model"] != model) & (attempts["cluster"] == cluster), READ]
        values = others.astype(object).where(others.notna(), None).itertuples(index=False)
        rows = [dict(zip(READ, row, strict=True)) for row in values]
        parts.append(planned(own, {cluster: Known(ran_layouts(rows))}))
    return pd.concat(parts, ignore_index=True)


def from_another(points: pd.DataFrame, cluster: str, other: str) -> pd.DataFrame:
    """As `planned`, but predicts the points of one cluster from rows of another, with the shipped probes of both."""
    return planned(points[points["cluster"] == cluster], {cluster: _of_another(cluster, other)})


def at_own_hosts(points: pd.DataFrame, cluster: str, other: str) -> pd.DataFrame:
    """As `from_another`, but uses each host's own median launch time instead of the probe's. Hosts are identified by
    devices."""
    known, parts = _of_another(cluster, other), []
    probe = {name: value for name, value in known.probe.items() if name != "pace"}
    own = points[points["cluster"] == cluster]
    for _, rows in own.groupby(host_of(own), sort=True):
        launch = launch_s(rows)
        host = {} if launch is None else {"launch": launch / LAUNCH_S}
        parts.append(planned(rows, {cluster: dataclasses.replace(known, probe={**probe, **host})}))
    return pd.concat(parts, ignore_index=True)


def _of_another(cluster: str, other: str) -> Known:
    clusters = read_clusters()
    return dataclasses.replace(read_known(clusters[cluster], RECORDED, [clusters[other]]), steps={})


def has_experts_or_latents(experiment: Experiment) -> bool:
    """Whether the model has routed experts or latent attention."""
    return experiment.model.moe is not None or experiment.model.mla is not None


def kinds_of(points: pd.DataFrame, attempts: pd.DataFrame, cluster: str) -> pd.DataFrame:
    """Points of one cluster with two more columns.

    ``stopped``: whether a run had to free cached memory. ``waits``: whether the point is host-bound by the unfitted
    form.
    """
    stops = attempts.groupby("experiment_id")["allocator_retries"].max() > 0
    experiments = points["experiment"].tolist()
    structures = layouts.Structures(read_clusters()[cluster])
    of_layers = structures.of_layers(experiments, structures.factors(experiments))
    rows = layouts.points_of(experiments, read_clusters()[cluster], None, of_layers)
    share = Predictor.learn(None, read_profiles()).host_share(rows)
    return points.assign(stopped=points["experiment_id"].map(stops), waits=share > 0.5)


def section() -> str:
    """Two tables: all points by cluster and source of the prediction, and points of `CLUSTER` by axis, also those of
    which no host sets the pace."""
    attempts = recorded_attempts()
    points = points_of(attempts)
    on, elsewhere = (points[(points["cluster"] == CLUSTER) == here] for here in (True, False))
    found, kinds = without_its_model(on, attempts), kinds_of(on, attempts, CLUSTER)
    by_host = (kinds["cuda_graph_run"] != "step") & kinds["waits"]
    left, alone = pairs_with(found, on), pairs_with(found, on[~by_host])
    compared = [
        (f"{CLUSTER}, as recorded, when each was run", _recorded(on)),
        *_of_nothing(on, attempts, CLUSTER),
        (f"{CLUSTER}, now, measured rows of the other models", left),
        (f"{CLUSTER}, of these: no host sets the pace", alone),
        (f"{CLUSTER}, of these: the host does", pairs_with(found, on[by_host])),
    ]
    for name, own in elsewhere.groupby("cluster", sort=True):
        known = at_own_hosts(points, str(name), CLUSTER)
        compared += [
            (f"{name}, as recorded, when each was run", _recorded(own)),
            *_of_nothing(own, attempts, str(name)),
            (
                f"{name}, now, rows of {CLUSTER} and the newest probe of each",
                pairs_with(from_another(points, str(name), CLUSTER), own),
            ),
            (f"{name}, now, rows of {CLUSTER}, and each host's launches", pairs_with(known, own)),
        ]
        kinds = kinds_of(own, attempts, str(name))
        waits, stopped, odd = kinds["waits"], kinds["stopped"], kinds["experiment"].map(has_experts_or_latents)
        for said, those in (
            ("stopped to free memory", stopped),
            ("did not stop, the device sets the pace", ~stopped & ~waits),
            ("did not stop, the host does, dense models", ~stopped & waits & ~odd),
            ("did not stop, the host does, experts or latent attention", ~stopped & waits & odd),
        ):
            compared.append((f"{name}, of these: {said}", pairs_with(known, own[those])))
        for draw, sweep in DRAWS.items():
            those = (own["sweep"] == sweep) & ~stopped
            compared.append((f"{name}, of these: {draw} draw, did not stop", pairs_with(known, own[those])))
    lines = [(name, graded(pairs)) for name, pairs in compared]
    without_host = grade.grades(alone).rename(columns={"n": "alone_n", "mape": "alone_mape"})
    columns = ["axis", "value", "alone_n", "alone_mape"]
    by_axis = grade.grades(left).merge(without_host[columns], on=["axis", "value"], how="left")
    shown = by_axis[by_axis["axis"].isin(_SHOWN_AXES)]
    axes = [(f"{row['axis']} {row['value']}", row) for _, row in shown.iterrows()]
    return (
        f"{table_of('predicted by a plan', lines, COLUMNS)}\n\nOn {CLUSTER}, with measured rows of the other models, "
        f"by axis, and without the points whose pace a host sets:\n\n{table_of('points with', axes, _OF_AXES)}"
    )


def _of_nothing(points: pd.DataFrame, attempts: pd.DataFrame, cluster: str) -> list[tuple[str, pd.DataFrame]]:
    """Pairs of one cluster with nothing measured before: all, and those of eager steps by what sets their pace."""
    found, kinds = planned(points), kinds_of(points, attempts, cluster)
    eager = kinds["cuda_graph_run"] != "step"
    parts = {"the device sets the pace": eager & ~kinds["waits"], "the host does": eager & kinds["waits"]}
    lines = [(f"{cluster}, now, nothing measured before", pairs_with(found, points))]
    return lines + [
        (f"{cluster}, of these: eager, {said}", pairs_with(found, points[own])) for said, own in parts.items()
    ]


def _recorded(points: pd.DataFrame) -> pd.DataFrame:
    pairs = grade.pairs_of_rows(points)
    return pairs[(pairs["depth"] == "closed_form") & (pairs["quantity"] == "step_time")]


def pairs_with(predictions: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    """Predictions beside the measurements of these points, as `results.statistics.grade` grades them."""
    return grade.pairs_of_predictions(predictions, points)


def graded(pairs: pd.DataFrame) -> pd.Series:
    """`results.statistics.grade.grade_of` with ``half_width``: the median half of an interval, by how much of the
    middle its upper end is longer."""
    width = math.sqrt((pairs["high"] / pairs["low"]).median()) - 1
    return pd.Series({**grade.grade_of(pairs), "half_width": width}, dtype="object")


def table_of(first: str, lines: Sequence[tuple[str, pd.Series]], columns: Sequence[str]) -> str:
    """A Markdown table of rows of `graded`, or of `results.statistics.grade.grades`; ``first`` heads the names."""
    head = f"| {first} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"
    return "\n".join([head, *(f"| {name} | {' | '.join(_cell(row, one) for one in columns)} |" for name, row in lines)])


def _cell(row: pd.Series, column: str) -> str:
    names = {
        "rows": "n",
        "MAPE": "mape",
        "top-1 regret": "top1_regret",
        "inside 90 %": "coverage",
        "half-width": "half_width",
        "no host: rows": "alone_n",
        "no host: MAPE": "alone_mape",
    }
    value = row[names.get(column, column.lower())]
    if value is None or pd.isna(value):
        return "–"
    if column.endswith("rows"):
        return f"{value:,.0f}"
    if column == "Spearman":
        return f"{value:.3f}"
    return f"{value:+.1%}".replace("%", " %") if column == "bias" else f"{value:.1%}".replace("%", " %")
