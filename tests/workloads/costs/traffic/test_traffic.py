"""What a step sends, worked out by hand. That the engine sends the same: `tests/workloads/engine/test_parity.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workloads.costs.shapes import LLAMA_8B, MIXTRAL, TINY
from workloads.costs.traffic.sent import SentTally, Traffic, step_traffic
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import ModelSpec

C, G = 2, 4  # bytes of a compute and of a master value in bf16


def case(model: ModelSpec = TINY, **layout: Any) -> Experiment:
    return Experiment.canonical(**{"model": model, "seq_len": 16, "global_batch_size": 8, **layout})


def sent(experiment: Experiment, rank: int = 0, devices: int | None = None) -> dict[tuple[str, str], tuple[int, int]]:
    traffic = step_traffic(experiment, rank, devices)
    assert traffic is not None
    return {(one.axis, one.op): (one.calls, one.bytes) for one in traffic}


def test_one_rank_alone_sends_nothing() -> None:
    assert step_traffic(case(), 0) == []


def test_zero3_by_hand() -> None:
    """TINY: 4 blocks of D 8, 2 query heads and 1 of keys and values of size 4, F 16; V 32."""
    block = 8 + 16 * 8 + 8 * 8 + 8 + 32 * 8 + 8 * 16  # norm, qkv, out, norm, gate and up, down
    ends, head = 32 * 8, 32 * 8 + 8
    found = sent(case(dp=2, zero_stage=3, micro_batch_size=4))
    assert found == {
        # Blocks and the embedding are gathered for their forward and for their backward, the head once for both.
        ("dp_shard", "all_gather"): (2 * 5 + 1, C * (2 * (4 * block + ends) + head)),
        ("dp_shard", "reduce_scatter"): (6, G * (4 * block + ends + head)),
        ("dp_shard", "all_reduce"): (1, 2 * G),  # loss and norm; the axis has all ranks
    }


@pytest.mark.parametrize(("zero", "gathers", "scatters"), [(1, 6, 6), (2, 6, 24), (3, 4 * 11, 24)])
def test_accumulation(zero: int, gathers: int, scatters: int) -> None:
    """Four micro-batches. FSDP gathers the head once more, for nothing, in the last backward's first unit."""
    found = sent(case(dp=2, zero_stage=zero, micro_batch_size=1))
    assert found["dp_shard", "all_gather"][0] == gathers + 1
    assert found["dp_shard", "reduce_scatter"][0] == scatters


