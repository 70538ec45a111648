#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, gloo, two ranks. ZeRO-1 with `overlap_comm`: a weight that the last micro-batch of a
# step does not use is stepped by one rank's gradient.
#
# Expected: a step has the mean over ranks of the gradients of all its micro-batches, whichever of them used a weight;
# `overlap_comm` changes when gradients are sent and not which.
# Behaviour: with `overlap_comm` ZeRO-1 sends a weight's gradient in the hook that its backward calls, and only in the
# last micro-batch of a step, up to which gradients add up on each rank. A weight that the last micro-batch does not
# use has no hook there: its sum is never averaged, and the rank that owns this part of the optimizer takes its own,
# of its own batch alone. All ranks get the result, so they stay equal, and the norm for clipping is of it as well;
# nothing is reported. On n ranks the weight learns from 1/n of its data, with a gradient as noisy. Without
# `overlap_comm`, the default of ZeRO-1 and -2, and under ZeRO-2, which sends in each micro-batch, it is right.
# Who meets it: configurations copied from ZeRO-2 or -3, and Lightning's DeepSpeed strategy, which sets `overlap_comm`
# by default, with accumulation, where some micro-batches leave parts of the model out: those without an image, of
# another task or language, with a head or an adapter of their own.
#
# Output of 2026-12-01 (4 micro-batches, weights of an image branch in the first 3 of them; gradient of an element, 1
# on rank 0 and 3 on rank 1 in each of them, so that 3/4 of 2 is right):
#   ZeRO-0, image left out last: 1.50 to 1.50
#   ZeRO-0, image left out first: 1.50 to 1.50
#   ZeRO-1, image left out last: 1.50 to 1.50
#   ZeRO-1, image left out first: 1.50 to 1.50
#   ZeRO-2, image left out last: 1.50 to 1.50
#   ZeRO-2, image left out first: 1.50 to 1.50
#   ZeRO-0, overlap_comm, image left out last: 1.50 to 1.50
#   ZeRO-0, overlap_comm, image left out first: 1.50 to 1.50
#   ZeRO-1, overlap_comm, image left out last: 2.25 to 2.25
#   ZeRO-1, overlap_comm, image left out first: 1.50 to 1.50
#   ZeRO-2, overlap_comm, image left out last: 1.50 to 1.50
#   ZeRO-2, overlap_comm, image left out first: 1.50 to 1.50
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 deepspeed==0.19.8 2>/dev/null
cat >"$folder/accumulated.py" <<'PYTHON'
import sys

import deepspeed
import torch
import torch.distributed as dist

WIDTH, MICROS = 4, 4


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.text = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.image = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, row, with_image):
        out = self.text(row)
        if with_image:
            out = out + self.image(row)
        return out.sum()


deepspeed.init_distributed(dist_backend="gloo")
row = torch.full((1, WIDTH), (1.0, 3.0)[dist.get_rank()])
for overlap in (False, True):
    for stage in (0, 1, 2):
        for name, left_out in {"left out last": MICROS - 1, "left out first": 0}.items():
            model = Model()
            config = {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": MICROS,
                "gradient_clipping": 0.0,  # 1.0 by default
                "zero_optimization": {"stage": stage, "overlap_comm": overlap},
                "zero_allow_untested_optimizer": True,
            }
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
            before = model.image.weight.detach().clone()
            for micro in range(MICROS):
                engine.backward(engine(row, micro != left_out))
                engine.step()
            gradient = (before - model.image.weight).detach().flatten()
            if dist.get_rank() == 0:
                kind = f"ZeRO-{stage}{', overlap_comm' if overlap else ''}"
                shown = f"{gradient.min():.2f} to {gradient.max():.2f}"
                print(f"{kind}, image {name}: {shown}", file=sys.stderr, flush=True)
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$folder/extensions
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/accumulated.py" 2>&1 >/dev/null |
  grep "^ZeRO" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
ZeRO-0, image left out last: 1.50 to 1.50
ZeRO-0, image left out first: 1.50 to 1.50
ZeRO-1, image left out last: 1.50 to 1.50
ZeRO-1, image left out first: 1.50 to 1.50
ZeRO-2, image left out last: 1.50 to 1.50
ZeRO-2, image left out first: 1.50 to 1.50
ZeRO-0, overlap_comm, image left out last: 1.50 to 1.50
ZeRO-0, overlap_comm, image left out first: 1.50 to 1.50
ZeRO-1, overlap_comm, image left out last: 2.25 to 2.25
ZeRO-1, overlap_comm, image left out first: 1.50 to 1.50
ZeRO-2, overlap_comm, image left out last: 1.50 to 1.50
ZeRO-2, overlap_comm, image left out first: 1.50 to 1.50
EXPECTED
