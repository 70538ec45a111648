"""Megatron's notation of stages: what it means, one spelling of equal stages, and what is wrong with a text."""

from __future__ import annotations

from typing import Any

import pytest

from sweep.grids.axes import AXES
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec
from workloads.spec.pipeline_stages import canonical_stages, mistake_in, written_stages

MODEL = ModelSpec(
    name="m", num_layers=6, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn_hidden_size=8, vocab_size=16
)


@pytest.mark.parametrize(
    ("text", "stages", "spelling"),
    [
        ("Et|(tt|)*30mL", ["Et", *["tt"] * 30, "mL"], "Et|(tt|)*30mL"),
        ("Ettt|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"], "Ettt|(tt|)*29m|L"),
        ("E,t*3|tt,t|t*12L", ["Ettt", "ttt", "t" * 12 + "L"], "Ettt|ttt|t*12L"),
        ("Et(|tt)*2|L", ["Et", "tt", "tt", "L"], "Et|tt|tt|L"),
        ("Et(|tt)*4|L", ["Et", *["tt"] * 4, "L"], "Et|(tt|)*4L"),
        ("E(t)*3|(t*2|t|)*2L", ["Ettt", "tt", "t", "tt", "t", "L"], "Ettt|tt|t|tt|t|L"),
        ("Et|*3tL", ["Et", "", "", "tL"], "Et|||tL"),
        ("E(t|t)*3|L", ["Et", "tt", "tt", "t", "L"], "Et|tt|tt|t|L"),
        ("EtL", ["EtL"], "EtL"),
    ],
)
def test_stages_are_those_of_megatron_core(text: str, stages: list[str], spelling: str) -> None:
    """The stages are what ``PipelineParallelLayerLayout.parse_str_to_list`` of Megatron-Core 0.19.2 returns for the
    text, and for the canonical spelling too."""
    assert list(written_stages(text).stages) == stages
    assert canonical_stages(text) == canonical_stages(spelling) == spelling
    assert list(written_stages(spelling).stages) == stages


def test_numbers_of_layers_and_modules() -> None:
    written = written_stages("Et||ttm*2|L")
    assert (written.layers, written.num_layers, written.multi_token_modules) == ((1, 0, 2, 0), 3, 2)
    assert (written.empty_stage, written_stages("EtL").empty_stage) == (2, 0)


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "it has no E"),
        ("Ett|tt", "it has no L"),
        ("Et|xL", "character 4, 'x', is none of E (embedding), t (layer)"),
        ("Et tL", "character 3, ' ', is none of"),
        ("E(t|(t)*2)*3L", "character 5, '(', opens a repetition inside of another"),
        ("Et)*2L", "character 3, ')', closes nothing"),
        ("E(t|L", "character 2, '(', is not closed"),
        ("E(tt)L", "character 5, ')', must be followed by *n"),
        ("E()*3L", "character 3, ')', ends an empty repetition"),
        ("*2EtL", "character 1, '*', repeats nothing"),
        ("E(t)*2*3L", "character 7, '*', repeats nothing"),
        ("Et*L", "character 3, '*', must be followed by a number"),
        ("Et*0L", "character 3, '*', must be followed by a number"),
        ("E(t*999|)*9999L", "character 9 repeats more than a model of at most 10,000 layers"),
        ("EtEL", "character 3 is a second E"),
        ("tEL", "character 1, 't', is before E"),
        ("|EtL", "character 1, '|', is before E"),
        ("EtL|", "character 4, '|', is after L"),
        ("EmtL", "character 3, 't', is after m"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text: str, mistake: str) -> None:
    said = mistake_in(text)
    assert said is not None
    assert said.startswith(mistake)
    assert "\n" not in said
    with pytest.raises(InvalidExperiment, match="pp_stages="):
        Experiment(model=MODEL, global_batch_size=2, pp=2, pp_schedule="1f1b", pp_stages=text)


def test_one_pipeline_has_one_id_and_experiments_without_it_keep_theirs() -> None:
    def of(**fields: Any) -> Experiment:
        return Experiment.canonical(model=MODEL, global_batch_size=2, pp=2, **fields)

    written = of(pp_stages="Et*2|(tt)*2L", pp_split="even")
    assert written == of(pp_stages="Ett|ttttL")
    assert (written.pp_stages, written.pp_split) == ("Ett|t*4L", "balanced")
    assert written.id != of().id
    assert of(pp_stages=None).id == of().id
    alone = Experiment.canonical(model=MODEL, global_batch_size=2, pp_stages="Ett|ttttL")
    assert alone == Experiment.canonical(model=MODEL, global_batch_size=2)


def test_grids_take_text_and_null() -> None:
    assert AXES["pp_stages"].check("axis", None) is None
    assert AXES["pp_stages"].check("axis", "Et|tL") == "Et|tL"
    assert "must be the stages of a pipeline" in AXES["pp_stages"].refusal("axis pp_stages", 3)
    assert AXES["pp_stages"].refusal("axis pp_stages", "E|x").startswith("axis pp_stages='E|x': character 3, 'x'")
