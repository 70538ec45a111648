"""Layouts that teams published (``conf/published``), predicted with the question's batch, sequences and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sweep.advising.question import Question
from sweep.advising.ranked import RankedLayout
from sweep.advising.ranking import Ranking
from sweep.composing.conffiles import PACKAGED
from sweep.composing.yaml_files import read_yaml
from workloads.rules.layout_rules import violations
from workloads.spec.experiment import ENGINE, Experiment
from workloads.spec.updates.words import UPDATE_FIELDS

FOLDER = PACKAGED / "published"
_DEGREES = ("tp", "cp", "pp", "ep", "virtual_stages")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedLayout:
    """A published layout of the question's model, device and number of devices."""

    experiment: Experiment
    source: str
    url: str
    date: str
    precision: str
    """Precision in which it was published; the prediction is for that of the question."""
    ranked: RankedLayout | None
    """None: it is not predicted, see ``why_not``."""
    why_not: str | None


def published(question: Question, ranking: Ranking) -> tuple[PublishedLayout, ...]:
    """The published layouts for a question, in the order of their file; none for other engines and unknown models."""
    path = FOLDER / f"{question.model.name}.yaml"
    if question.engine != ENGINE or not path.is_file():
        return ()
    asked = (
        one
        for one in read_yaml(path)["layouts"]
        if one["device"] == question.cluster.device.name and one["gpus"] in question.sizes
    )
    return tuple(_predicted(one, question, ranking) for one in asked)


def _predicted(fields: dict[str, Any], q: Question, ranking: Ranking) -> PublishedLayout:
    degrees = {name: fields.get(name, 1) for name in _DEGREES}
    e = Experiment.canonical(
        model=q.model,
        dp=fields["gpus"] // (degrees["tp"] * degrees["cp"] * degrees["pp"]),
        **degrees,
        pp_schedule="interleaved_1f1b" if degrees["virtual_stages"] > 1 else "1f1b",
        micro_batch_size=fields["micro_batch_size"],
        zero_stage=fields["zero_stage"],
        recompute=fields["recompute"],
        global_batch_size=q.global_batch_size,
        seq_len=q.seq_len,
        precision=q.precision,
        routing=q.routing,
        routing_imbalance=q.routing_imbalance,
        compile=q.compile,
        cuda_graph=q.cuda_graph,
        activation_offload=q.activation_offload,
        recurrence=q.recurrence,
        **{name: getattr(q, name) for name in UPDATE_FIELDS},
    )
    broken, ranked = violations(e, q.cluster), None
    if not broken and (time := ranking.times.of_layouts([e])[0]) is not None:
        ranked = ranking.fitting(e, time)
    why_not = broken[0].message if broken else "it is predicted not to fit in memory" if ranked is None else None
    return PublishedLayout(
        experiment=e,
        ranked=ranked,
        why_not=why_not,
        **{name: str(fields[name]) for name in ("source", "url", "date", "precision")},
    )
