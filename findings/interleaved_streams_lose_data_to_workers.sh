#!/usr/bin/env bash
# datasets 5.2.0, torch 2.13.0. How much of two interleaved streams is read depends on the number of loader workers.
#
# Expected: `interleave_datasets` of two streams of equal length, in turn, ends when one is exhausted, so that both are read
# whole but for one example; workers of the DataLoader change the order and the speed, and nothing else.
# Behaviour: each worker gets some shards of each stream, interleaves those alone, and ends when one of its own is exhausted.
# Where the shards cannot be dealt out in one proportion (nine and three shards over two workers: five with two, four with one)
# every worker leaves the rest of its longer stream unread: 11 to 17 % of the data here. With "all_exhausted" nothing is lost,
# and the shorter part of each worker is repeated instead, so that the mixture is another than the one asked for. Nodes
# (`split_dataset_by_node`) multiply with workers. A stream of its own is read whole by any number of workers, and so are
# interleaved ones whose numbers of shards are multiples of workers x nodes.
# Who meets it: mixtures of streamed corpora; two runs that differ in `num_workers` or nodes alone have other data.
#
# Output of 2026-11-29 (examples read of 1200 and 1200, and read again; shards of both streams, workers x nodes):
#   9 and 3 shards, 0 x 1: first_exhausted 1200 and 1199, again 0; all_exhausted 1200 and 1200, again 0
#   9 and 3 shards, 2 x 1: first_exhausted 1067 and 1066, again 0; all_exhausted 1200 and 1200, again 265
#   9 and 3 shards, 3 x 1: first_exhausted 1200 and 1197, again 0; all_exhausted 1200 and 1200, again 0
#   12 and 8 shards, 0 x 1: first_exhausted 1200 and 1199, again 0; all_exhausted 1200 and 1200, again 0
#   12 and 8 shards, 8 x 1: first_exhausted 1000 and 996, again 0; all_exhausted 1200 and 1200, again 396
#   12 and 8 shards, 4 x 2: first_exhausted 1000 and 996, again 0; all_exhausted 1200 and 1200, again 396
#   9 shards alone, 2 x 1: 1200, again 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 2>/dev/null
cat >"$folder/streams.py" <<'PYTHON'
from collections import Counter

from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

EXAMPLES, SECOND = 1200, 10_000


def stream(first, shards):
    return Dataset.from_dict({"i": range(first, first + EXAMPLES)}).to_iterable_dataset(num_shards=shards)


def read(data, workers, nodes):
    counts = Counter()
    for node in range(nodes):
        part = split_dataset_by_node(data, node, nodes)
        counts.update(int(example["i"]) for example in DataLoader(part, batch_size=None, num_workers=workers))
    first = sum(at < SECOND for at in counts)
    return f"{first} and {len(counts) - first}, again {counts.total() - len(counts)}"


for shards, workers, nodes in (((9, 3), 0, 1), ((9, 3), 2, 1), ((9, 3), 3, 1), ((12, 8), 0, 1), ((12, 8), 8, 1), ((12, 8), 4, 2)):
    streams = [stream(0, shards[0]), stream(SECOND, shards[1])]
    ended = {
        how: read(interleave_datasets(streams, stopping_strategy=how), workers, nodes) for how in ("first_exhausted", "all_exhausted")
    }
    told = "; ".join(f"{how} {value}" for how, value in ended.items())
    print(f"{shards[0]} and {shards[1]} shards, {workers} x {nodes}: {told}")
alone = stream(0, 9)
print(f"9 shards alone, 2 x 1: {read(alone, 2, 1).replace(' and 0', '')}")
PYTHON
"$folder/venv/bin/python" "$folder/streams.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
9 and 3 shards, 0 x 1: first_exhausted 1200 and 1199, again 0; all_exhausted 1200 and 1200, again 0
9 and 3 shards, 2 x 1: first_exhausted 1067 and 1066, again 0; all_exhausted 1200 and 1200, again 265
9 and 3 shards, 3 x 1: first_exhausted 1200 and 1197, again 0; all_exhausted 1200 and 1200, again 0
12 and 8 shards, 0 x 1: first_exhausted 1200 and 1199, again 0; all_exhausted 1200 and 1200, again 0
12 and 8 shards, 8 x 1: first_exhausted 1000 and 996, again 0; all_exhausted 1200 and 1200, again 396
12 and 8 shards, 4 x 2: first_exhausted 1000 and 996, again 0; all_exhausted 1200 and 1200, again 396
9 shards alone, 2 x 1: 1200, again 0
EXPECTED
