"""Ranks as processes of their own, without a launcher."""

from __future__ import annotations

import pytest

from tests.workloads.engine.parity import experiment
from workloads.measuring.processes import RankFailed
from workloads.parity.processes import train


@pytest.mark.slow
def test_every_rank_sends_its_trace_home() -> None:
    traces = train(experiment(dp=2, zero_stage=1, micro_batch_size=4), 1, "cpu")
    assert len(traces) == 2
    assert traces[0].losses == traces[1].losses and traces[0].grad_norms == traces[1].grad_norms
    assert all(trace.steps[0].activations and trace.steps[0].activation_gradients for trace in traces)


@pytest.mark.slow
def test_a_rank_that_fails_is_one_line_and_the_others_are_ended() -> None:
    broken = experiment(tp=2).replace(seq_len=1, global_batch_size=1, micro_batch_size=1)
    with pytest.raises(RankFailed, match=r"rank \d of 2: InfeasibleLayout: .* over tp=2 ranks"):
        train(broken, 1, "cpu")


@pytest.mark.slow
def test_ranks_that_do_not_end_are_ended() -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] have not ended within 0 s"):
        train(experiment(tp=2), 1, "cpu", timeout_s=0.01)
