#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, gloo, two ranks. Weights that are frozen during a run, or that no batch uses, go on
# moving under ZeRO.
#
# Expected: weights with `requires_grad_(False)` stay as they are, as they do with torch alone and under ZeRO-0, and
# so do weights that get no gradient: torch's optimizers leave out parameters whose gradient is None.
# Behaviour: ZeRO-1, -2 and -3 step one flat copy of all parameters that could be trained when `initialize` was
# called. A part without a gradient is filled with 0, so that Adam takes it on along its old momentum, some six steps
# in all, and AdamW's weight decay shrinks it for the rest of the run: by the sum of rate times decay, 10 % at a rate
# of 1e-3 and a decay of 0.1 in 1000 steps. ZeRO-0 fills in 0 for weights that are unused, not for frozen ones.
# (ZeRO-3 is worse off with weights that are unused: it steps them by their last gradient.) `requires_grad` is False,
# nothing is reported, and the loss says little. A parameter group of its own whose rate and decay are set to 0 at the
# time is right, as is building the engine again.
# Who meets it: schedules that freeze embeddings, a vision tower or lower layers after a while; parts of a model that
# are not used for long, as adapters and heads of tasks that take turns, which a run with weight decay wears away.
#
# Output of 2026-12-01 (10 steps of training, then 200 in which the branch is frozen, or unused; AdamW at a rate of
# 0.01; how far it has moved in those 200, and what is left of its norm):
#   frozen, torch: no decay moved 0 %, left 100 %; decay 0.1 moved 0 %, left 100 %
#   frozen, ZeRO-0: no decay moved 0 %, left 100 %; decay 0.1 moved 0 %, left 100 %
#   frozen, ZeRO-1: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
#   frozen, ZeRO-2: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
#   frozen, ZeRO-3: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
#   unused, torch: no decay moved 0 %, left 100 %; decay 0.1 moved 0 %, left 100 %
#   unused, ZeRO-0: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
#   unused, ZeRO-1: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
#   unused, ZeRO-2: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 deepspeed==0.19.8 2>/dev/null
cat >"$folder/frozen.py" <<'PYTHON'
import sys

import deepspeed
import torch
import torch.distributed as dist

ROWS, WIDTH, TRAINED, STEPS = 4, 8, 10, 200


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.image = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, rows, with_image):
        out = self.text(rows)
        if with_image:
            out = out + self.image(rows)
        return out.pow(2).mean()


def weight(model):
    with deepspeed.zero.GatheredParameters([model.image.weight]):
        return model.image.weight.detach().clone()


def run(stage, how, decay):
    """Moves of the image branch while it is frozen or unused; stage None: torch alone."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=decay)
    if stage is not None:
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(TRAINED + STEPS):
        if step == TRAINED:
            before = weight(model)
            model.image.weight.requires_grad_(how != "frozen")
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        with_image = how != "unused" or step < TRAINED
        if stage is None:
            model(rows, with_image).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(engine(rows, with_image))
            engine.step()
    after = weight(model)
    moved, left = (after - before).norm() / before.norm(), after.norm() / before.norm()
    return f"moved {100 * moved:.0f} %, left {100 * left:.0f} %"


deepspeed.init_distributed(dist_backend="gloo")
for how in ("frozen", "unused"):
    for stage in (None, 0, 1, 2, 3):
        if (how, stage) == ("unused", 3):
            continue
        texts = [run(stage, how, decay) for decay in (0.0, 0.1)]
        if dist.get_rank() == 0:
            name = "torch" if stage is None else f"ZeRO-{stage}"
            print(f"{how}, {name}: no decay {texts[0]}; decay 0.1 {texts[1]}", file=sys.stderr, flush=True)
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$folder/extensions
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/frozen.py" 2>&1 >/dev/null |
  grep -E "^(frozen|unused), " | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
frozen, torch: no decay moved 0 %, left 100 %; decay 0.1 moved 0 %, left 100 %
frozen, ZeRO-0: no decay moved 0 %, left 100 %; decay 0.1 moved 0 %, left 100 %
frozen, ZeRO-1: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
frozen, ZeRO-2: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
frozen, ZeRO-3: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
unused, torch: no decay moved 0 %, left 100 %; decay 0.1 moved 0 %, left 100 %
unused, ZeRO-0: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
unused, ZeRO-1: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
unused, ZeRO-2: no decay moved 28 %, left 87 %; decay 0.1 moved 37 %, left 71 %
EXPECTED
