#!/usr/bin/env bash
# datasets 5.2.0, litdata 0.2.76, torch 2.13.0. All ranks read from the same source of a mixture in each step.
#
# Expected: sources that are mixed by probabilities are drawn by each rank for itself, so that the global batch has them in nearly
# the shares that were asked for, the more exactly the more ranks there are: of 16 rows at 50 %, mostly 4 to 12.
# Behaviour: the draws of `interleave_datasets(..., probabilities=)` and of litdata's CombinedStreamingDataset come from the seed
# alone. Every rank makes the same draws at the same step, whether sources are split by node before they are mixed or afterwards.
# With one row a rank each global batch is of one source altogether; with b rows a rank its shares scatter as those of b rows,
# however many ranks there are. A shuffle buffer behind the mixture has one seed as well and changes nothing. The rows are different
# ones, none is read twice, the shares of many steps are right, and nothing is reported. Another seed on each rank (sources split
# first, then mixed) is right. Workers of one rank draw apart in datasets, where it was reported (huggingface/datasets#7567).
# Who meets it: pre-training and fine-tuning on mixtures with long rows and few of them a rank. The loss jumps between sources,
# gradients are those of one source at a time, and statistics over the global batch, such as the load of experts, swing with it.
#
# Output of 2026-11-30 (two sources at 50 % each, 16 ranks with one row a step, 100 steps: batches of one source alone, lowest and
# highest share of the first source in a batch, its share of all):
#   datasets, split behind: 100 of 100, 0.00 to 1.00, 0.53
#   datasets, split before: 100 of 100, 0.00 to 1.00, 0.53
#   datasets, split behind, shuffled: 100 of 100, 0.00 to 1.00, 0.43
#   datasets, split before, a seed for each rank: 0 of 100, 0.31 to 0.81, 0.50
#   litdata: 100 of 100, 0.00 to 1.00, 0.50
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 litdata==0.2.76 2>/dev/null
cat >"$folder/mixed.py" <<'PYTHON'
import itertools
import os
import sys

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

ROWS, RANKS, STEPS = 4096, 16, 100


def source(kind):
    return datasets.Dataset.from_dict({"kind": [kind] * ROWS}).to_iterable_dataset(num_shards=RANKS)


def interleaved(sources, seed=42):
    return datasets.interleave_datasets(sources, probabilities=[0.5, 0.5], seed=seed)


def loaded(dataset):
    return (row["kind"] for row in torch.utils.data.DataLoader(dataset, batch_size=None))


def split_behind(rank, changed=lambda mixture: mixture):
    return loaded(split_dataset_by_node(changed(interleaved([source(1), source(0)])), rank, RANKS))


def split_before(rank, seed=42):
    return loaded(interleaved([split_dataset_by_node(source(kind), rank, RANKS) for kind in (1, 0)], seed))


def of_litdata(rank):
    os.environ.update(WORLD_SIZE=str(RANKS), GLOBAL_RANK=str(rank))
    parts = [StreamingDataset(f"{sys.argv[1]}/{kind}", shuffle=True) for kind in (1, 0)]
    mixed = CombinedStreamingDataset(parts, weights=[0.5, 0.5], iterate_over_all=False)
    return (int(row) for row in StreamingDataLoader(mixed, batch_size=1))


for kind in (1, 0):
    os.mkdir(f"{sys.argv[1]}/{kind}")
    writer = BinaryWriter(f"{sys.argv[1]}/{kind}", chunk_size=64)
    for row in range(ROWS):
        writer[row] = kind
    writer.done()
    writer.merge(1)
for name, reader in {
    "datasets, split behind": split_behind,
    "datasets, split before": split_before,
    "datasets, split behind, shuffled": lambda rank: split_behind(rank, lambda mixture: mixture.shuffle(7, buffer_size=100)),
    "datasets, split before, a seed for each rank": lambda rank: split_before(rank, 42 + rank),
    "litdata": of_litdata,
}.items():
    shares = torch.tensor([list(itertools.islice(reader(rank), STEPS)) for rank in range(RANKS)]).float().mean(0)
    alone = int(((shares == 0) | (shares == 1)).sum())
    print(f"{name}: {alone} of {STEPS}, {shares.min():.2f} to {shares.max():.2f}, {shares.mean():.2f}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/mixed.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
datasets, split behind: 100 of 100, 0.00 to 1.00, 0.53
datasets, split before: 100 of 100, 0.00 to 1.00, 0.53
datasets, split behind, shuffled: 100 of 100, 0.00 to 1.00, 0.43
datasets, split before, a seed for each rank: 0 of 100, 0.31 to 0.81, 0.50
litdata: 100 of 100, 0.00 to 1.00, 0.50
EXPECTED
