"""Measures what copies of gradients cost with ZeRO 2 and 3: ``python -m docs.tools.sums_of_zero 16 3 1 4``.

The arguments are layers of Llama 8B, the ZeRO stage, sequences of a micro-batch and micro-batches of a step. This GPU
runs the steps of one of two data-parallel ranks whose other rank is not there: compute and copies, without messages.
Gradients that FSDP copies are compared with those that products write (``gradient_accumulation_fusion``). As everything
of a step is on one device, the process runs each way twice, in turn.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from sweep.composing.conffiles import ConfFolders
from workloads.contract.measure_spec import MeasureSpec
from workloads.engine.collectives.groups import make_groups
from workloads.engine.training.build import build, choose_attention
from workloads.measuring.step import measure
from workloads.spec.experiment import Experiment


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: there is nothing to measure\n")
        return 2
    if len(arguments) != 4 or not all(word.isdecimal() for word in arguments):
        sys.stderr.write("needs four numbers: layers, ZeRO stage, sequences of a micro-batch, micro-batches\n")
        return 2
    layers, zero_stage, sequences, rounds = map(int, arguments)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    model = dataclasses.replace(ConfFolders().model("llama8b"), num_layers=layers, name=f"llama8b_{layers}_layers")
    for fused in (False, True, False, True):
        case = Experiment.canonical(
            model=model,
            seq_len=4096,
            micro_batch_size=sequences,
            global_batch_size=2 * sequences * rounds,
            dp=2,
            zero_stage=zero_stage,
            gradient_accumulation_fusion=fused,
        )
        seconds, peak = _run(case)
        way = "in products" if fused else "copied"
        sys.stdout.write(f"{way:12} {seconds * 1e3:9.1f} ms {peak / 2**30:8.2f} GiB\n")
    return 0


def _run(case: Experiment) -> tuple[float, int]:
    """(median seconds of ten steps, peak bytes)"""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    choose_attention(case)
    engine = build(case, make_groups(case, 0, torch.device("cuda")))
    spec = MeasureSpec(warmup_steps=3, timed_steps=10, memory_probe=False)
    steps = [step.step_time_s for step in measure(engine, spec).steps if not step.is_warmup]
    return statistics.median(steps), torch.cuda.max_memory_allocated()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
