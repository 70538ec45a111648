"""Random layouts over all axes: what the planner lets through the engine builds, what it refuses the engine refuses."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any, get_args

import pytest

from results.errors import UltrasweepError
from tests.pool import fork_server
from tests.workloads.costs.shapes import MIXTRAL
from tests.workloads.engine.parity import mla
from workloads.costs.shape.schedule import INTERLEAVED, V_SHAPED
from workloads.rules.layout_rules import lacking, layout_violations
from workloads.spec.experiment import Experiment, Recompute
from workloads.spec.experiment_values import ContextKind, PipelineSchedule
from workloads.spec.mesh import rank_of
from workloads.spec.model_spec import ModelSpec

LAYOUTS = 240


def drawn(draw: random.Random) -> Experiment:
    """Anything that `Experiment` accepts, small and often against the rules."""
    latent = draw.random() < 0.2
    heads = draw.choice([4, 8])
    model = ModelSpec(
        name="drawn",
        num_layers=draw.choice([4, 5, 8]),
        hidden_size=32,
        num_heads=heads,
        num_kv_heads=heads if latent else draw.choice([2, 4]),
        head_dim=8,
        ffn_hidden_size=draw.choice([48] * 9 + [50]),
        vocab_size=96,
        tie_embeddings=draw.random() < 0.5,
        qk_norm=not latent and draw.random() < 0.3,
        mla=mla(draw.choice([0, 16])) if latent else None,
        moe=MIXTRAL.moe if draw.random() < 0.05 else None,
    )
    pp = draw.choice([1, 1, 2, 3])
    zero = draw.randint(0, 3)
    shards = draw.choice([2, 4]) if zero else 1
    schedule = draw.choice(get_args(PipelineSchedule)[1:]) if pp > 1 or draw.random() < 0.05 else "none"
    replicas = draw.choice([1, 1, 2])
    chunks = 2 if schedule in (*INTERLEAVED, *V_SHAPED) else 1
    return Experiment(
        model=model,
        dp_replicate=replicas,
        dp_shard=shards if draw.random() < 0.95 else 1,
        tp=draw.choice([1, 1, 2, 2, 4, 3]),
        cp=draw.choice([1, 1, 1, 2, 2, 3]),
        cp_kind=draw.choice(get_args(ContextKind)),
        pp=pp,
        ep=draw.choice([1] * 19 + [2]),
        micro_batch_size=draw.choice([1, 2]),
        global_batch_size=replicas * shards * draw.choice([2, 4, 6, 1]),
        seq_len=draw.choice([48] * 9 + [50]),
        zero_stage=zero,
        recompute=draw.choice([kind for kind in get_args(Recompute) if fits(kind, model)]),
        recompute_every=draw.choice([1, 1, 2, 3]),
        pp_schedule=schedule,
        virtual_stages=draw.choice([chunks] * 9 + [1, 3]),
        pp_split=draw.choice(["balanced", "even"]),
        sequence_parallel=draw.random() < 0.7,
        precision=draw.choice(["bf16", "bf16", "fp32", "fp64"] * 4 + ["fp8_rowwise"]),
        compile=draw.choice(["none"] * 4 + ["block"]),
    )


def fits(recompute: str, model: ModelSpec) -> bool:
    """Whether the model has what is to be computed again."""
    there = {"mla_up": model.mla, "experts": model.moe}
    return all(there.get(name, True) for name in recompute.split("+"))


def build_all(cases: list[Experiment]) -> list[str | None]:
    """Why each case could not be built; None where it was, on meta tensors, on the first and the last rank."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workloads.engine.collectives.groups import make_groups
    from workloads.engine.training.build import assemble, shape_chunks

    found: list[str | None] = []
    for case in cases:
        refused = None
        for rank in (0, rank_of(case, pp=case.pp - 1)):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
            try:
                groups = make_groups(case, rank, torch.device("cpu"))
                assemble(case, groups, shape_chunks(case, groups))
            except UltrasweepError as error:
                refused = str(error)
                break
            finally:
                dist.destroy_process_group()
        found.append(refused)
    return found


@pytest.mark.slow(seconds=5)
def test_the_planners_refusals_are_the_engines() -> None:
    draw = random.Random(7)
    cases = [drawn(draw) for _ in range(LAYOUTS)]
    with fork_server().Pool(1) as pool:
        built: list[str | None] = pool.apply(build_all, (cases,))
    seen: Counter[Any] = Counter()
    for case, refused in zip(cases, built, strict=True):
        broken = [*(violation.message for violation in layout_violations(case)), *lacking(case)]
        assert (refused is None) == (not broken), f"{case.id}: the engine says {refused}, the planner {broken}"
        seen[refused is None] += 1
        if refused is None:
            seen.update([case.pp_schedule, f"cp {case.cp}", f"ZeRO {case.zero_stage}"])
            seen.update([case.recompute, f"1 layer in {case.recompute_every}"])
    assert seen[True] >= 25
    assert seen[False] >= 25
    assert {*get_args(PipelineSchedule), "cp 2", *(f"ZeRO {stage}" for stage in range(4))} <= set(seen)
    common = [kind for kind in get_args(Recompute) if not {"mla_up", "experts"} & {*kind.split("+")}]
    assert {*common, *(f"1 layer in {every}" for every in (1, 2, 3))} <= set(seen)
    assert any("mla_up" in str(what) for what in seen)
