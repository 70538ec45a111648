#!/usr/bin/env bash
# datasets 5.2.0, accelerate 1.15.0, torch 2.13.0. `set_epoch` shuffles the shards of a stream that nobody asked to be shuffled.
#
# Expected: a streamed dataset without `shuffle()` has one order, that of its shards; `set_epoch`, which Trainer and accelerate
# call by themselves, changes the seed of `shuffle()` where there is one.
# Behaviour: epoch 0 has the order of the shards, and every later epoch another one, also without `shuffle()`. An index that is
# counted while reading (`with_indices=True`) is then of another example: a split by it (every tenth example is the test set) holds
# out other examples in each epoch but the first, so tests are trained on, unless each shard is a multiple of ten. Labels that
# are looked up by the index are those of other examples. Data sorted by time, length or difficulty are sorted in epoch 0 alone.
# accelerate counts each pass over a loader as an epoch, so a second evaluation comes in another order than the first: predictions
# that are compared with references in the order of the files are wrong, and "the first hundred batches" are others. `take` and
# `skip` keep the order, and so does a stream of one shard. Nothing is reported. Release 4.4.1 keeps the order in each epoch.
# Who meets it: streams read more than once: training on a small corpus, and evaluation in the course of training.
#
# Output of 2026-11-30 (8 shards of 123 examples; epochs, or passes over the loader, 0 to 3):
#   in the order of the files: True False False False
#   training examples (all but each tenth): 885 885 885 885, of the test set among them: 0 87 99 63
#   examples that keep the label looked up by their index: 984 123 0 369
#   evaluation by accelerate, predictions equal to references in order: 984 123 0 369
#   one shard, in the order of the file: True True True True
#   take(984), in the order of the files: True True True True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 accelerate==1.15.0 2>/dev/null
cat >"$folder/epochs.py" <<'PYTHON'
from accelerate import Accelerator
from datasets import Dataset
from torch.utils.data import DataLoader

SHARDS, EACH, EPOCHS = 8, 123, range(4)
NUMBERS = list(range(SHARDS * EACH))


def stream(shards=SHARDS):
    return Dataset.from_dict({"number": NUMBERS}).to_iterable_dataset(num_shards=shards)


def read(data, epoch):
    data.set_epoch(epoch)
    return list(data)


def numbers(data, epoch):
    return [example["number"] for example in read(data, epoch)]


def told(name, values):
    print(f"{name}: {' '.join(str(value) for value in values)}")


told("in the order of the files", (numbers(stream(), epoch) == NUMBERS for epoch in EPOCHS))

test = set(numbers(stream().filter(lambda example, at: at % 10 == 0, with_indices=True), 0))
training = stream().filter(lambda example, at: at % 10 != 0, with_indices=True)
parts = [numbers(training, epoch) for epoch in EPOCHS]
held = " ".join(str(len(test.intersection(part))) for part in parts)
print(f"training examples (all but each tenth): {' '.join(str(len(part)) for part in parts)}, of the test set among them: {held}")

labels = [f"label of {number}" for number in NUMBERS]
labelled = stream().map(lambda example, at: {"label": labels[at]}, with_indices=True)
kept = (sum(e["label"] == f"label of {e['number']}" for e in read(labelled, epoch)) for epoch in EPOCHS)
told("examples that keep the label looked up by their index", kept)

loader = Accelerator(cpu=True).prepare(DataLoader(stream(), batch_size=6))
agreeing = []
for _ in EPOCHS:
    predictions = [int(number) for batch in loader for number in batch["number"]]
    agreeing.append(sum(one == other for one, other in zip(predictions, NUMBERS, strict=True)))
told("evaluation by accelerate, predictions equal to references in order", agreeing)

told("one shard, in the order of the file", (numbers(stream(1), epoch) == NUMBERS for epoch in EPOCHS))
told(f"take({len(NUMBERS)}), in the order of the files", (numbers(stream().take(len(NUMBERS)), epoch) == NUMBERS for epoch in EPOCHS))
PYTHON
"$folder/venv/bin/python" "$folder/epochs.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
in the order of the files: True False False False
training examples (all but each tenth): 885 885 885 885, of the test set among them: 0 87 99 63
examples that keep the label looked up by their index: 984 123 0 369
evaluation by accelerate, predictions equal to references in order: 984 123 0 369
one shard, in the order of the file: True True True True
take(984), in the order of the files: True True True True
EXPECTED
