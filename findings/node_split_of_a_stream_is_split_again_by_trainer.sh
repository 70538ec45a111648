#!/usr/bin/env bash
# datasets 5.2.0, accelerate 1.15.0, transformers 5.24.0, torch 2.13.0. Trainer splits a stream again that is split by node.
#
# Expected: `split_dataset_by_node(stream, rank, world_size)`, which the documentation of datasets gives for distributed training,
# leaves each rank its part, and Trainer (or `Accelerator.prepare`) sees that this is done, or refuses it: together the ranks
# read every example once.
# Behaviour: accelerate deals the stream out again. By default rank 0 alone reads a stream and sends each rank a piece of its
# batches, so what is read is the part of rank 0: the parts of the other ranks are never opened. With `dispatch_batches=False`
# each rank keeps its share of its own part. Either way N ranks read one N-th of the data in a pass, an eighth on a node of eight
# GPUs. Trainer, which is told a number of steps, begins another pass, with the shards in another order: of as many steps as the
# data have, some examples are in several and others in none. Losses look as they should, and nothing is reported. Left alone,
# the stream is read whole.
# Who meets it: whoever moves a streaming loop of their own, in which the split is needed, to Trainer or accelerate. (Reported and
# open: huggingface/accelerate#3547 and #4199.)
#
# Output of 2026-11-30 (different examples that reached the ranks, of 96; one pass by Accelerator, steps for 96 by Trainer):
#   2 ranks, Accelerator: 96 as it is, 48 split by node
#   2 ranks, Accelerator(dispatch_batches=False): 96 as it is, 48 split by node
#   2 ranks, Trainer: 96 as it is, 78 split by node
#   4 ranks, Accelerator: 96 as it is, 24 split by node
#   4 ranks, Accelerator(dispatch_batches=False): 96 as it is, 24 split by node
#   4 ranks, Trainer: 96 as it is, 66 split by node
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 accelerate==1.15.0 transformers==5.24.0 2>/dev/null
cat >"$folder/ranks.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

EXAMPLES, BATCH = 96, 3
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def stream(split):
    whole = Dataset.from_dict({"number": range(EXAMPLES)}).to_iterable_dataset(num_shards=16)
    return split_dataset_by_node(whole, rank, ranks) if split else whole


class Seen(torch.nn.Module):
    """A model of one weight that notes the examples it is given."""

    def __init__(self):
        super().__init__()
        self.weight, self.numbers = torch.nn.Parameter(torch.zeros(1)), []

    def forward(self, number):
        self.numbers += number.tolist()
        return {"loss": (self.weight * number).sum()}


def by_accelerator(split, **loading):
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**loading))
    return [n for batch in accelerator.prepare(DataLoader(stream(split), batch_size=BATCH)) for n in batch["number"].tolist()]


def by_trainer(split, **length):
    AcceleratorState._reset_state()
    options = dict(use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no", learning_rate=0.0)
    model = Seen()
    arguments = TrainingArguments(sys.argv[1], per_device_train_batch_size=BATCH, **options, **length)
    Trainer(model, arguments, train_dataset=stream(split)).train()
    return model.numbers


def different(numbers):
    """How many examples have reached any rank."""
    of_ranks = [None] * ranks
    dist.all_gather_object(of_ranks, numbers)
    return len({number for part in of_ranks for number in part})


for name, read in (
    ("Accelerator", by_accelerator),
    ("Accelerator(dispatch_batches=False)", lambda split: by_accelerator(split, dispatch_batches=False)),
    ("Trainer", lambda split: by_trainer(split, max_steps=EXAMPLES // BATCH // ranks)),
):
    whole, parts = different(read(False)), different(read(True))
    if rank == 0:
        with open(f"{sys.argv[1]}/lines", "a") as file:
            file.write(f"{ranks} ranks, {name}: {whole} as it is, {parts} split by node\n")
dist.destroy_process_group()
PYTHON
for ranks in 2 4; do
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=$ranks "$folder/ranks.py" "$folder" >/dev/null 2>"$folder/errors"
done
cat "$folder/lines"
diff "$folder/lines" - <<'EXPECTED'
2 ranks, Accelerator: 96 as it is, 48 split by node
2 ranks, Accelerator(dispatch_batches=False): 96 as it is, 48 split by node
2 ranks, Trainer: 96 as it is, 78 split by node
4 ranks, Accelerator: 96 as it is, 24 split by node
4 ranks, Accelerator(dispatch_batches=False): 96 as it is, 24 split by node
4 ranks, Trainer: 96 as it is, 66 split by node
EXPECTED
