"""How packed sequences are dealt, and how long the attention of each rank is."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.shape.flops import flops_per_token, hardware_flops_per_token
from workloads.costs.shape.params import matmul_params
from workloads.spec.documents.lengths import canonical_documents, packed
from workloads.spec.documents.loads import Packing, attended, dealt, imbalance, mean_length, slowest_length
from workloads.spec.documents.shares import Shares, shares, squares_of_chunks
from workloads.spec.experiment import Experiment

DRAWN = "lognormal mean=40 sigma=1.2 seed=7"


def in_file(folder: Path, *lengths: int) -> str:
    file = folder / "lengths.txt"
    file.write_text("".join(f"{length}\n" for length in lengths))
    text = canonical_documents({"kind": "file", "path": str(file)})
    assert text is not None
    return text


@pytest.mark.parametrize("balance", ["none", "greedy"])
@pytest.mark.parametrize(("dp", "size"), [(1, 1), (2, 2), (4, 1), (3, 4)])
def test_every_sequence_is_dealt_once(balance: str, dp: int, size: int) -> None:
    shares = dealt(Packing(DRAWN, balance, 256, 24, dp, size))
    assert sorted(at for of_rank in shares for one in of_rank for at in one) == list(range(24))
    assert {len(one) for of_rank in shares for one in of_rank} == {size}
    assert {len(of_rank) for of_rank in shares} == {24 // (dp * size)}


def test_in_order_ranks_take_turns() -> None:
    assert dealt(Packing(DRAWN, "none", 256, 8, 2, 2)) == (((0, 1), (4, 5)), ((2, 3), (6, 7)))


def test_greedy_deals_the_longest_to_the_rank_with_least(tmp_path: Path) -> None:
    # Sequences of 12 tokens: 12 (144), 6+6 (72), 4+4+4 (48), 3+3+3+3 (36)
    text = in_file(tmp_path, 12, 6, 6, 4, 4, 4, 3, 3, 3, 3)
    # 144 to rank 0; 72 to rank 1; 48 to rank 1, which has less; 36 to rank 0, which alone has room
    assert dealt(Packing(text, "greedy", 12, 4, 2, 1)) == (((0,), (3,)), ((1,), (2,)))
    assert imbalance(Packing(text, "none", 12, 4, 2, 1)) == pytest.approx((144 + 48) / 150)
    assert imbalance(Packing(text, "greedy", 12, 4, 2, 1)) == pytest.approx((144 + 36) / 150)


def test_a_greedy_balance_is_never_worse_on_many_draws() -> None:
    for seed, dp in itertools.product(range(20), (2, 4)):
        text = f"lognormal mean=40 sigma=1.2 seed={seed}"
        in_order, greedy = (imbalance(Packing(text, balance, 256, 32, dp, 1)) for balance in ("none", "greedy"))
        assert 1 <= greedy <= in_order


@pytest.mark.parametrize("balance", ["none", "greedy"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_lengths_are_the_counted_keys_of_every_token(cp: int, balance: str) -> None:
    """A token at place p of its document counts p + 1/2 keys (half of all scores); a length is twice their mean."""
    packing = Packing(DRAWN, balance, 64, 6, 3, 2, cp)
    sequences = packed(DRAWN, 64, 6)
    for of_rank, lengths in zip(dealt(packing), attended(packing), strict=True):
        for one, of_cp in zip(of_rank, lengths, strict=True):
            for rank in range(cp):
                keys = []
                for at in one:
                    places = [place for length in sequences[at] for place in range(length)]
                    keys += [places[token] + 0.5 for token in (range(64) if cp == 1 else tokens(packing, at, rank))]
                assert of_cp[rank] == pytest.approx(2 * sum(keys) / len(keys), rel=1e-12)


def tokens(packing: Packing, sequence: int, rank: int) -> list[int]:
    """Indices of the tokens that a context-parallel rank holds."""
    lengths = packed(packing.documents, packing.seq_len, packing.global_batch_size)[sequence]
    size, chunks = shares(lengths, packing.cp, packing.balance)
    return [chunk * size + token for chunk in chunks[rank] for token in range(size)]


@pytest.mark.parametrize("cp", [2, 3, 4])
@pytest.mark.parametrize("seq_len", [12, 48, 1536, 12288])
def test_every_token_is_held_once_and_ranks_hold_equally_many(seq_len: int, cp: int) -> None:
    packing = Packing(DRAWN, "greedy", seq_len, 2, 1, 1, cp)
    for sequence in range(2):
        held = [tokens(packing, sequence, rank) for rank in range(cp)]
        assert sorted(token for one in held for token in one) == list(range(seq_len))
        assert {len(one) for one in held} == {seq_len // cp}
        assert all(one == sorted(one) for one in held), "in the order of the sequence"


def test_in_order_ranks_hold_the_two_parts_of_a_whole_sequence() -> None:
    assert shares((5, 7), 2, "none") == Shares(3, ((0, 3), (1, 2)))


def test_greedy_gives_the_chunk_with_most_attention_to_the_rank_with_least() -> None:
    # 16 tokens over 2 ranks: chunks of 2. One document of 8 has 4, 12, 20, 28 (b^2 - a^2); four of 2 have 4 each
    assert squares_of_chunks((8, 2, 2, 2, 2), 2) == [4, 12, 20, 28, 4, 4, 4, 4]
    # 28 to rank 0; 20, then 12 to rank 1, which has less; 4 (the first chunk) to rank 0, at 28 against 32; at 32 both,
    # the others go to them by turns
    assert shares((8, 2, 2, 2, 2), 2, "greedy") == Shares(2, ((0, 3, 4, 6), (1, 2, 5, 7)))


@pytest.mark.parametrize(("seq_len", "cp", "size"), [(16384, 2, 128), (4096, 8, 128), (4096, 16, 64), (1920, 3, 128)])
def test_chunks_are_whole_blocks_of_queries_where_a_rank_has_four(seq_len: int, cp: int, size: int) -> None:
    assert shares((seq_len,), cp, "greedy").size == size


@pytest.mark.parametrize("sigma", [0, 0.8, 1.2, 1.6])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_greedy_balances_context_parallel_ranks(cp: int, sigma: float) -> None:
    """To five percent of the mean, where the parts of whole sequences are far from it."""
    text = f"lognormal mean=1500 sigma={sigma} seed=7"
    for dp in (1, 2):
        in_order, greedy = (imbalance(Packing(text, one, 16384, 32, dp, 1, cp)) for one in ("none", "greedy"))
        assert 1 <= greedy <= 1.05
        assert sigma == 0 or in_order > 1.15


def test_the_documented_imbalances() -> None:
    text = (Path(__file__).parents[3] / "docs" / "fields" / "documents.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.split("| dp | cp |")[1].split("\n\n")[0].splitlines()[2:]]
    assert len(rows) == 6
    for dp, cp, in_order, greedy in rows:
        packing = Packing("lognormal mean=1500 sigma=1.2 seed=7", "none", 16384, 16 * int(dp), int(dp), 1, int(cp))
        assert f"{imbalance(packing):.2f}" == in_order
        assert f"{imbalance(packing._replace(balance='greedy')):.3f}" == greedy


def test_ranks_wait_for_each_other_in_every_micro_batch(tmp_path: Path) -> None:
    # 16 tokens: [8, 8] and [16] by turns. Of [8, 8] parts 0 and 3 of 4 have 16 + 48, so have parts 1 and 2; of
    # [12, 4] parts 0 to 3 have 16, 48, 80 and 16: ranks have 32 and 128, of which the second is waited for.
    packing = Packing(in_file(tmp_path, 8, 8, 12, 4), "none", 16, 2, 1, 1, 2)
    assert attended(packing) == (((8.0, 8.0), (4.0, 16.0)),)
    assert imbalance(packing) == pytest.approx((8 + 16) / (8 + 10))


def test_one_document_a_sequence_is_a_whole_sequence(tmp_path: Path) -> None:
    text = in_file(tmp_path, 64)
    for cp in (1, 2, 4):
        packing = Packing(text, "greedy", 64, 8, 2, 2, cp)
        assert mean_length(packing) == slowest_length(packing, together=False, waiting=3.0) == 64
        assert imbalance(packing) == 1


def test_the_slowest_rank_sets_the_step(tmp_path: Path) -> None:
    # As above: lengths of 12, 6, 4 and 3; rank 0 has 12 and 4, rank 1 has 6 and 3.
    packing = Packing(in_file(tmp_path, 12, 6, 6, 4, 4, 4, 3, 3, 3, 3), "none", 12, 4, 2, 1)
    assert attended(packing) == (((12.0,), (4.0,)), ((6.0,), (3.0,)))
    assert slowest_length(packing, together=False, waiting=0) == (12 + 4) / 2
    # A pipeline that waits for one more micro-batch waits for the longest.
    assert slowest_length(packing, together=False, waiting=1) == (12 + 4 + 12) / 3
    packing = packing._replace(balance="greedy")
    assert attended(packing) == (((12.0,), (3.0,)), ((6.0,), (4.0,)))
    assert slowest_length(packing, together=False, waiting=0) == (12 + 3) / 2
    assert slowest_length(packing, together=True, waiting=0) == (12 + 4) / 2


def test_flops_count_the_scores_within_documents() -> None:
    packed_case = Experiment.canonical(
        model=LLAMA_8B, dp=2, global_batch_size=8, seq_len=4096, documents="lognormal mean=512 sigma=1 seed=1"
    )
    scores = sum(n * n for held in packed("lognormal mean=512 sigma=1 seed=1", 4096, 8) for n in held)
    of_matmuls = 6 * matmul_params(LLAMA_8B) * packed_case.tokens_per_step
    # causal: 2 products of 2 FLOPs, forward and twice that backward, for half of all scores of a head and layer
    of_scores = 6 * LLAMA_8B.num_layers * LLAMA_8B.num_heads * LLAMA_8B.head_dim * scores
    total = flops_per_token(LLAMA_8B, packed_case.attended_length, "causal") * packed_case.tokens_per_step
    assert total == pytest.approx(of_matmuls + of_scores, rel=1e-12)
    assert hardware_flops_per_token(packed_case) * packed_case.tokens_per_step == pytest.approx(total, rel=1e-12)
    split = packed_case.replace(cp=2, cp_kind="ulysses", document_balance="greedy")
    assert hardware_flops_per_token(split) == hardware_flops_per_token(packed_case), "no forward runs twice"
    gathered = hardware_flops_per_token(split.replace(cp_kind="allgather")) * packed_case.tokens_per_step
    assert gathered == pytest.approx(total + of_scores / 3, rel=1e-12), "attention's forward runs twice"
    whole = flops_per_token(LLAMA_8B, 4096, "palm")
    assert flops_per_token(LLAMA_8B, packed_case.attended_length, "palm") < whole