def test_replicas_add_up_the_shards_once_a_step() -> None:
    whole = sent(case(dp=4, zero_stage=2, micro_batch_size=1))["dp_shard", "reduce_scatter"]
    found = sent(case(dp_replicate=2, dp_shard=4, zero_stage=2, micro_batch_size=1))
    assert found["dp_replicate", "all_reduce"] == (6, whole[1] // 2 // 4), "2 micro-batches, 4 shards"
    assert sent(case(dp=2, micro_batch_size=1))["dp_replicate", "all_reduce"][0] == 6 + 1, "and the loss"


def test_tensor_parallel_block_by_hand() -> None:
    """8B, tp 2, one micro-batch of 4,096 tokens: S = 2 * 4096 * 4096 bytes."""
    s = C * 4096 * 4096
    experiment = case(LLAMA_8B, tp=2, seq_len=4096, global_batch_size=1)
    found = sent(experiment)
    norms = 65 * 4096 * G
    loss = 3 * 4096 * 4
    total = 2 * G  # loss and norm of the whole step
    assert found == {
        ("tp", "all_gather"): (32 * 6 + 2, (32 * 6 + 2) * s),
        ("tp", "reduce_scatter"): (32 * 4 + 2, (32 * 4 + 2) * s),
        ("tp", "all_reduce"): (2 + 1 + 1, loss + norms + total),
    }
    plain = sent(experiment.replace(sequence_parallel=False))
    assert plain["tp", "all_reduce"] == (32 * 4 + 2 + 2 + 1, (32 * 4 + 2) * s + loss + total)
    full = sent(experiment.replace(recompute="full"))
    assert full["tp", "all_gather"][0] - found["tp", "all_gather"][0] == 2 * 32
    assert full["tp", "reduce_scatter"][0] - found["tp", "reduce_scatter"][0] == 32
    assert sent(experiment.replace(recompute="selective")) == found
    some = sent(experiment.replace(recompute="full", recompute_every=5))
    assert some["tp", "all_gather"][0] - found["tp", "all_gather"][0] == 2 * 7, "layers 0, 5, 10, 15, 20, 25 and 30"
    again = plain["tp", "all_reduce"][0] + 32
    assert sent(experiment.replace(sequence_parallel=False, recompute="full"))["tp", "all_reduce"][0] == again


def test_pipeline_sends_to_its_neighbours() -> None:
    experiment = case(pp=4, micro_batch_size=1)
    message = C * 16 * 8
    for rank, neighbours in enumerate((1, 2, 2, 1)):
        assert sent(experiment, rank)["pp", "p2p"] == (8 * neighbours, 8 * neighbours * message)
    half = case(pp=4, tp=2, micro_batch_size=1, model=TINY)
    assert sent(half)["pp", "p2p"] == (8, 8 * message // 2)
    assert sent(half.replace(sequence_parallel=False))["pp", "p2p"] == (8, 8 * message)


def test_links_follow_the_nodes() -> None:
    experiment = case(LLAMA_8B, dp=4, zero_stage=3, tp=2, pp=2, global_batch_size=8)

    def links(rank: int, devices: int | None) -> set[tuple[str, str | None]]:
        return {(one.axis, one.link) for one in step_traffic(experiment, rank, devices)}

    inside, between = "inside_node", "between_nodes"
    assert links(0, 8) == {("tp", inside), ("dp_shard", inside), ("pp", between), ("world", between)}
    assert links(0, 4) == {("tp", inside), ("dp_shard", between), ("pp", between), ("world", between)}
    assert links(0, 16) == {(axis, inside) for axis in ("tp", "dp_shard", "pp", "world")}
    assert links(0, None) == {(axis, None) for axis in ("tp", "dp_shard", "pp", "world")}


def test_messages_to_either_neighbour_may_take_other_links() -> None:
    experiment = case(pp=4, micro_batch_size=1)
    pp = [one for one in step_traffic(experiment, 1, 2) if one.op == "p2p"]
    assert [(one.link, one.calls) for one in pp] == [("between_nodes", 8), ("inside_node", 8)]


@pytest.mark.parametrize(("layout", "more"), [({}, 2), ({"cp": 2, "cp_kind": "ulysses"}, 2), ({"cp": 2}, 0)], ids=str)
def test_compiled_layers_that_recompute_selectively_gather_again(layout: dict[str, Any], more: int) -> None:
    """Not those whose attention breaks the graph: they are not compiled."""
    layout = {"tp": 2, "recompute": "selective", **layout}
    eager, compiled = (sent(case(**layout, compile=kind))["tp", "all_gather"][0] for kind in ("none", "block"))
    experiment = case(**layout)
    assert compiled - eager == more * experiment.model.num_layers * experiment.num_microbatches


def test_layers_with_experts_that_recompute_send_what_they_do_uncompiled() -> None:
    for recompute in ("selective", "full"):
        eager, compiled = (sent(case(MIXTRAL, dp=2, recompute=recompute, compile=kind)) for kind in ("none", "block"))
        assert eager == compiled


def test_experts_by_hand() -> None:
    """Mixtral: 32 layers, 2 of 8 experts a token, D 4096, F 14336; 4 ranks with 2 experts each, 16 tokens on each."""
    experiment = case(MIXTRAL, dp=4, ep=4, micro_batch_size=1)
    found = sent(experiment)
    rounds, copies = 2, 16 * 2
    there_and_back = 2 * (C * 4096 + 4)  # rows and their fp32 weights, forward and backward
    back_and_there = 2 * C * 4096
    assert found["ep", "all_to_all"] == (6 * 32 * rounds, 32 * rounds * copies * (there_and_back + back_and_there))
    full = sent(experiment.replace(recompute="full"))
    assert full["ep", "all_to_all"][0] == (6 + 2) * 32 * rounds, "outputs do not come back again"
    # Every expert is on one rank alone, so that nothing is reduced of it.
    layer = (4096 + 2 * 1024) * 4096 + 4096 * 4096 + 2 * 4096 + 8 * 4096
    ends = 2 * 32000 * 4096 + 4096
    assert found["dp_replicate", "all_reduce"] == (32 + 2 + 1, G * (32 * layer + ends + 2))
    alone = sent(experiment.replace(ep=1))
    experts = 3 * 8 * 4096 * 14336
    assert alone["dp_replicate", "all_reduce"] == (2 * 32 + 2 + 1, G * (32 * (layer + experts) + ends + 2))
    assert ("ep", "all_to_all") not in alone


def test_a_tally_leaves_out_what_stays_on_one_rank() -> None:
    tally = SentTally(rank=3, devices_per_node=4)
    tally.add("tp", "all_reduce", 100, [3])
    tally.add("pp", "p2p", 10, [4], calls=2)
    tally.add("pp", "p2p", 5, [4])
    assert tally.result() == [Traffic(axis="pp", op="p2p", link="between_nodes", calls=3, bytes=25)]
