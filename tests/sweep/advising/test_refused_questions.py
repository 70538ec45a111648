"""Questions that ``advise`` refuses: each mistake in one line that says what would work."""

from __future__ import annotations

import pytest

from sweep.__main__ import main
from tests.sweep.advising.test_advise import LINK, LLAMA, asked
from workloads.spec.errors import InvalidSweep

pytestmark = pytest.mark.drawn(one_in=2)


def test_all_mistakes_of_a_question_are_reported_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "model=llama8b", "gpus=8", "tpp=2", "num_gpus=8"]) == 2
    heading, *said = capsys.readouterr().err.splitlines()
    assert heading == "ultrasweep: 3 mistakes:"
    for line, begin in zip(said, ("no option 'tpp'", "no option 'num_gpus'", "cluster is missing"), strict=True):
        assert line.startswith(f"  advise: {begin}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cluster=h200", "gpus=8"], "model is missing"),
        (["model=llama8b", "gpus=8"], "cluster is missing"),
        (["model=llama8b", "cluster=h200"], "gpus is missing"),
        (["model=llama8b", "cluster=h200", "gpus=0"], "gpus"),
        (["model=llama8b", "cluster=h200", "gpus=64-8"], "smaller to a larger"),
        (["model=llama8b", "cluster=h200", "gpus=7"], "no layout of llama8b on 7 devices obeys the rules"),
        (["model=llama8b", "cluster=h200", "gpus=8", "tokens=1e12"], "tokens needs days too"),
        (["model=llama8b", "cluster=h200", "gpus=8", "tokens=1e400", "days=3"], "tokens=inf in days=3: both must be"),
        (["model=llama8b", "cluster=h200", "gpus=8", "tpp=2"], "no option 'tpp'; did you mean 'tp'?"),
        (["model=llama8b", "cluster=h200", "gpus=8", "tp=1", "tp=2"], "tp is given twice, tp=1 and tp=2; give it once"),
        (["model=llama8b", "model=llama1b", "cluster=h200", "gpus=8"], "model is given twice"),
        (["model=llama8b", "cluster=h200", "num_gpus=8"], "advise: no option 'num_gpus'; did you mean 'gpus'?"),
        (["model=llama9b", "cluster=h200", "gpus=8"], "llama9b"),
        (["model=llama8b", "cluster=cpu", "gpus=8"], "the file of cluster cpu"),
        (["model=llama8b", "cluster=h200", "gpus=8", "recompute=norm"], "is not searched"),
        (["model=llama8b", "cluster=h200", "gpus=8", "price=0"], "price"),
    ],
)
def test_mistakes_get_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert said in error and "\n" not in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["activation_offload=auto"],
            "name what to compare, such as activation_offload=[none,input,all]; a plan",
        ),
        (["activation_offload=[none,auto]"], "activation_offload=auto: name what"),
        (["activation_offload=all", "compile=block"], "a compiled block saves has no names; use compile=none"),
        (
            ["activation_offload=qkv", "recompute=full"],
            "keeps the input of a layer alone; use activation_off",
        ),
        (["activation_offload=kqv"], "'kqv'"),
        (["optimizer_offload=[0,2]"], "optimizer_offload=2"),
        (["optimizer_offload=0.5", "optimizer=muon"], "optimizer_offload=0.5"),
        (["optimizer_offload=0.5", "engine=torchtitan"], "keeps states on the device; use 0"),
        (["optimizer_offload=[0,0.2,0.5,1]", "activation_offload=[none,all]"], "4 x 2 combinations"),
        (["precision=int4"], "precision='int4'; it may be "),
        (["memory_budget=[40,80]"], "give one number of GiB"),
        (["memory_budget=3"], "memory_budget=3 GiB leaves nothing for training: cluster h200 reserves 4.7 GiB of it"),
        *(([f"memory_budget={text}"], "GiB above 0") for text in ("inf", "1e306", "-1", "abc", "true")),
    ],
)
def test_what_advise_cannot_consider_on_a_host_or_budget_is_refused(words: list[str], told: str) -> None:
    with pytest.raises(InvalidSweep) as error:
        asked(*LLAMA, *LINK, *words)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_without_the_rate_of_its_link_a_host_cannot_be_considered() -> None:
    with pytest.raises(InvalidSweep, match=r"lacks host\.link_bandwidth, so nothing can be pred"):
        asked(*LLAMA, "activation_offload=[none,all]", "cluster.host.link_bandwidth=null")
