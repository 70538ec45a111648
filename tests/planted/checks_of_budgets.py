"""Checks of what becomes of activations: that ``auto`` fits its budget with all that is on a device, and the host, and
that the engine gives every layer the word of its stage."""

from __future__ import annotations

from dataclasses import replace

import torch

from sweep.composing.config import compose_sweep
from sweep.planning.auto_recompute import Asked, choose
from sweep.predicting.forecast import Forecast
from tests.planted.plant import Fault, planted, with_fault
from tests.pool import Pool
from tests.workloads.costs.shapes import LLAMA_8B
from tests.workloads.engine.parity import experiment
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.host_activations import node_host_bytes
from workloads.costs.shape.partition import experiment_layers, recompute_by_layer, with_word
from workloads.engine.collectives.groups import make_groups
from workloads.engine.layers.recompute import FullBlock
from workloads.engine.training import build
from workloads.spec.experiment import Experiment

GIB = 2**30


def budgets(pool: Pool, fault: Fault | None) -> None:
    """The chosen words fit budgets from what full recomputation needs to what none does."""
    del pool  # nothing is run
    cluster = compose_sweep(["+grid=llama8b_8gpu", "cluster=h100_efa"]).cluster
    beside = cluster.reserved_bytes + cluster.device.workspace_bytes
    e = Experiment.canonical(
        model=LLAMA_8B, pp=4, dp=8, zero_stage=1, micro_batch_size=2, seq_len=4096, global_batch_size=128
    )
    least, most = ((estimate_memory(with_word(e, word)).peak_bytes + beside) / GIB for word in ("full", "none"))
    asked = [least + share * (most - least) for share in (0.05, 0.3, 0.6, 0.9)]
    with planted(fault):
        chosen = choose([Asked(e, budget) for budget in asked], Forecast.of(cluster))
    for budget, one in zip(asked, chosen, strict=True):
        assert one is not None
        assert one.fits
        needed = estimate_memory(with_word(e, one.recompute)).peak_bytes + beside
        assert needed <= budget * GIB, f"{one.recompute} needs {needed / GIB:.1f} GiB of {budget:.1f}"


def hosts(pool: Pool, fault: Fault | None) -> None:
    """What is chosen fits the budget, and what it has on the host fits a node; with much room there, something is."""
    del pool  # nothing is run
    cluster = compose_sweep(["+grid=llama8b_8gpu", "cluster=h200"]).cluster
    beside = cluster.reserved_bytes + cluster.device.workspace_bytes
    e = Experiment.canonical(model=LLAMA_8B, dp=8, zero_stage=3, seq_len=32768, global_batch_size=64)
    asked = [Asked(e, budget, ("recompute", "activation_offload")) for budget in (100.0, 60.0)]
    for held in (2048, 400):
        cluster = replace(cluster, host=replace(cluster.host, memory_bytes=held * GIB))
        with planted(fault):
            chosen = choose(asked, Forecast.of(cluster))
        for one, found in zip(asked, chosen, strict=True):
            assert found is not None
            assert found.fits
            assert held < 1000 or found.choice.offload != "none"
            layout = found.choice.of(e)
            needed, on_host = estimate_memory(layout).peak_bytes + beside, node_host_bytes(layout, 8)
            assert needed <= (one.budget_gib or 0) * GIB, f"{found.choice} needs {needed / GIB:.1f} GiB"
            assert on_host <= held * GIB, f"{found.choice} needs {on_host / GIB:.1f} GiB of {held} of the host"


def stage_words(pool: Pool, fault: Fault | None) -> None:
    """Layers are computed again as the closed forms count them."""
    case = experiment(pp=2, recompute="full/none", rounds=2)
    counted = pool.run(with_fault, case.world_size, fault, wrapped_layers, case)
    wrapped = dict(pair for held in counted for pair in held)
    words = recompute_by_layer(case)
    assert {*words} == {"full", "none"}
    assert {layer for layer, name in wrapped.items() if name == FullBlock.__name__} == {
        layer for layer, word in enumerate(words) if word == "full"
    }


def wrapped_layers(rank: int, case: Experiment) -> list[tuple[int, str]]:
    """The class around every layer of a rank, by the layer's index in the model."""
    groups = make_groups(case, rank, torch.device("cpu"))
    found = []
    for number, chunk in enumerate(build.shape_chunks(case, groups)):
        layers = experiment_layers(case)[groups.stage_of(number)]
        # FSDP derives a class from a module's own, whose name begins with its own.
        names = [type(block).__name__.removeprefix("FSDP") for block in chunk.blocks]
        found += list(zip(layers, names, strict=True))
    return found
