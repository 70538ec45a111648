"""Measures what copies of gradients cost with ZeRO 2 and 3: ``python -m docs.tools.sums_of_zero 16 3 1 4``.

The arguments are layers of Llama 8B, the ZeRO stage, sequences of a micro-batch and micro-batches of a step. This GPU
runs the steps of one of two data-parallel ranks whose other rank is not there: compute and copies, without messages.
Gradients that FSDP copies are compared with those that products write (``gradient_accumulation_fusion``), each way
twice, in turn, each in a process of its own.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
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

WAYS = "copied", "written"


def main(arguments: list[str]) -> int:
    if not torch.cuda.is_available():
        sys.stderr.write("no CUDA device: there is nothing to measure\n")
        return 2
    numbers, way = arguments[:4], arguments[4:]
    if len(numbers) != 4 or not all(word.isdecimal() for word in numbers) or way not in ([], *([one] for one in WAYS)):
        sys.stderr.write("needs four numbers: layers, ZeRO stage, sequences of a micro-batch, micro-batches\n")
        return 2
    if way:
        sys.stdout.write(_measured(*map(int, numbers), fused=way == ["written"]))
        return 0
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    sys.stdout.flush()
    for one in 2 * WAYS:
        subprocess.run([sys.executable, "-m", "docs.tools.sums_of_zero", *numbers, one], check=True)
    return 0


def _measured(layers: int, zero_stage: int, sequences: int, rounds: int, *, fused: bool) -> str:
    """A line with the median time of ten steps and the peak of allocated memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model = dataclasses.replace(ConfFolders().model("llama8b"), num_layers=layers, name=f"llama8b_{layers}_layers")
    case = Experiment.canonical(
        model=model,
        seq_len=4096,
        micro_batch_size=sequences,
        global_batch_size=2 * sequences * rounds,
        dp=2,
        zero_stage=zero_stage,
        gradient_accumulation_fusion=fused,
    )
    choose_attention(case)
    engine = build(case, make_groups(case, 0, torch.device("cuda")))
    spec = MeasureSpec(warmup_steps=3, timed_steps=10, memory_probe=False)
    seconds = statistics.median(step.step_time_s for step in measure(engine, spec).steps if not step.is_warmup)
    peak = torch.cuda.max_memory_allocated()
    return f"{WAYS[fused]:8} {seconds * 1e3:9.1f} ms {peak / 2**30:8.2f} GiB\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
