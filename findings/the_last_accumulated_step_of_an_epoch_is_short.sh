#!/usr/bin/env bash
# lightning 2.6.6, accelerate 1.15.0, transformers 5.24.0, torch 2.13.0. The last step of an epoch has a part of its gradient.
#
# Expected: where the batches of an epoch are no multiple of the accumulation, the last step has fewer micro-batches and the
# mean of those, or waits for those of the next epoch.
# Behaviour: Lightning (`accumulate_grad_batches`) and accelerate (`accumulate`) divide each loss by the full number of
# micro-batches before they know how many will come, and step at the end of the data nevertheless: two of eight left over give a
# quarter of their gradient. For SGD that is a quarter of the learning rate; for AdamW, whose step hardly depends on the scale,
# a whole step on an eighth of the rows, and a second moment that is sixteen times too small. Trainer, on accelerate, counts the
# micro-batches first and is right.
# Who meets it: fine-tuning on small sets, where an epoch has few steps; the gradient norm in the log falls once an epoch.
#
# Output of 2026-11-29 (ten batches, each with a gradient of 1; accumulation of 4 and of 8):
#   Lightning, gradients of the steps: 4 [1.0, 1.0, 0.5], 8 [1.0, 0.25]
#   accelerate, gradients of the steps: 4 [1.0, 1.0, 0.5], 8 [1.0, 0.25]
#   Trainer, gradients of the steps: 4 [1.0, 1.0, 1.0], 8 [1.0, 1.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0 2>/dev/null
cat >"$folder/epoch.py" <<'PYTHON'
import sys

import lightning
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

BATCHES = torch.ones(10, 1)


class Mean(torch.nn.Module):
    """Its loss is the mean of weight times input, so that the gradient of a batch of ones is 1."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return {"loss": (self.weight * x).mean()}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.mean, self.seen = Mean(), []

    def training_step(self, batch, at):
        return self.mean(batch)["loss"]

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.mean.weight.grad.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def with_lightning(accumulation):
    module = Module()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=accumulation, accelerator="cpu", **quiet)
    trainer.fit(module, DataLoader(BATCHES, batch_size=1))
    return module.seen


def with_accelerate(accumulation):
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
    mean = Mean()
    model, optimizer, loader = accelerator.prepare(
        mean, torch.optim.SGD(mean.parameters(), lr=0.0), DataLoader(BATCHES, batch_size=1)
    )
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch)["loss"])
            if accelerator.sync_gradients:
                seen.append(mean.weight.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return seen


class Seen(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps = [*getattr(self, "steps", []), model.weight.grad.item()]


def with_trainer(accumulation):
    arguments = TrainingArguments(
        sys.argv[1],
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        learning_rate=0.0,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    seen = Seen()
    Trainer(Mean(), arguments, train_dataset=[{"x": row} for row in BATCHES], callbacks=[seen]).train()
    return seen.steps


for name, run in (("Lightning", with_lightning), ("accelerate", with_accelerate), ("Trainer", with_trainer)):
    of_4, of_8 = ([round(gradient, 3) for gradient in run(accumulation)] for accumulation in (4, 8))
    print(f"{name}, gradients of the steps: 4 {of_4}, 8 {of_8}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/epoch.py" "$folder/run" 2>/dev/null | grep gradients | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
Lightning, gradients of the steps: 4 [1.0, 1.0, 0.5], 8 [1.0, 0.25]
accelerate, gradients of the steps: 4 [1.0, 1.0, 0.5], 8 [1.0, 0.25]
Trainer, gradients of the steps: 4 [1.0, 1.0, 1.0], 8 [1.0, 1.0]
EXPECTED
