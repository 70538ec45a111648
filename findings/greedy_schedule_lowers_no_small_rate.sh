#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. The Trainer's greedy schedule only raises the learning rates of language models.
#
# Expected: `lr_scheduler_type="greedy"` raises the rate while the held-out loss falls and lowers it when the loss
# stands still or rises, as its text says, around the rate that was asked for; a floor that is above that rate is
# refused or lifts the rate to it.
# Behaviour: its floor `min_lr` is 0.001 where none is given, which is above the Trainer's own rate and nearly all of
# those that language models are trained or fine-tuned with, and its ceiling is 1. Lowering takes the greater of the
# lowered rate and the floor, which is above the rate as it is, and a change that is no decrease is dropped. Raising has
# no such limit. So a rate below the floor goes up with each run of good evaluations and never down, however bad the
# loss becomes, until it has passed the floor. Nothing is reported, and the log, a rate that waits or grows, looks as if
# the schedule were content. `min_lr=0` is right, from the first step on: given to a resumed run it does nothing, since
# the schedule's state has the floor in it and is loaded over the settings. `reduce_lr_on_plateau` has a floor of 0.
# Who meets it: fine-tuning with this schedule by `lr_scheduler_type` alone, which asks for an evaluation strategy and
# nothing else.
#
# Output of 2026-12-01 (150 evaluations; loss of held-out rows that are those of training, so that it falls, or others):
#   greedy, loss falls: 0.0005 raised 13 times, lowered 0
#   greedy, loss rises: 0.0005 raised 0 times, lowered 0
#   greedy, min_lr 0.0, resumed with that, loss rises: 0.0005 raised 0 times, lowered 0
#   greedy, min_lr 0.0, loss rises: 0.0005 raised 0 times, lowered 13
#   greedy, loss rises: 0.005 raised 0 times, lowered 13
#   reduce_lr_on_plateau, factor 0.95, loss rises: 0.0005 raised 0 times, lowered 13
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 2>/dev/null
cat >"$folder/rates.py" <<'PYTHON'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

WORDS, STEPS = 64, 300
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=WORDS, num_key_value_heads=4, **shape)
rows = torch.randint(0, WORDS, (16, 32), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in rows]  # by chance: nothing to learn but the rows


def run(rate, held_out, schedule="greedy", resumed=None, **settings):
    set_seed(0)
    arguments = TrainingArguments(
        sys.argv[1],
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=STEPS // 2,
        logging_steps=2,
        per_device_train_batch_size=8,
        learning_rate=rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=settings,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows[:8], eval_dataset=held_out)
    trainer.train(resume_from_checkpoint=resumed)
    history = trainer.state.log_history
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    losses = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    loss = "falls" if losses[-1] < losses[0] else "rises"
    changes = [new - old for old, new in zip(rates, rates[1:])]
    times = f"raised {sum(change > 0 for change in changes)} times, lowered {sum(change < 0 for change in changes)}"
    said = "".join(f", {name} {value}" for name, value in settings.items())
    name = f"{schedule}{said}{', resumed with that' if resumed else ''}"
    print(f"{name}, loss {loss}: {rate:g} {times}", flush=True)


run(5e-4, rows[:8])
run(5e-4, rows[8:])
run(5e-4, rows[8:], min_lr=0.0, resumed=f"{sys.argv[1]}/checkpoint-{STEPS // 2}")
run(5e-4, rows[8:], min_lr=0.0)
run(5e-3, rows[8:])
run(5e-4, rows[8:], "reduce_lr_on_plateau", factor=0.95)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/rates.py" "$folder/run" 2>/dev/null >"$folder/told"
grep -E '^(greedy|reduce)' "$folder/told" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
greedy, loss falls: 0.0005 raised 13 times, lowered 0
greedy, loss rises: 0.0005 raised 0 times, lowered 0
greedy, min_lr 0.0, resumed with that, loss rises: 0.0005 raised 0 times, lowered 0
greedy, min_lr 0.0, loss rises: 0.0005 raised 0 times, lowered 13
greedy, loss rises: 0.005 raised 0 times, lowered 13
reduce_lr_on_plateau, factor 0.95, loss rises: 0.0005 raised 0 times, lowered 13
EXPECTED
