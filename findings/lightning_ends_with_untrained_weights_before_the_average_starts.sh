#!/usr/bin/env bash
# lightning 2.6.6, torch 2.13.0. With an average of weights that starts late, checkpoints and the end of a run hold
# the weights of before the training.
#
# Expected: `EMAWeightAveraging(update_starting_at_step=N)` leaves a run as it is until step N: a checkpoint before N
# has the weights trained so far in `state_dict`, and a run that ends before N, by its time limit or an early stop,
# has a trained model.
# Behaviour: the callback copies the model when the fit begins and counts that copy as the average, also while nothing
# has been averaged. Until N validation runs with the initial weights (that was reported), each checkpoint has them in
# `state_dict`, which is what `load_from_checkpoint`, evaluation and export read, and when the fit ends they are
# copied into the model in place of the trained ones, which are then nowhere but in earlier checkpoints, as
# `current_model_state`. A validation loss that never moves also ends a run by EarlyStopping, lowers the rate by
# ReduceLROnPlateau, and makes the first checkpoint the best. Nothing is reported. And always: a checkpoint that is
# saved by hand after the fit has the average for `current_model_state` too, so that a run extended from it leaves its
# own trajectory, with the moments of other weights. Averaging from the first step on is right: of the initial weights
# nothing is left after some thousand steps anyway.
# Who meets it: pre-training with an average over the decay or the end alone, short trial runs with the settings of a
# long one.
#
# Output of 2026-12-01 (60 steps of a regression, no averaging before step 30 or 100; losses on the same 64 rows):
#   no average: validated 2.10 0.40 0.11, model at the end 0.11
#     checkpoint step=20: state_dict 2.10
#     checkpoint step=60: state_dict 0.11
#     checkpoint end: state_dict 0.11
#   average from 30: validated 9.88 0.76 0.22, model at the end 0.22
#     checkpoint step=20: state_dict 9.88, current_model_state 2.10
#     checkpoint step=60: state_dict 0.22, current_model_state 0.11
#     checkpoint end: state_dict 0.22, current_model_state 0.22
#   average from 100: validated 9.88 9.88 9.88, model at the end 9.88
#     checkpoint step=20: state_dict 9.88, current_model_state 2.10
#     checkpoint step=60: state_dict 9.88, current_model_state 0.11
#     checkpoint end: state_dict 9.88, current_model_state 9.88
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 lightning==2.6.6 2>/dev/null
cat >"$folder/averaged.py" <<'PYTHON'
import sys

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH, STEPS, EVERY = 8, 60, 20
folder = sys.argv[1]


def rows(number, seed):
    return TensorDataset(torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed)))


def loss(weight, batch):
    return (batch @ weight.T - batch.sum(1, keepdim=True)).pow(2).mean()


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(WIDTH, 1, bias=False)
        self.validated = []

    def training_step(self, batch, _):
        return loss(self.layer.weight, batch[0])

    def validation_step(self, batch, _):
        self.validated.append(f"{loss(self.layer.weight, batch[0]):.2f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02)


def shown(weight):
    return f"{loss(weight, rows(64, 1).tensors[0]):.2f}"


def run(name, callbacks):
    model = Model()
    saving = ModelCheckpoint(folder, name + "-{step}", every_n_train_steps=EVERY, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        val_check_interval=EVERY,
        num_sanity_val_steps=0,
        callbacks=[*callbacks, saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(rows(4 * STEPS, 0), batch_size=4), DataLoader(rows(64, 1), batch_size=64))
    trainer.save_checkpoint(f"{folder}/{name}-end.ckpt")
    print(f"{name}: validated {' '.join(model.validated)}, model at the end {shown(model.layer.weight)}", flush=True)
    for at in (f"step={EVERY}", f"step={STEPS}", "end"):
        saved = torch.load(f"{folder}/{name}-{at}.ckpt", weights_only=False)
        keys = [key for key in ("state_dict", "current_model_state") if key in saved]
        texts = [f"{key} {shown(saved[key]['layer.weight'])}" for key in keys]
        print(f"  checkpoint {at}: {', '.join(texts)}", flush=True)


run("no average", [])
run("average from 30", [EMAWeightAveraging(decay=0.9, update_starting_at_step=30)])
run("average from 100", [EMAWeightAveraging(decay=0.9, update_starting_at_step=100)])
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/averaged.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
no average: validated 2.10 0.40 0.11, model at the end 0.11
  checkpoint step=20: state_dict 2.10
  checkpoint step=60: state_dict 0.11
  checkpoint end: state_dict 0.11
average from 30: validated 9.88 0.76 0.22, model at the end 0.22
  checkpoint step=20: state_dict 9.88, current_model_state 2.10
  checkpoint step=60: state_dict 0.22, current_model_state 0.11
  checkpoint end: state_dict 0.22, current_model_state 0.22
average from 100: validated 9.88 9.88 9.88, model at the end 9.88
  checkpoint step=20: state_dict 9.88, current_model_state 2.10
  checkpoint step=60: state_dict 9.88, current_model_state 0.11
  checkpoint end: state_dict 9.88, current_model_state 9.88
EXPECTED
