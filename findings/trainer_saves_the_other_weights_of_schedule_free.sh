#!/usr/bin/env bash
# transformers 5.24.0, schedulefree 1.4.1, torch 2.13.0. The Trainer saves other weights than it measures.
#
# Expected: with `optim="schedule_free_adamw"` the model that `save_model` writes, and that of each checkpoint, is the
# average x, which schedule-free methods train for and `evaluate` measures, since the Trainer calls the optimizer's
# `train` and `eval` itself.
# Behaviour: it calls `train` in each training step, `eval` in its evaluation loop, and neither when it saves. A file
# has x only if an evaluation came between the last training step and it. Otherwise it has the point y at which
# gradients are taken, a tenth of the way from the average to the newest iterate and as noisy as that tenth. So `train`,
# `save_model`, `evaluate`, the order of the usual scripts, measures one model and leaves another on the disk; a run
# that saves and evaluates in different steps has checkpoints of both kinds; and a run without held-out data has y
# alone. Nothing is reported. A resumed run is right either way, as the optimizer's state tells which of the two the
# weights are. schedulefree's own text asks for `eval` before a checkpoint. `trainer.optimizer.eval()` before
# `save_model`, and evaluations in all steps that save, are right.
# Who meets it: whoever trains by a schedule-free optimizer of the Trainer and then publishes, compares or merges what
# was saved.
#
# Output of 2026-12-01 (what the file holds; held-out loss of the file's model beside that which `evaluate` gives):
#   schedule_free_adamw, train, save, evaluate: other weights, loss +0.02
#   schedule_free_radam, train, save, evaluate: other weights, loss +0.02
#   schedule_free_sgd, train, save, evaluate: other weights, loss +0.02
#   schedule_free_adamw, train, evaluate, save: the average
#   schedule_free_adamw, train, optimizer.eval(), save: the average
#   schedule_free_adamw, saved every 200 steps, evaluated every 100: the average and the average
#   schedule_free_adamw, saved every 200 steps, evaluated every 150: other weights and the average
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
"$folder/venv/bin/pip" install --quiet transformers==5.24.0 accelerate==1.15.0 schedulefree==1.4.1 2>/dev/null
cat >"$folder/saved.py" <<'PYTHON'
import sys

import safetensors.torch
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

TOKENS, STEPS = 64, 400
RATES = {"schedule_free_adamw": 0.01, "schedule_free_radam": 0.03, "schedule_free_sgd": 3.0}
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=TOKENS, num_key_value_heads=4, **shape)
chances = torch.rand(TOKENS, TOKENS, generator=torch.Generator().manual_seed(0)) ** 12


def rows(count, seed):
    """Sequences of a chain in which each token follows the one before it with chances of its own."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, TOKENS, (count, 1), generator=generator)
    for _ in range(31):
        following = torch.multinomial(chances[tokens[:, -1]], 1, generator=generator)
        tokens = torch.cat([tokens, following], 1)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model, **settings):
    common = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_eval_batch_size": 64}
    arguments = TrainingArguments(f"{sys.argv[1]}/run", logging_strategy="no", **common, **settings)
    return Trainer(model=model, args=arguments, train_dataset=learned, eval_dataset=held_out)


def trained(optimizer, **settings):
    set_seed(0)
    made = trainer(
        LlamaForCausalLM(config),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        optim=optimizer,
        learning_rate=RATES[optimizer],
        warmup_steps=50,
        lr_scheduler_type="constant_with_warmup",
        **settings,
    )
    made.train()
    return made


def kind(path, made):
    """Whether the weights in a file are the average, of which the run's model is a copy after `eval`."""
    made.optimizer.eval()
    model = made.model.state_dict()
    file = safetensors.torch.load_file(f"{path}/model.safetensors")
    return "the average" if all(torch.equal(file[name], model[name]) for name in file) else "other weights"


learned, held_out = rows(2000, 1), rows(256, 2)
path = f"{sys.argv[1]}/saved"
for optimizer in RATES:
    made = trained(optimizer, save_strategy="no")
    made.save_model(path)
    measured = made.evaluate()["eval_loss"]
    found = trainer(LlamaForCausalLM.from_pretrained(path)).evaluate()["eval_loss"]
    loss = "the same" if abs(found - measured) < 1e-4 else f"{found - measured:+.2f}"
    print(f"{optimizer}, train, save, evaluate: {kind(path, made)}, loss {loss}", flush=True)
made = trained("schedule_free_adamw", save_strategy="no")
made.evaluate()
made.save_model(path)
print(f"schedule_free_adamw, train, evaluate, save: {kind(path, made)}", flush=True)
made = trained("schedule_free_adamw", save_strategy="no")
made.optimizer.eval()
made.save_model(path)
print(f"schedule_free_adamw, train, optimizer.eval(), save: {kind(path, made)}", flush=True)
for every in (100, 150):
    steps = {"save_strategy": "steps", "save_steps": 200, "eval_strategy": "steps", "eval_steps": every}
    made = trained("schedule_free_adamw", **steps)
    modes = []
    for step in (200, 400):
        state = torch.load(f"{sys.argv[1]}/run/checkpoint-{step}/optimizer.pt")
        modes.append("other weights" if state["param_groups"][0]["train_mode"] else "the average")
    assert modes[1] == kind(f"{sys.argv[1]}/run/checkpoint-{STEPS}", made)
    print(f"schedule_free_adamw, saved every 200 steps, evaluated every {every}: {' and '.join(modes)}", flush=True)
PYTHON
OMP_NUM_THREADS=1 "$folder/venv/bin/python" "$folder/saved.py" "$folder" 2>/dev/null >"$folder/told"
grep '^schedule_free' "$folder/told" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
schedule_free_adamw, train, save, evaluate: other weights, loss +0.02
schedule_free_radam, train, save, evaluate: other weights, loss +0.02
schedule_free_sgd, train, save, evaluate: other weights, loss +0.02
schedule_free_adamw, train, evaluate, save: the average
schedule_free_adamw, train, optimizer.eval(), save: the average
schedule_free_adamw, saved every 200 steps, evaluated every 100: the average and the average
schedule_free_adamw, saved every 200 steps, evaluated every 150: other weights and the average
EXPECTED
