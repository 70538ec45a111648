"""``python -m sweep parity``: what it refuses, in one line, and what it says of right and wrong layouts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from sweep.__main__ import main
from sweep.composing import machine
from sweep.composing.conffiles import ConfFolders
from sweep.planning import limits
from sweep.running import parity
from sweep.running.parity import read_pair
from tests.planted.faults_of_ranks import FAULTS
from tests.planted.plant import with_fault
from tests.pool import Pool
from workloads.spec.errors import InfeasibleLayout
from workloads.spec.experiment import Experiment


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "count_cuda_devices", lambda: 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --right"),
        (["--right", "tp=2"], "no model given: add model=NAME, one of "),
        (["model=tini", "--right", "tp=2"], "no model called 'tini'; did you mean 'tiny'"),
        (["model=tiny", "--right", "tpp=2"], "--right: no field 'tpp'; did you mean 'tp'"),
        (["model=tiny", "--right", "tp"], "--right: cannot read 'tp'; expected NAME=VALUE"),
        (["model=tiny", "--right", "tp=two"], "--right: tp='two' must be a whole number of at least 1"),
        (["model=tiny", "--right", "dp=0"], "--right: dp=0 must be a whole number of at least 1"),
        (["model=tiny", "--right", "tp='2"], "--right: cannot read"),
        (["model=tiny", "--right", "tp=2 tp=1"], "--right: tp is given twice"),
        (["model=tiny", "--right", "seq_len=64"], "seq_len is the same for both layouts; give it outside"),
        (["model=tiny", "--left", "model=tiny", "--right", "tp=2"], "--left: model is the same for both"),
        (["model=tiny", "model.depth=2", "--right", "tp=2"], "a model has no 'depth' to change"),
        (["model=tiny", "model.num_heads=x", "--right", "tp=2"], "num_heads='x' must be a whole number"),
        (
            ["model=deepseek_v2_lite", "model.head_dim=64", "--right", "tp=2"],
            "model.head_dim=64 has no effect on deepseek_v2_lite: latent attention has its own sizes; leave it out",
        ),
        (["model=qwen3_30b_a3b", "model.ffn_hidden_size=64", "--right", "tp=2"], "every layer has routed experts; lea"),
        (["model=deepseek_v3", "model.num_layers=2", "--right", "tp=2"], "num_dense_layers=3 must be less than num_la"),
        (["model=tiny", "model.num_heads=3", "model.num_kv_heads=3", "model.head_dim=7", "--right", "tp=2"], "even"),
        (["model=tiny", "--right", "tp=3"], "right layout: tp=3 does not divide num_heads=4 of tiny"),
        (["model=tiny", "--left", "pp=9", "--right", "tp=2"], "left layout: pp=9 stages need at least as many layers"),
        (["model=tiny", "--right", "dp=32", "global_batch_size=32"], "which is one node of 16; at most 16"),
        (
            ["model=tiny", "precision=fp8_rowwise", "seq_len=36", "--right", "tp=2"],
            "needs multiples of 16 on every rank",
        ),
        (["model=tiny", "--device", "cuda", "--right", "tp=2"], "this machine has no usable GPU; use --device cpu"),
        (["model=llama405b", "--right", "tp=2"], "take a smaller model (model.num_layers=2), batch or seq_len"),
        (["model=tiny", "--steps", "0", "--right", "tp=2"], "'0' is not a whole number of at least 1"),
        (["model=tiny", "dp=2", "--right", "dp_replicate=2 dp=2"], "give dp=2 or dp_replicate and dp_shard, not both"),
    ],
)
def test_one_line_for_a_mistake(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert message in said.err


def pair(*overrides: str, left: str = "", right: str = "tp=2") -> parity.Pair:
    return read_pair(["model=tiny", *overrides], left, right, ConfFolders(), None, 2)


def test_sides_are_built_on_what_both_have() -> None:
    found = pair("micro_batch_size=2", "precision=fp64", "model.num_layers=6", right="pp=2 dp=2 zero_stage=1")
    assert found.device == "cpu"
    assert found.left.world_size == 1 and found.right.world_size == 4
    assert found.left.model == found.right.model and found.left.model.num_layers == 6
    assert [side.micro_batch_size for side in (found.left, found.right)] == [2, 2]
    assert found.right.pp_schedule == "1f1b" and found.right.dp_shard == 2
    assert (found.left.seq_len, found.left.global_batch_size, found.left.precision) == (128, 8, "fp64")
    both = pair("dp=2", "zero_stage=1", right="dp_replicate=2 dp_shard=2 micro_batch_size=1")
    assert both.left.dp_shard == 2 and (both.right.dp_replicate, both.right.dp_shard) == (2, 2)


def test_a_machine_with_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "machine_memory_bytes", lambda: 10 * 2**20)
    with pytest.raises(InfeasibleLayout, match=r"comparing needs about .* of this machine's 10.0 MiB"):
        pair()
    monkeypatch.setattr(parity, "machine_memory_bytes", lambda: None)
    assert pair().right.tp == 2
    assert limits.machine_memory_bytes() is None or limits.machine_memory_bytes() > 0


SMALL = ["model=tiny", "model.num_layers=2", "model.vocab_size=128", "seq_len=32"]


@pytest.mark.slow(seconds=4)
def test_two_right_layouts_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *SMALL, "precision=bf16", "--right", "tp=2", "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert "agree: all" in said and "step 0: loss" in said and "2 ranks: tiny-dp1z0-tp2" in said


@pytest.mark.slow
def test_a_wrong_layout_differs(
    gloo_pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (fault,) = (fault for fault in FAULTS if fault.name == "embedding_mask")
    from workloads.parity import run
    from workloads.parity.training import train_rank

    body: Callable[..., Any] = partial(train_rank, with_activations=True)

    def train(experiment: Experiment, steps: int, device: str) -> list[Any]:
        planted_in = fault if experiment.tp > 1 else None
        return gloo_pool.run(with_fault, experiment.world_size, planted_in, body, experiment, steps, device)

    monkeypatch.setattr(run, "train", train)
    assert main(["parity", *SMALL, "--right", "tp=2", "--steps", "1"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "differ: first in step 0, forward: output of embedding, micro-batch 0 (sequence 0)" in said


@pytest.mark.multi_gpu
def test_two_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.undo()
    for precision in ("fp32", "bf16"):
        assert main(["parity", *SMALL, f"precision={precision}", "--device", "cuda", "--right", "tp=2"]) == 0
        assert main(["parity", *SMALL, f"precision={precision}", "--device", "cuda", "--right", "pp=2"]) == 0
    assert "agree" in capsys.readouterr().out
