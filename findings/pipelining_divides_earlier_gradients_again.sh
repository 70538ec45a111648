#!/usr/bin/env bash
# torch 2.13.0. Gradients that are kept over two steps of a pipeline schedule are divided twice.
#
# Expected: `schedule.step()` adds the mean over its micro-batches to `.grad`; called k times before the optimizer's step (to
# accumulate over more micro-batches than the schedule holds, or over sequences of other lengths) it gives the sum of k means.
# Behaviour: by default (`scale_grads=True`) a stage ends each call by dividing all of `.grad` in place by the number of
# micro-batches m, and what earlier calls left there is divided again. The gradient of the last call but one counts 1/m, the one
# before it 1/m². However many calls there are, the sum stays below m/(m-1) times one call's: 1.33 for m = 4. The losses
# are right. `scale_grads=False` and a division of one's own, before the optimizer's step, is right.
# Who meets it: every loop around torch.distributed.pipelining that calls `zero_grad` less often than `step`: the global batch is
# then in effect the last call's. torchtitan met it (pytorch/torchtitan#1733) and sets `scale_grads=False`; torch keeps its default.
#
# Output of 2026-11-29 (each call alone gives a gradient of 1; m = 4):
#   ScheduleGPipe: 1.0 1.25 1.3125 1.328125
#   Schedule1F1B: 1.0 1.25 1.3125 1.328125
#   ScheduleInterleaved1F1B: 1.0 1.25 1.3125 1.328125
#   ScheduleZBVZeroBubble: 1.0 1.25 1.3125 1.328125
#   ScheduleGPipe, scale_grads=False, divided once: 1.0 2.0 3.0 4.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/calls.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

MICRO_BATCHES, CALLS = 4, 4
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def gradients(kind, scale):
    """The first weight's gradient after one to four calls of `step`."""
    single = kind in (ScheduleGPipe, Schedule1F1B)
    parts = [nn.Linear(1, 1, bias=False) for _ in range(1 if single else 2)]
    for part in parts:
        nn.init.ones_(part.weight)
    stages = [PipelineStage(part, at, len(parts), torch.device("cpu")) for at, part in enumerate(parts)]
    schedule = kind(
        stages[0] if single else stages, MICRO_BATCHES, loss_fn=lambda out, target: out.mean(), scale_grads=scale
    )
    seen = []
    for _ in range(CALLS):
        schedule.step(torch.ones(8, 1), target=torch.ones(8, 1))
        seen.append(parts[0].weight.grad.item() / (1 if scale else MICRO_BATCHES))
    return " ".join(map(str, seen))


for kind in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble):
    print(f"{kind.__name__}: {gradients(kind, True)}")
print(f"ScheduleGPipe, scale_grads=False, divided once: {gradients(ScheduleGPipe, False)}")
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/calls.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
ScheduleGPipe: 1.0 1.25 1.3125 1.328125
Schedule1F1B: 1.0 1.25 1.3125 1.328125
ScheduleInterleaved1F1B: 1.0 1.25 1.3125 1.328125
ScheduleZBVZeroBubble: 1.0 1.25 1.3125 1.328125
ScheduleGPipe, scale_grads=False, divided once: 1.0 2.0 3.0 4.0
EXPECTED
