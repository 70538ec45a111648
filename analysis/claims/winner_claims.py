"""The study's claims on its pair of heatmaps: the best configuration of each model and size."""

from __future__ import annotations

import pandas as pd

from analysis.claims import published
from analysis.claims.verdicts import FAIL, PASS, UNKNOWN, Tally, Verdict, is_study
from analysis.rows import labels, metrics, winners
from results.text.numbers import format_number, listed, plural


def published_winners(frame: pd.DataFrame) -> Verdict:
    """The winner of each cell has the published layout; on the study's rows also its MFU and memory."""
    best = winners.best_by(frame, "published_mfu")
    best = best.assign(_label=best["label"] if is_study(frame) else _label_of_shape(best))
    row_of_cell = {(row["_label"], row["world_size"]): row for row in labels.records(best)}
    compared, wrong = 0, []
    for (label, nodes), cell in published.WINNERS.items():
        row = row_of_cell.get((label, nodes * published.DEVICES_PER_NODE))
        if row is None:
            continue
        compared += 1
        names = ("dp", "tp", "pp", "num_microbatches", "micro_batch_size", "zero_stage")
        same = tuple(int(row[name]) for name in names) == cell.layout
        if is_study(frame):
            same = same and abs(row["mfu_percent"] - cell.mfu_percent) < 0.01
            same = same and abs(row["memory_gb"] - cell.memory_gb) < 0.01
        if not same:
            tied = isinstance(row["tied_layouts"], str) and cell.label in row["tied_layouts"].split("; ")
            ahead = f"{row['layout']}, which noise may put ahead of the published one" if tied else row["layout"]
            wrong.append(f"{label} on {nodes * published.DEVICES_PER_NODE} GPUs: {ahead}")
    if not compared:
        return Verdict(UNKNOWN, "no finished run of the study's models on its numbers of GPUs")
    what = "layout, MFU and memory" if is_study(frame) else "layout"
    agree = f"{compared - len(wrong)} of {plural(compared, 'cell')} agree in {what}"
    agree += f"; others: {listed(wrong, 3)}" if wrong else ""
    return Verdict(FAIL if wrong else PASS, agree, Tally(compared - len(wrong), compared))


def winners_by_throughput(frame: pd.DataFrame) -> Verdict:
    """Ranking by throughput names other winners than the study's MFU."""
    both = [winners.best_by(frame, rule).set_index(["label", "world_size"]) for rule in winners.RULES]
    common = both[0].index.intersection(both[1].index)
    tied = frame["tie_embeddings"].eq(True) & (frame["outcome"] == "ok")
    if not len(common) or not (tied & (frame["pp"] > 1)).any() or not (tied & (frame["pp"] == 1)).any():
        return Verdict(UNKNOWN, "no model with tied embeddings finished both with and without a pipeline")
    changed = common[both[0].loc[common, "attempt_id"] != both[1].loc[common, "attempt_id"]]
    names = [f"{row['label']} on {row['world_size']}" for row in labels.records(both[0].loc[changed].reset_index())]
    text = f"{len(changed)} of {plural(len(common), 'winner')} change"
    text += f": {listed(names, 7)} GPUs" + _beyond_noise(both, changed) if names else ""
    return Verdict(PASS if len(changed) else FAIL, text, Tally(len(changed), len(common)))


def _beyond_noise(both: list[pd.DataFrame], changed: pd.Index) -> str:
    """Clause on how many of the changed winners may be as fast as their replacement."""
    rows = both[1].loc[changed]
    known = rows["tie"].notna()
    if not known.any():
        return "; how many of these are more than noise is not known: one timed step a run and no repeats"
    before = both[0].loc[changed, "layout"]
    tied = [old in str(names).split("; ") for old, names in zip(before, rows["tied_layouts"], strict=True)]
    return f"; in {sum(tied)} of the {int(known.sum())} with known noise both may be as fast"


def cells_are_of_their_model(frame: pd.DataFrame) -> Verdict:
    """Every published winner has the shape that its label stands for."""
    if not is_study(frame):
        return Verdict(UNKNOWN, "these rows have no labels in addition to their shapes")
    best = winners.best_by(frame, "published_mfu")
    other = best[best["label"] != best["workload"]]
    if other.empty:
        return Verdict(PASS, f"all {len(best)} winners have the shape of their label", Tally(len(best), len(best)))
    mislabelled = []
    proper = metrics.best_configurations(frame)
    for row in labels.records(other):
        best_of_label = proper[(proper["workload"] == row["label"]) & (proper["world_size"] == row["world_size"])]
        instead = [
            f"{r['layout']} with {format_number(r[metrics.RANK_BY])} tokens/s/GPU"
            for r in labels.records(best_of_label)
        ]
        mislabelled.append(
            f"{row['label']} on {row['world_size']} GPUs is {row['workload']} with "
            f"{format_number(row[metrics.RANK_BY])} tokens/s/GPU; "
            f"the best {row['label']} proper is {listed(instead) or 'none'}"
        )
    text = f"{len(other)} of {plural(len(best), 'winner')} have another shape: {listed(mislabelled)}"
    return Verdict(FAIL, text, Tally(len(best) - len(other), len(best)))


def _label_of_shape(rows: pd.DataFrame) -> pd.Series:
    """The study's label of each row's shape; None for another model."""
    by_shape = {shape: label for label, shape in published.SHAPES.items()}

    def find(row: pd.Series) -> str | None:
        names = ("num_layers", "hidden_size", "num_heads", "ffn_hidden_size", "vocab_size")
        if row[[*names, "num_kv_heads"]].isna().any() or row["num_kv_heads"] != row["num_heads"]:
            return None
        return by_shape.get(published.Shape(*(int(row[name]) for name in names)))

    if rows.empty:
        return pd.Series([], dtype=object)
    return pd.Series([find(row) for _, row in rows.iterrows()], index=rows.index, dtype=object)
