#!/usr/bin/env bash
# transformers 5.24.0, tokenizers 0.23.3, torchtitan 0.3.0. tokenizer.json keeps the truncation of the last call, and cuts documents.
#
# Expected: `truncation=True, max_length=8` are arguments of one call; a tokenizer that is saved afterwards is the tokenizer
# that was loaded, and a document of forty words has forty tokens in whatever reads the file.
# Behaviour: transformers sets truncation and padding in the tokenizer's Rust object for a call and leaves them there, and
# `save_pretrained` writes them into tokenizer.json. transformers itself never shows it, since each of its calls sets them anew.
# Programs that read the file with the library `tokenizers` (torchtitan does for pre-training) cut every document at the length
# of that last call, and fill up shorter ones with the padding token, which is trained on. No length, loss or message tells. A call
# without the arguments before saving takes them out again; whichever call came last decides. Trainer saves the tokenizer with each
# checkpoint (`processing_class`), after the calls that have tokenized its examples.
# Who meets it: pre-training that goes on, in another program, with the tokenizer of a fine-tuned or newly made checkpoint.
#
# Output of 2026-11-29 (tokens of documents of 40 words and of 3; in transformers, and in torchtitan):
#   saved as made: transformers 40 and 3, torchtitan 40 and 3, padding 0
#   saved after a call with truncation and padding: transformers 40 and 3, torchtitan 8 and 8, padding 5
#   saved after one more call, without: transformers 40 and 3, torchtitan 40 and 3, padding 0
#   saved with a checkpoint of Trainer: transformers 40 and 3, torchtitan 8 and 8, padding 5
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 transformers==5.24.0 tokenizers==0.23.3 accelerate==1.15.0 tyro==1.0.17 2>/dev/null
"$folder/venv/bin/pip" install --quiet --no-deps torchtitan==0.3.0 spmd_types==0.2.3 2>/dev/null
cat >"$folder/saved.py" <<'PYTHON'
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer, TrainingArguments

PADDING = 0
LONG, SHORT = "word " * 40, "word " * 3
CUT = {"truncation": True, "max_length": 8, "padding": "max_length"}


def made():
    words = Tokenizer(models.WordLevel({"[PAD]": PADDING, "word": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def shown(how, path):
    here, there = AutoTokenizer.from_pretrained(path), HuggingFaceTokenizer(tokenizer_path=path)
    own = " and ".join(str(len(here(text)["input_ids"])) for text in (LONG, SHORT))
    long, short = (there.encode(text, add_bos=False, add_eos=False) for text in (LONG, SHORT))
    print(f"{how}: transformers {own}, torchtitan {len(long)} and {len(short)}, padding {short.count(PADDING)}")


def saved(how, tokenizer):
    tokenizer.save_pretrained(f"{sys.argv[1]}/{how}")
    shown(how, f"{sys.argv[1]}/{how}")


saved("saved as made", made())
tokenizer = made()
tokenizer(LONG, **CUT)
saved("saved after a call with truncation and padding", tokenizer)
tokenizer(LONG)
saved("saved after one more call, without", tokenizer)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, input_ids, attention_mask, labels):
        return {"loss": (self.weight * input_ids).mean()}


tokenizer = made()
rows = [{"input_ids": tokenizer(text, **CUT)["input_ids"], "labels": 0} for text in (LONG, SHORT)]
options = {"max_steps": 1, "save_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
arguments = TrainingArguments(f"{sys.argv[1]}/run", per_device_train_batch_size=2, **options)
Trainer(Model(), arguments, train_dataset=rows, processing_class=tokenizer).train()
shown("saved with a checkpoint of Trainer", f"{sys.argv[1]}/run/checkpoint-1")
PYTHON
"$folder/venv/bin/python" "$folder/saved.py" "$folder" 2>/dev/null | grep ^saved | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
saved as made: transformers 40 and 3, torchtitan 40 and 3, padding 0
saved after a call with truncation and padding: transformers 40 and 3, torchtitan 8 and 8, padding 5
saved after one more call, without: transformers 40 and 3, torchtitan 40 and 3, padding 0
saved with a checkpoint of Trainer: transformers 40 and 3, torchtitan 8 and 8, padding 5
EXPECTED
