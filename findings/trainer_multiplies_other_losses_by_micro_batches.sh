#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0. Trainer multiplies most losses but those of causal LMs by micro-batches and ranks.
#
# Expected: `gradient_accumulation_steps` is a matter of memory: the same rows have the same loss and gradient in one piece and
# in several.
# Behaviour: Trainer leaves the division to the model if the model's `forward` takes `**kwargs`, which is where the number of
# targets of the whole batch is passed. In transformers 5 nearly every `forward` does, and few read it: classifiers of sequences
# and of tokens, regression, masked language models (BERT) and encoder-decoders (T5, BART) return the mean of their micro-batch.
# So nobody divides: the gradients of m micro-batches are added in full, and the logged loss and gradient norm are m times too
# large; over ranks the same factor comes again. AdamW hides most of it (its steps do not depend on the scale), but clipping, at
# a norm of 1 by default, does not. Causal LMs are right.
# Who meets it: fine-tuning of classifiers, reward models and encoders by Trainer with accumulation or on several GPUs. Setting
# `model.accepts_loss_kwargs = False` before the Trainer is made has it divided. (Reported and open:
# huggingface/transformers#47688.)
#
# Output of 2026-11-29 (ranks x micro-batches of the same eight rows; norm of the gradient and logged loss over those of 1 x 1):
#   BertForMaskedLM, 1 x 4: gradient x 4.00, loss x 4.00
#   BertForMaskedLM, 2 x 4: gradient x 8.00, loss x 8.00
#   BertForMaskedLM, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
#   LlamaForCausalLM, 1 x 4: gradient x 1.00, loss x 1.00
#   LlamaForCausalLM, 2 x 4: gradient x 1.00, loss x 1.00
#   LlamaForCausalLM, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
#   LlamaForSequenceClassification, 1 x 4: gradient x 4.00, loss x 4.00
#   LlamaForSequenceClassification, 2 x 4: gradient x 8.00, loss x 8.00
#   LlamaForSequenceClassification, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
#   LlamaForSequenceClassification of one value, 1 x 4: gradient x 4.00, loss x 4.00
#   LlamaForSequenceClassification of one value, 2 x 4: gradient x 8.00, loss x 8.00
#   LlamaForSequenceClassification of one value, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
#   LlamaForTokenClassification, 1 x 4: gradient x 4.00, loss x 4.00
#   LlamaForTokenClassification, 2 x 4: gradient x 8.00, loss x 8.00
#   LlamaForTokenClassification, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
#   T5ForConditionalGeneration, 1 x 4: gradient x 4.00, loss x 4.00
#   T5ForConditionalGeneration, 2 x 4: gradient x 8.00, loss x 8.00
#   T5ForConditionalGeneration, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 numpy==2.2.6 2>/dev/null
cat >"$folder/heads.py" <<'PYTHON'
import sys
from pathlib import Path

import torch
import transformers
from transformers import BertConfig, LlamaConfig, T5Config, Trainer, TrainerCallback, TrainingArguments

ROWS, MICRO_BATCHES = 8, 4
folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
exact = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
tokens = torch.arange(1, 9)
llama, classes = LlamaConfig(**sizes, pad_token_id=0), LlamaConfig(**sizes, pad_token_id=0, num_labels=3, classifier_dropout=0.0)
value = LlamaConfig(**sizes, pad_token_id=0, num_labels=1)
t5 = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
HEADS = [
    ("LlamaForCausalLM", llama, tokens),
    ("LlamaForSequenceClassification", classes, torch.tensor(1)),
    ("LlamaForSequenceClassification", value, torch.tensor(1.0)),
    ("LlamaForTokenClassification", classes, tokens % 3),
    ("BertForMaskedLM", BertConfig(**sizes, **exact), tokens),
    ("T5ForConditionalGeneration", t5, tokens),
]


class Seen(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()


def trained(name, config, labels, micro_batches, told=True):
    """Norm of the gradient and logged loss of the first step."""
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).float()
    if not told:
        model.accepts_loss_kwargs = False
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=1,
        per_device_train_batch_size=ROWS // ranks // micro_batches,
        gradient_accumulation_steps=micro_batches,
        max_grad_norm=0.0,
        logging_steps=1,
        use_cpu=True,
        ddp_backend="gloo",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    seen = Seen()
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": tokens, "labels": labels}] * ROWS, callbacks=[seen])
    trainer.train()
    return seen.norm, trainer.state.log_history[0]["loss"], arguments.process_index


cases = {1: [(1, True), (MICRO_BATCHES, True)], 2: [(MICRO_BATCHES, True), (MICRO_BATCHES, False)]}[ranks]
for name, config, labels in HEADS:
    kind = name + (" of one value" if config.num_labels == 1 else "")
    for micro_batches, told in cases:
        norm, loss, rank = trained(name, config, labels, micro_batches, told)
        if (ranks, micro_batches) == (1, 1):
            torch.save((norm, loss), folder / kind)
        elif rank == 0:
            norm_of_one, loss_of_one = torch.load(folder / kind)
            set_false = "" if told else ", accepts_loss_kwargs=False"
            with (folder / "lines").open("a") as file:
                line = f"gradient x {norm / norm_of_one:.2f}, loss x {loss / loss_of_one:.2f}"
                file.write(f"{kind}, {ranks} x {micro_batches}{set_false}: {line}\n")
PYTHON
for ranks in 1 2; do
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=$ranks "$folder/heads.py" "$folder" $ranks >"$folder/log" 2>&1
done
sort -s -t, -k1,1 "$folder/lines" | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
BertForMaskedLM, 1 x 4: gradient x 4.00, loss x 4.00
BertForMaskedLM, 2 x 4: gradient x 8.00, loss x 8.00
BertForMaskedLM, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
LlamaForCausalLM, 1 x 4: gradient x 1.00, loss x 1.00
LlamaForCausalLM, 2 x 4: gradient x 1.00, loss x 1.00
LlamaForCausalLM, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
LlamaForSequenceClassification, 1 x 4: gradient x 4.00, loss x 4.00
LlamaForSequenceClassification, 2 x 4: gradient x 8.00, loss x 8.00
LlamaForSequenceClassification, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
LlamaForSequenceClassification of one value, 1 x 4: gradient x 4.00, loss x 4.00
LlamaForSequenceClassification of one value, 2 x 4: gradient x 8.00, loss x 8.00
LlamaForSequenceClassification of one value, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
LlamaForTokenClassification, 1 x 4: gradient x 4.00, loss x 4.00
LlamaForTokenClassification, 2 x 4: gradient x 8.00, loss x 8.00
LlamaForTokenClassification, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
T5ForConditionalGeneration, 1 x 4: gradient x 4.00, loss x 4.00
T5ForConditionalGeneration, 2 x 4: gradient x 8.00, loss x 8.00
T5ForConditionalGeneration, 2 x 4, accepts_loss_kwargs=False: gradient x 1.00, loss x 1.00
EXPECTED
