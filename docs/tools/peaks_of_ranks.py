"""Measures peaks of pipeline ranks whose peers are not there: ``python -m docs.tools.peaks_of_ranks llama8b_8_layers``.

The arguments are names of models; two stages of each, with two chunks a rank, train on two data-parallel ranks in four
layouts of schedules that split backwards. This GPU runs one rank of each stage after the other, each in a process of
its own: what it sends is dropped, and what it receives is whatever memory holds. Printed are the peak of allocated
memory, the closed form of `workloads.costs.memory` with the workspace of matrix products, both in GiB, and how far off
that is.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import cluster_named
from workloads.contract.measure_spec import MeasureSpec
from workloads.costs.memory.estimate import estimate_memory
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import build, choose_attention
from workloads.measuring.step import measure
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import rank_of

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"pp_schedule": "zero_bubble_v", "zero_stage": 3, "recompute": "none"},
    {"pp_schedule": "zero_bubble_v", "zero_stage": 3, "recompute": "full"},
    {"pp_schedule": "interleaved_zero_bubble", "zero_stage": 3, "recompute": "selective"},
    {"pp_schedule": "dualpipe_v", "zero_stage": 2, "recompute": "full"},
)
STAGES = 2


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: there is nothing to measure\n")
        return 2
    if len(arguments) == 3 and all(word.isdecimal() for word in arguments[1:]):
        sys.stdout.write(_measured(arguments[0], LAYOUTS[int(arguments[1])], int(arguments[2])))
        return 0
    unknown = sorted(set(arguments) - set(ConfFolders().names("model")))
    if unknown or not arguments:
        sys.stderr.write(f"needs names of models{': none is called ' + unknown[0] if unknown else ''}\n")
        return 2
    for model in arguments:
        for layout in range(len(LAYOUTS)):
            for stage in range(STAGES):
                one = [sys.executable, "-m", "docs.tools.peaks_of_ranks", model, str(layout), str(stage)]
                subprocess.run(one, check=True)
    return 0


def _measured(model: str, layout: dict[str, Any], stage: int) -> str:
    case = Experiment.canonical(
        model=ConfFolders().model(model),
        seq_len=4096,
        micro_batch_size=1,
        global_batch_size=8,
        dp=2,
        pp=STAGES,
        virtual_stages=2,
        cuda_graph="none",
        **layout,
    )
    rank = rank_of(case, pp=stage)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    choose_attention(case)
    engine = build(case, make_groups(case, rank, torch.device("cuda")))
    measure(engine, MeasureSpec(warmup_steps=1, timed_steps=2, memory_probe=False))
    peak, workspace = torch.cuda.max_memory_allocated(), cluster_named("h200", ConfFolders()).device.workspace_bytes
    closed = estimate_memory(case).stages[stage].peak_bytes + workspace
    off = 100 * (closed / peak - 1)
    words = " ".join(map(str, layout.values()))
    return f"{model:28} {words:36} {stage} {peak / 2**30:8.3f} {closed / 2**30:8.3f} {off:+.3f} %\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
