#!/usr/bin/env bash
# deepspeed 0.19.8, torch 2.13.0, gloo, two ranks. Under ZeRO-3 a weight that a step does not use is moved by the
# gradient that it had when it was used last, in every such step.
#
# Expected: weights without a gradient in a step stay where they are, as under DDP, or are stepped with a gradient of
# 0, as under ZeRO-1 and -2. `ignore_unused_parameters`, true by default, says that weights without a gradient are
# allowed.
# Behaviour: ZeRO-3 keeps one buffer of gradients over the whole run. A parameter's part of it is overwritten when its
# gradient arrives in the first micro-batch and added to in later ones; nothing sets it to 0, and the step takes the
# buffer as it is. So a weight that is not used is stepped by its last gradient again, at the full learning rate, step
# after step, and a weight that is used in a later micro-batch alone gets its gradient plus the one of an earlier
# step. The norm that clips all gradients has it as well. All ranks agree, nothing is reported, and the loss of the
# steps that do not use the weight does not show it. Setting `engine.optimizer.grad_partitions_flat_buffer` to 0
# before the first micro-batch of a step is right, and so is a forward through the unused part whose output counts 0
# times, which has a gradient of 0.
# Who meets it: models with parts that only some batches use, the same on all ranks: a vision tower or an adapter in
# batches of text alone, heads and experts of a task that take turns, stages that are switched on or off by a
# schedule.
#
# Output of 2026-12-01 (SGD; how far each step moves the weights of the image branch, in percent of the last step that
# used it as torch alone takes it):
#   image branch in steps 1 and 5 of 6, ZeRO-1: 100 0 0 0 100 0
#   image branch in steps 1 and 5 of 6, ZeRO-2: 100 0 0 0 100 0
#   image branch in steps 1 and 5 of 6, ZeRO-3: 100 100 100 100 84 84
#   image branch in steps 1 and 5 of 6, ZeRO-3, buffer set to 0: 100 0 0 0 100 0
#   image branch in the second of two micro-batches, ZeRO-1: 100 100 100
#   image branch in the second of two micro-batches, ZeRO-2: 100 100 100
#   image branch in the second of two micro-batches, ZeRO-3: 100 216 266
#   image branch in the second of two micro-batches, ZeRO-3, buffer set to 0: 100 100 100
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
"$folder/venv/bin/pip" install --quiet deepspeed==0.19.8 2>/dev/null
cat >"$folder/unused.py" <<'PYTHON'
import sys

import deepspeed
import torch
import torch.distributed as dist

ROWS, WIDTH = 4, 8


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


def batch(step, micro):
    return torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + micro))


def moves(model, train, plan):
    """How far each step moves the weights of the image branch."""
    moved = []
    for step, micros in enumerate(plan):
        before = weight(model)
        train(step, micros)
        moved.append((weight(model) - before).norm().item())
    return moved


def weight(model):
    with deepspeed.zero.GatheredParameters([model.image.weight]):
        return model.image.weight.detach().clone()


def alone(plan):
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(step, micros):
        for micro, with_image in enumerate(micros):
            (model(batch(step, micro), with_image) / len(micros)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return moves(model, train, plan)


def zero(stage, plan, mend):
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": len(plan[0]),
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # 1.0 by default
        "zero_allow_untested_optimizer": True,
    }
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def train(step, micros):
        if mend:
            engine.optimizer.grad_partitions_flat_buffer.zero_()
        for micro, with_image in enumerate(micros):
            rows = batch(step, micro)[dist.get_rank() * ROWS :][:ROWS]
            engine.backward(engine(rows, with_image))
            engine.step()

    return moves(model, train, plan)


def shares(moved, right):
    """Each step in percent of what the last step that used the branch should have been."""
    texts, last = [], None
    for step, should in zip(moved, right):
        last = should or last
        texts.append(f"{100 * step / last:.0f}")
    return " ".join(texts)


deepspeed.init_distributed(dist_backend="gloo")
for name, plan in {
    "image branch in steps 1 and 5 of 6": [[step in (0, 4)] for step in range(6)],
    "image branch in the second of two micro-batches": [[False, True]] * 3,
}.items():
    for stage, mend in ((1, False), (2, False), (3, False), (3, True)):
        moved = zero(stage, plan, mend)
        if dist.get_rank() == 0:
            kind = f"ZeRO-{stage}{', buffer set to 0' if mend else ''}"
            print(f"{name}, {kind}: {shares(moved, alone(plan))}", file=sys.stderr, flush=True)
PYTHON
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 TORCH_EXTENSIONS_DIR=$folder/extensions
"$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/unused.py" 2>&1 >/dev/null |
  grep "^image branch" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
image branch in steps 1 and 5 of 6, ZeRO-1: 100 0 0 0 100 0
image branch in steps 1 and 5 of 6, ZeRO-2: 100 0 0 0 100 0
image branch in steps 1 and 5 of 6, ZeRO-3: 100 100 100 100 84 84
image branch in steps 1 and 5 of 6, ZeRO-3, buffer set to 0: 100 0 0 0 100 0
image branch in the second of two micro-batches, ZeRO-1: 100 100 100
image branch in the second of two micro-batches, ZeRO-2: 100 100 100
image branch in the second of two micro-batches, ZeRO-3: 100 216 266
image branch in the second of two micro-batches, ZeRO-3, buffer set to 0: 100 100 100
EXPECTED
