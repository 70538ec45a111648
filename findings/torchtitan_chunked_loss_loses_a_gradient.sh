#!/usr/bin/env bash
# torchtitan 0.3.0 with torch 2.13.0, one process. Its loss in chunks and a pipeline that splits the backward: the last norm
# gets no gradient.
#
# Expected: the loss in chunks, which torchtitan's own configurations use, gives the gradients of the whole loss, or an error.
# Behaviour: under ScheduleZBVZeroBubble the norm that shares an FSDP group with the head, as in torchtitan's decoders, has
# the gradient None. The loss and all other gradients are right, the gradient norm is a little too small, and the optimizer
# skips the weight. The loss reshards the head's group when its chunks are done; the norm's weight gradient is computed after
# that, in the second half of the backward, for parameters that FSDP has freed. A backward in one piece is right.
# Who meets it: zero-bubble and DualPipeV pipelines of torchtitan 0.3.0 with its default loss. CrossEntropyLoss alone is right.
#
# Output of 2026-11-27:
#   ScheduleInterleaved1F1B, whole: loss 3.13205, norm.weight 0.20891, head.weight 0.59794
#   ScheduleInterleaved1F1B, chunks: loss 3.13205, norm.weight 0.20891, head.weight 0.59794
#   ScheduleZBVZeroBubble, whole: loss 3.13205, norm.weight 0.20891, head.weight 0.59794
#   ScheduleZBVZeroBubble, chunks: loss 3.13205, norm.weight None, head.weight 0.59794
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5 tyro==1.0.17 triton==3.7.1
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3
cat >"$folder/gradients.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.skips_head = nn.RMSNorm(8), nn.Linear(8, 16, bias=False), False

    def forward(self, x):
        return self.norm(x) if self.skips_head else self.head(self.norm(x))


dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
for schedule in (ScheduleInterleaved1F1B, ScheduleZBVZeroBubble):
    for kind in ("whole", "chunks"):
        torch.manual_seed(0)
        parts = nn.Linear(8, 8), Last()
        for modules in (parts[0], [parts[1].norm, parts[1].head], parts[1]):
            fully_shard(modules, mesh=mesh, reshard_after_forward=False)
        loss = CrossEntropyLoss.Config().build()
        if kind == "chunks":
            loss = ChunkedLossWrapper.Config(num_chunks=4).build()
            loss.set_lm_head(parts[1].head)
            parts[1].skips_head = True
        stages = [PipelineStage(part, at, 2, torch.device("cpu")) for at, part in enumerate(parts)]
        pipeline = schedule(stages, 2, loss_fn=lambda *args, **kw: loss(*args, **kw)[0], scale_grads=False)
        x, target, losses = torch.randn(4, 8, 8), torch.randint(16, (4, 8)), []
        pipeline.step(x, target=target, losses=losses, loss_kwargs={"global_valid_tokens": torch.tensor(32)})
        norms = [p.grad if p.grad is None else round(p.grad.full_tensor().norm().item(), 5) for p in parts[1].parameters()]
        print(f"{schedule.__name__}, {kind}: loss {sum(losses).item():.5f}, norm.weight {norms[0]}, head.weight {norms[1]}")
dist.destroy_process_group()
PYTHON
cd "$folder"
venv/bin/python gradients.py 2>errors | tee output
diff output - <<'EXPECTED'
ScheduleInterleaved1F1B, whole: loss 3.13205, norm.weight 0.20891, head.weight 0.59794
ScheduleInterleaved1F1B, chunks: loss 3.13205, norm.weight 0.20891, head.weight 0.59794
ScheduleZBVZeroBubble, whole: loss 3.13205, norm.weight 0.20891, head.weight 0.59794
ScheduleZBVZeroBubble, chunks: loss 3.13205, norm.weight None, head.weight 0.59794
EXPECTED
