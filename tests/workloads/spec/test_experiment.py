"""What a field of an experiment may hold, models from YAML, and ids that stay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from typing import Any, get_args

import pytest

from sweep.grids.axes import AXES
from workloads.costs.shape.partition import recompute_by_layer
from workloads.spec.errors import InvalidExperiment
from workloads.spec.experiment import LATER_FIELDS, Experiment, from_dict, to_dict
from workloads.spec.experiment_values import FIELDS
from workloads.spec.model_spec import model_from_dict
from workloads.spec.recomputation import OPERATIONS, Recompute

SHAPE: dict[str, Any] = {
    "name": "ours",
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 256,
}
MODEL = model_from_dict(SHAPE)
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


def test_every_field_is_declared() -> None:
    names = {field.name for field in dataclasses.fields(Experiment)}
    assert set(FIELDS) == names - {"model"}
    assert set(AXES) >= names


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tp": 0}, "experiment on ours: tp=0 must be a whole number of at least 1"),
        ({"tp": True}, "tp=True must be a whole number of at least 1"),
        ({"seed": "abc"}, "seed='abc' must be a whole number"),
        ({"seed": 2**63}, "must be a whole number"),
        ({"sequence_parallel": "maybe"}, "sequence_parallel='maybe'; it may be true or false"),
        ({"sequence_parallel": 1}, "sequence_parallel=1; it may be true or false"),
        ({"zero_stage": 4}, "zero_stage=4; it may be 0, 1, 2 or 3"),
        ({"zero_stage": True}, "zero_stage=True; it may be 0, 1, 2 or 3"),
        (
            {"recompute": "ful"},
            "did you mean 'full'? it may be none, selective, full or some of norm, rope, swiglu, mla_up, experts, "
            "joined by '+'",
        ),
        ({"recompute": "swiglu+norm"}, "recompute='swiglu+norm'; did you mean"),
        ({"recompute": "norm+attention"}, "recompute='norm+attention'"),
        ({"recompute_every": 0}, "recompute_every=0 must be a whole number of at least 1"),
        ({"precision": "fp6"}, "precision='fp6'; did you mean"),
        ({"capacity_factor": 10**400}, "0… must be null or a number above 0"),
        ({"seq_len": 10**400}, "must be a whole number of at least 1, at most 9,223,372,036,854,775,807"),
        ({"engine_version": 2}, "engine_version=2 must be text"),
    ],
)
def test_wrong_values_are_refused_in_one_line(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidExperiment) as error:
        Experiment(model=MODEL, global_batch_size=1, **fields)
    assert told in str(error.value)


def test_stored_experiments_of_other_engines_can_be_read() -> None:
    stored = {**to_dict(Experiment(model=MODEL, global_batch_size=1)), "engine": "nanotron", "engine_version": "1"}
    assert from_dict(stored).engine == "nanotron"


def test_a_number_is_one_model_however_it_is_spelled() -> None:
    ids = {
        Experiment(model=model_from_dict({**SHAPE, "rope_theta": theta, "norm_eps": 1}), global_batch_size=1).id
        for theta in (1_000_000, 1_000_000.0)
    }
    assert len(ids) == 1


def test_ids_of_stored_rows_stay() -> None:
    """A row that was recorded with a whole number keeps the id that it was recorded under."""
    recorded = dataclasses.replace(MODEL, rope_theta=1_000_000)
    experiment = Experiment(model=recorded, global_batch_size=1)
    assert from_dict(to_dict(experiment)).id == experiment.id


def test_experiments_from_before_later_fields_keep_their_ids() -> None:
    stored = to_dict(Experiment(model=MODEL, global_batch_size=1, recompute="full", cuda_graph="none"))
    before = {name: stored.pop(name) for name in LATER_FIELDS}
    assert before == LATER_FIELDS
    read = from_dict(stored)
    assert {name: getattr(read, name) for name in LATER_FIELDS} == LATER_FIELDS
    every = {key: value for key, value in stored.items() if key != "model"}
    model = {key: value for key, value in stored["model"].items() if key != "name"}
    hashed = hashlib.sha256(json.dumps({**every, "model": model}, sort_keys=True).encode()).hexdigest()[:8]
    assert read.hash == hashed


def test_steps_are_captured_where_they_can_be_and_were_eager_before() -> None:
    usual, eager, step = (
        Experiment.canonical(model=MODEL, global_batch_size=1, engine_version="4", **fields)
        for fields in ({}, {"cuda_graph": "none"}, {"cuda_graph": "step"})
    )
    assert usual.cuda_graph == "auto"
    stored = to_dict(usual)
    del stored["cuda_graph"]
    assert from_dict(stored) == eager, "a file without the field was written when steps were eager"
    assert len({usual.hash, eager.hash, step.hash}) == 3
    labels = [one.id.removesuffix(f"-{one.hash}") for one in (usual, eager, step)]
    assert labels == [labels[0], f"{labels[0]}-eager", f"{labels[0]}-graph"]
    assert eager.replace(engine_version="3").id.rsplit("-", 1)[0] == labels[0], "stored ids stay"
    other = Experiment.canonical(model=MODEL, global_batch_size=1, engine="megatron")
    assert other.cuda_graph == "none"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"recompute": "swiglu+norm"}, {"recompute": "norm+swiglu"}),
        ({"recompute": "norm+norm"}, {"recompute": "norm"}),
        ({"recompute": "swiglu+rope+norm"}, {"recompute": "selective"}),
        ({"recompute": "mla_up+rope+norm+swiglu"}, {"recompute": "selective+mla_up"}),
        ({"recompute": "mla_up+selective+norm"}, {"recompute": "selective+mla_up"}),
        ({"recompute": "mla_up+norm"}, {"recompute": "norm+mla_up"}),
        ({"recompute": "experts+mla_up+selective"}, {"recompute": "selective+mla_up+experts"}),
        ({"recompute": "none", "recompute_every": 4}, {}),
        ({"recompute": "full", "recompute_every": 4}, {"recompute": "full", "recompute_every": 100}),
    ],
)
def test_two_spellings_of_one_recomputation_are_one_experiment(one: dict[str, Any], other: dict[str, Any]) -> None:
    first, second = (Experiment.canonical(model=MODEL, global_batch_size=1, **fields) for fields in (one, other))
    assert first == second
    AXES["recompute"].check("axis recompute", one["recompute"])


def test_every_kind_of_recomputation_has_an_id_of_its_own() -> None:
    cases = [
        Experiment.canonical(model=MODEL, global_batch_size=1, recompute=kind, recompute_every=every)
        for kind in get_args(Recompute)
        for every in (1, 2, 3)
    ]
    found = {case: case.id for case in cases}
    assert len(found) == len(set(found.values())) == (len(get_args(Recompute)) - 1) * 3 + 1
    readable = {re.sub("-[0-9a-f]{8}$", "", name) for name in found.values()}
    assert len(readable) == len(found)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in found.values())
    assert "ours-dp1z0-mbs1-gbs1-s4096-rcnorm.swiglu.every2" in readable
    assert {len(case.recomputed_operations) for case in cases} == set(range(len(OPERATIONS) + 1))
    assert "ours-dp1z0-mbs1-gbs1-s4096-rcselective.mla_up.every3" in readable
    assert recompute_by_layer(cases[-1])[:4] == ("full", "none", "none", "full")


@pytest.mark.parametrize(
    ("written", "stages", "meant"),
    [
        ("full/selective/none/none", 4, "full/selective/none*2"),
        ("rope+norm+swiglu/none*3", 4, "selective/none*3"),
        ("full/full", 2, "full"),
        ("full*4", 4, "full"),
        ("full:2/full:2", 2, "full:2"),
        ("full:02/none", 2, "full:2/none"),
        ("full:3", 1, "full:3"),
        ("full/full", 4, "full*2"),  # of another number of stages, which the rules refuse
    ],
)
def test_words_of_stages_have_one_spelling(written: str, stages: int, meant: str) -> None:
    e = Experiment.canonical(model=MODEL, global_batch_size=4, pp=stages, recompute=written)
    assert e.recompute == meant
    assert Experiment.canonical(model=MODEL, global_batch_size=4, pp=stages, recompute=meant) == e
    assert from_dict(to_dict(e)) == e
    assert re.fullmatch(r"[A-Za-z0-9._-]+", e.id)
    AXES["recompute"].check("axis recompute", written)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("full:0/none", "after ':' there must be a whole number from 1"),
        ("norm:2", "only full can be limited to the first layers of a stage"),
        ("full/some", "'some' is no recomputation of a layer"),
        ("full*x/none", "after '*' there must be a whole number from 1"),
        ("none*99999", "after '*' there must be a whole number from 1 to 10,000"),
        ("ful", "did you mean 'full'?"),
    ],
)
def test_mistakes_in_words_of_stages_are_named(written: str, told: str) -> None:
    with pytest.raises(InvalidExperiment, match=re.escape(told)):
        Experiment.canonical(model=MODEL, global_batch_size=4, pp=2, recompute=written)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hiden_size": 3}, "model ours: no field 'hiden_size'; did you mean 'hidden_size'? known: "),
        ({"num_layers": 10**9}, "model ours: num_layers=1,000,000,000 must be at most 10,000"),
        ({"num_layers": None}, "model ours: num_layers=None must be a whole number of at least 1"),
        ({"num_heads": "4"}, "model ours: num_heads='4' must be a whole number"),
        ({"hidden_size": [64]}, r"model ours: hidden_size=[64] must be a whole number"),
        ({"tie_embeddings": "yes"}, "model ours: tie_embeddings='yes' must be true or false"),
        ({"rope_theta": "big"}, "model ours: rope_theta='big' must be a number above 0"),
        ({"moe": 3}, "model ours: moe=3 must be a mapping"),
        ({"moe": {"num_experts": 8}}, "model ours: moe: experts_per_token, expert_hidden_size must be given"),
        (
            {"moe": {"num_experts": 8, "experts_per_tok": 2}},
            "model ours: moe: no field 'experts_per_tok'; did you mean 'experts_per_token'?",
        ),
        (
            {"moe": {"num_experts": 8, "experts_per_token": "two", "expert_hidden_size": 8}},
            "model ours: moe: experts_per_token='two' must be a whole number of at least 1",
        ),
        (
            {"mla": {"kv_lora_rank": 0, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}},
            "model ours: mla: kv_lora_rank=0 must be a whole number of at least 1",
        ),
        (
            {"mla": {**LATENT, "q_lora_rank": -1}},
            "model ours: mla: q_lora_rank=-1 must be a whole number of at least 0",
        ),
        ({"mla": LATENT}, "keys and values for every head: num_kv_heads=2 must equal num_heads=4"),
        (
            {"mla": {**LATENT, "v_head_dim": 16}, "num_kv_heads": 4},
            "mla: v_head_dim=16 must be at most qk_nope_head_dim + qk_rope_head_dim = 12",
        ),
        ({"mla": LATENT, "num_kv_heads": 4, "qk_norm": True}, "not of heads: qk_norm must be false"),
    ],
)
def test_mistakes_in_models_name_the_field_and_what_would_work(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidExperiment) as error:
        model_from_dict({**SHAPE, **fields})
    message = str(error.value)
    assert told in message
    assert "__init__" not in message
    assert "\n" not in message


def test_what_a_model_lacks_is_named() -> None:
    with pytest.raises(InvalidExperiment, match="model ours: ffn_hidden_size, vocab_size must be given"):
        model_from_dict({name: SHAPE[name] for name in list(SHAPE)[:5]})


def test_an_id_is_computed_once_and_not_kept_by_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_hidden_size": 32}
    model = model_from_dict({**SHAPE, "num_kv_heads": 4, "moe": experts, "mla": LATENT})
    one = Experiment.canonical(model=model, dp=2, global_batch_size=8)
    every = dataclasses.asdict(one)
    assert every["model"].pop("layers") is None  # left out, as in what earlier versions stored
    assert to_dict(one) == every and list(to_dict(one)) == list(every)
    other = one.replace(seed=one.seed + 1)
    assert one.id != other.id
    monkeypatch.setattr(hashlib, "sha256", None)
    assert one.id == one.id
    with pytest.raises(TypeError):
        _ = one.replace(seed=7).id
