"""What packed documents add to a rank's peak, against the real engine on FakeTensors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sampling import sampled
from tests.workloads.costs.memory.traced import experiment, traced
from workloads.costs.memory.document_tensors import input_bytes, packed_bytes
from workloads.costs.memory.estimate import estimate_memory
from workloads.spec.experiment import Experiment

pytestmark = pytest.mark.slow

DOCUMENTS: dict[str, Any] = {"documents": "lognormal mean=500 sigma=1 seed=1"}
GATHER: dict[str, Any] = {"cp": 2, "cp_kind": "allgather"}
CASES = {
    "ZeRO 3": experiment(dp=8, zero_stage=3, microbatches=2, **DOCUMENTS),
    "full, tp": experiment(tp=4, micro_batch_size=8, microbatches=3, recompute="full", **DOCUMENTS),
    "selective": experiment(micro_batch_size=4, recompute="selective", **DOCUMENTS),
    "1f1b": experiment(layers=4, pp=2, microbatches=4, micro_batch_size=2, recompute="full", **DOCUMENTS),
    "interleaved": experiment(
        layers=4,
        pp=2,
        pp_schedule="interleaved_1f1b",
        virtual_stages=2,
        microbatches=4,
        micro_batch_size=2,
        **DOCUMENTS,
    ),
    "cp": experiment(**GATHER, micro_batch_size=2, microbatches=2, **DOCUMENTS),
    "cp, greedy": experiment(**GATHER, micro_batch_size=2, microbatches=2, **DOCUMENTS, document_balance="greedy"),
    "ZeRO 1, flash": experiment(dp=2, zero_stage=1, attention="flash", microbatches=2, **DOCUMENTS),
    "cp, ulysses, flash": experiment(
        cp=2, cp_kind="ulysses", attention="flash", micro_batch_size=2, microbatches=2, **DOCUMENTS
    ),
    "cp, ulysses": experiment(cp=2, cp_kind="ulysses", micro_batch_size=2, microbatches=2, **DOCUMENTS),
    "cp 4, ulysses": experiment(cp=4, cp_kind="ulysses", micro_batch_size=2, microbatches=2, **DOCUMENTS),
}


@pytest.mark.parametrize("name", sampled(list(CASES), 2, seconds=4))
def test_peaks_with_documents_are_traced_ones(name: str) -> None:
    """The whole peak to 0.1 %, and what documents add to it to a twentieth: positions, tables and masks."""
    case = CASES[name]
    plain = case.replace(documents=None)
    found, without = traced(case, 0), traced(plain, 0)
    said, said_without = (estimate_memory(one).stages[0].peak_bytes for one in (case, plain))
    assert said == pytest.approx(found, rel=1e-3)
    assert said - said_without == pytest.approx(found - without, rel=0.05)


def test_bytes_by_hand() -> None:
    case = Experiment.canonical(**{**fields_of(experiment(**DOCUMENTS)), "micro_batch_size": 2, "global_batch_size": 6})
    # 3 micro-batches of 2 * 4,096 tokens, 24 bytes each; tables of 4,096 places, 128 columns in fp32; an index of each
    assert input_bytes(case) == 3 * 8192 * 24 + 4096 * 128 * 4 + 4096 * 4
    # rows of the tables, the beginning of each token's document, and lists of 32 x 32 blocks of 2 sequences
    assert packed_bytes(case) == 8192 * 128 * 4 + 8192 * 4 + 8 * 2 * (2 * 32 * 32 + 32 + 32)
    # FlashAttention: a list of as many documents as there are tokens
    assert packed_bytes(case.replace(attention="flash")) == 8192 * 128 * 4 + 8192 * 4 + 4 * (8192 + 2)
    assert packed_bytes(case.replace(documents=None)) == 0
    # Two ranks: 5 numbers a token instead of 3, and two orders of all tokens; blocks of 2,048 queries and 4,096 keys
    gathered = case.replace(cp=2, cp_kind="allgather")
    assert input_bytes(gathered) == 3 * 4096 * 40 + 4096 * 128 * 4 + 4096 * 4
    assert packed_bytes(gathered) == 4096 * 128 * 4 + 4096 * 8 + 2 * 8192 * 8 + 8 * 2 * (2 * 16 * 32 + 16 + 32)
    # Ulysses: tables of own tokens, the mask of whole sequences
    assert packed_bytes(case.replace(cp=2, cp_kind="ulysses")) == 4096 * 128 * 4 + 8192 * 4 + 8 * 2 * 2112


def fields_of(case: Experiment) -> dict[str, Any]:
    return {"model": case.model, "seq_len": case.seq_len, "documents": case.documents}
