#!/usr/bin/env bash
# datasets 5.2.0, torch 2.13.0. `take(n)` and `skip(n)` of a stream are other examples with other workers: tests are trained on.
#
# Expected: `stream.take(100)` is the stream's first hundred examples and `stream.skip(100)` is the rest, as the documentation
# says, so that a test set and a training set made of them have nothing in common; workers and nodes read shares of either.
# Behaviour: each of w readers (workers, or nodes of `split_dataset_by_node`) gets some shards and takes or skips the first n/w of
# its own. So which examples they are depends on the number of readers. Each pair is whole and disjoint as long as both have the
# same readers; a test set is read by other workers than training is, or in the main process, and then (w-1)/w of it is in the
# training data as well: 87 of 100 examples on eight nodes. As many examples are in neither. A test loss of two runs on
# another number of nodes is one of other examples. If the nodes are split first, every worker takes and skips n by itself: 200
# examples a node with two workers. A stream of one shard is right, and so is a split by shards or files. Nothing is reported.
# Who meets it: held-out sets of streamed corpora, and cuts such as "the first million" of them.
#
# Output of 2026-11-29 (test = take(100), read in the main process; training = skip(100) of 1200 examples by the readers):
#   shards 1, workers 0, nodes 1: test 100, training 1100, in both 0, in neither 0
#   shards 8, workers 0, nodes 1: test 100, training 1100, in both 0, in neither 0
#   shards 8, workers 2, nodes 1: test 100, training 1100, in both 50, in neither 50
#   shards 8, workers 4, nodes 1: test 100, training 1100, in both 75, in neither 75
#   shards 8, workers 0, nodes 8: test 100, training 1100, in both 87, in neither 87
#   split by two nodes, then take(100): 100 and 100 with no workers, 200 and 200 with two
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 2>/dev/null
cat >"$folder/parts.py" <<'PYTHON'
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader

EXAMPLES, TEST = 1200, 100


def stream(shards):
    return Dataset.from_dict({"i": range(EXAMPLES)}).to_iterable_dataset(num_shards=shards)


def read(part, workers):
    return [int(example["i"]) for example in DataLoader(part, batch_size=None, num_workers=workers)]


for shards, workers, nodes in ((1, 0, 1), (8, 0, 1), (8, 2, 1), (8, 4, 1), (8, 0, 8)):
    test = set(read(stream(shards).take(TEST), workers=0))
    training = set()
    for node in range(nodes):
        training.update(read(split_dataset_by_node(stream(shards).skip(TEST), node, nodes), workers))
    counts = f"test {len(test)}, training {len(training)}, in both {len(test & training)}, in neither {EXAMPLES - len(test | training)}"
    print(f"shards {shards}, workers {workers}, nodes {nodes}: {counts}")
counts = {
    workers: " and ".join(str(len(read(split_dataset_by_node(stream(8), node, 2).take(TEST), workers))) for node in range(2))
    for workers in (0, 2)
}
print(f"split by two nodes, then take({TEST}): {counts[0]} with no workers, {counts[2]} with two")
PYTHON
"$folder/venv/bin/python" "$folder/parts.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
shards 1, workers 0, nodes 1: test 100, training 1100, in both 0, in neither 0
shards 8, workers 0, nodes 1: test 100, training 1100, in both 0, in neither 0
shards 8, workers 2, nodes 1: test 100, training 1100, in both 50, in neither 50
shards 8, workers 4, nodes 1: test 100, training 1100, in both 75, in neither 75
shards 8, workers 0, nodes 8: test 100, training 1100, in both 87, in neither 87
split by two nodes, then take(100): 100 and 100 with no workers, 200 and 200 with two
EXPECTED
