#!/usr/bin/env bash
# torch 2.13.0, one stage. Pipeline schedules cut uneven micro-batches, and whatever tensor they are given, without a word.
#
# Expected: a batch that the number of micro-batches does not divide is refused, or its gradient is that of the whole batch; a
# keyword argument without a row per sample (a table of positions, one scale for all) reaches every micro-batch whole, or is
# refused.
# Behaviour: ten rows in four micro-batches are 3, 3, 2 and 2, and the mean over the micro-batches counts each alike: a row of a
# short one weighs half as much again as one of a long one. The gradient is 15 % off that of the batch here, the losses and
# their mean likewise. Every tensor among the arguments is cut along its first dimension, too: a table of 16 positions reaches
# the first micro-batch as positions 0 to 3, the second as 4 to 7, and so on; where the model indexes or broadcasts it, nothing
# fails. `kwargs_chunk_spec` of the schedule says which arguments to repeat.
# Who meets it: a last batch without `drop_last`, batches sized by tokens, models that take their positions as an argument.
#
# Output of 2026-11-29 (distance from the whole batch's gradient over its norm; rows that each micro-batch is given):
#   ScheduleGPipe, 8 rows: 0.00, rows [2, 2, 2, 2]
#   ScheduleGPipe, 10 rows: 0.15, rows [3, 3, 2, 2]
#   ScheduleGPipe, 5 rows: 0.15, rows [2, 1, 1, 1]
#   Schedule1F1B, 8 rows: 0.00, rows [2, 2, 2, 2]
#   Schedule1F1B, 10 rows: 0.15, rows [3, 3, 2, 2]
#   Schedule1F1B, 5 rows: 0.15, rows [2, 1, 1, 1]
#   a table of positions 0 to 15: 0 to 3, 4 to 7, 8 to 11, 12 to 15
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/cut.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

MICRO_BATCHES = 4
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_default_dtype(torch.float64)


class Linear(nn.Linear):
    """Notes the rows and the first and last position of each forward."""

    def forward(self, x, positions=None):
        self.rows.append(len(x))
        if positions is not None:
            self.tables.append(f"{int(positions[0])} to {int(positions[-1])}")
        return super().forward(x)


def stage():
    torch.manual_seed(0)
    layer = Linear(3, 2)
    layer.rows, layer.tables = [], []
    return layer, PipelineStage(layer, 0, 1, torch.device("cpu"))


for kind in (ScheduleGPipe, Schedule1F1B):
    for rows in (8, 10, 5):
        layer, part = stage()
        x, target = torch.randn(rows, 3), torch.randn(rows, 2)
        F.mse_loss(nn.Linear.forward(layer, x), target).backward()
        whole = layer.weight.grad.clone()
        layer.zero_grad()
        kind(part, MICRO_BATCHES, loss_fn=F.mse_loss).step(x, target=target)
        distance = (layer.weight.grad - whole).norm() / whole.norm()
        print(f"{kind.__name__}, {rows} rows: {distance:.2f}, rows {layer.rows[-MICRO_BATCHES:]}")
layer, part = stage()
schedule = ScheduleGPipe(part, MICRO_BATCHES, loss_fn=F.mse_loss)
schedule.step(torch.randn(8, 3), positions=torch.arange(16), target=torch.randn(8, 2))
print(f"a table of positions 0 to 15: {', '.join(layer.tables[-MICRO_BATCHES:])}")
dist.destroy_process_group()
PYTHON
"$folder/venv/bin/python" "$folder/cut.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
ScheduleGPipe, 8 rows: 0.00, rows [2, 2, 2, 2]
ScheduleGPipe, 10 rows: 0.15, rows [3, 3, 2, 2]
ScheduleGPipe, 5 rows: 0.15, rows [2, 1, 1, 1]
Schedule1F1B, 8 rows: 0.00, rows [2, 2, 2, 2]
Schedule1F1B, 10 rows: 0.15, rows [3, 3, 2, 2]
Schedule1F1B, 5 rows: 0.15, rows [2, 1, 1, 1]
a table of positions 0 to 15: 0 to 3, 4 to 7, 8 to 11, 12 to 15
EXPECTED
