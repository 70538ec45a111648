#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0. A run that asks for a second epoch reads other data from its first sample on.
#
# Expected: the order follows from data and seed. A run of two epochs begins with the epoch of a run of one, so that a finished
# run is resumed with more iterations (samples consumed so far are skipped) and reads the second epoch; each epoch has every
# token once.
# Behaviour: `GPTDataset` repeats the list of documents as often as the run needs it and shuffles that list as one. There are no
# epochs in it: half-way through two of them a quarter of the tokens has been read twice and a quarter not once. A run of one
# epoch that goes on for another therefore ends with a quarter of its tokens read once and a quarter three times, and a run from
# a half to one and a half epochs never meets an eighth of its data. Nothing is reported. Only where the last epoch is needed to
# less than four fifths is it shuffled on its own, and only then is the first epoch of two the one that a shorter run has.
# Who meets it: whoever extends a run by `--train-iters`, or takes "one epoch" of a longer run for all data. 0.19.2 has the same
# lines.
#
# Output of 2026-11-29 (share of tokens read 0, 1, 2, 3 times; lengths of runs in epochs):
#   run of 1: 0.00 1.00 0.00 0.00
#   run of 2, its first half: 0.26 0.49 0.26 0.00
#   run of 2: 0.00 0.00 1.00 0.00
#   run of 1, resumed to 2: 0.00 0.26 0.49 0.26
#   run of 1.5: 0.00 0.50 0.50 0.00
#   run of 0.5, resumed to 1.5: 0.13 0.37 0.38 0.13
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 megatron-core==0.16.1 2>/dev/null
cat >"$folder/epochs.py" <<'PYTHON'
import sys
import types

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

path, documents, length = sys.argv[1], 2000, 64
lengths = np.random.default_rng(0).integers(20, 200, documents)
tokens = int(lengths.sum())
builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
for end, size in zip(lengths.cumsum(), lengths):  # every token of the data has a number of its own
    builder.add_document(torch.arange(end - size, end, dtype=torch.int32), [size])
builder.finalize(f"{path}.idx")
end_of_document = types.SimpleNamespace(eod=tokens, pad=tokens, vocab_size=tokens + 1, unique_identifiers={})


def dataset(samples):
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=length,
        blend=([path], None),
        split="1,0,0",
        tokenizer=end_of_document,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, (samples, 0, 0), lambda: True, config).build()[0]


def reads(data, first, last):
    """How often samples first to last - 1 have each token."""
    counts = np.zeros(tokens, int)
    for at in range(first, last):
        np.add.at(counts, data[at]["tokens"].numpy(), 1)
    return counts


def told(what, counts):
    print(f"{what}: {' '.join(f'{(counts == times).mean():.2f}' for times in range(4))}")


epoch = (tokens - 1) // length
short, long = dataset(epoch), dataset(2 * epoch)
once = reads(short, 0, epoch)
told("run of 1", once)
told("run of 2, its first half", reads(long, 0, epoch))
told("run of 2", reads(long, 0, 2 * epoch))
told("run of 1, resumed to 2", once + reads(long, epoch, 2 * epoch))
half, middle = epoch // 2, dataset(epoch + epoch // 2)
told("run of 1.5", reads(middle, 0, epoch + half))
told("run of 0.5, resumed to 1.5", reads(dataset(half), 0, half) + reads(middle, half, epoch + half))
PYTHON
"$folder/venv/bin/python" "$folder/epochs.py" "$folder/data" 2>/dev/null | grep '^run of' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
run of 1: 0.00 1.00 0.00 0.00
run of 2, its first half: 0.26 0.49 0.26 0.00
run of 2: 0.00 0.00 1.00 0.00
run of 1, resumed to 2: 0.00 0.26 0.49 0.26
run of 1.5: 0.00 0.50 0.50 0.00
run of 0.5, resumed to 1.5: 0.13 0.37 0.38 0.13
EXPECTED
