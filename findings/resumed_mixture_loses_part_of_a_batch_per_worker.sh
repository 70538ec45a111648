#!/usr/bin/env bash
# litdata 0.2.76, torch 2.13.0. A resumed mixture reads some rows twice and others never, the more the larger a batch.
#
# Expected: the state of StreamingDataLoader, loaded into a loader with the same settings, goes on at the next row, as
# it does for one StreamingDataset. Of mixtures the project's text asks only that ranks, workers and batch size stay.
# Behaviour: with a CombinedStreamingDataset and several workers it does not. Each worker draws the source of each row,
# so that it has, say, 13 rows of one source and 19 of the other after a batch. The loader's state has these numbers for
# every worker, but the part of it that each source gets has their sum alone. A resumed source shares the sum out over
# the workers as if they had read it in turn and in whole batches: the first workers get too many of the rest and leave
# rows out, the last ones get too few and repeat rows. The mixture's own draws go on where they were and the pass has as
# many rows as before, so that nothing looks wrong, and nothing is reported. On each resume and each rank, for each
# source and worker, up to a batch is lost and as much read again. One worker (or none), a loader with `batch_size=1`
# behind which rows are put together, and `batching_method="per_stream"`, whose batches are of one source, are exact.
# Who meets it: pre-training and fine-tuning on mixtures, above all in jobs that are preempted often, and comparisons of
# a resumed run with one that was not stopped.
#
# Output of 2026-12-01 (one pass over sources of 2000 rows each, stopped at two fifths and resumed):
#   one source, 4 workers, batches of 32: not read 0, read again 0
#   2 sources, stratified, 1 workers, batches of 32: not read 0, read again 0
#   2 sources, stratified, 2 workers, batches of 32: not read 14, read again 14
#   2 sources, stratified, 4 workers, batches of 32: not read 28, read again 28
#   4 sources, stratified, 4 workers, batches of 32: not read 79, read again 79
#   2 sources, stratified, 4 workers, batches of 128: not read 240, read again 240
#   2 sources, stratified, 4 workers, batches of 1: not read 0, read again 0
#   2 sources, per_stream, 4 workers, batches of 32: not read 0, read again 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
"$folder/venv/bin/pip" install --quiet torch==2.13.0 litdata==0.2.76 2>/dev/null
cat >"$folder/resumed.py" <<'PYTHON'
import sys
from collections import Counter

import litdata
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

ROWS = 2000  # of each source


def row(index):
    return int(index)


def loader(sources, workers, batch, method):
    streams = [StreamingDataset(f"{sys.argv[1]}/{at}", shuffle=True, seed=7) for at in range(sources)]
    data = CombinedStreamingDataset(streams, batching_method=method) if sources > 1 else streams[0]
    return StreamingDataLoader(data, batch_size=batch, num_workers=workers)


def resumed(sources, workers, batch, method="stratified"):
    """What a pass over all rows has read in the end that was stopped at two fifths of it."""
    first = loader(sources, workers, batch, method)
    batches = iter(first)
    counts = Counter(at for _ in range(2 * sources * ROWS // (5 * batch)) for at in next(batches).tolist())
    state = first.state_dict()
    del batches
    second = loader(sources, workers, batch, method)
    second.load_state_dict(state)
    counts.update(at for rows in second for at in rows.tolist())
    again = sum(times > 1 for times in counts.values())
    name = "one source" if sources == 1 else f"{sources} sources, {method}"
    told = f"not read {sources * ROWS - len(counts)}, read again {again}"
    print(f"{name}, {workers} workers, batches of {batch}: {told}", flush=True)


if __name__ == "__main__":
    for at in range(4):
        rows = list(range(at * ROWS, (at + 1) * ROWS))
        litdata.optimize(fn=row, inputs=rows, output_dir=f"{sys.argv[1]}/{at}", chunk_size=50, num_workers=1)
    resumed(1, 4, 32)
    resumed(2, 1, 32)
    resumed(2, 2, 32)
    resumed(2, 4, 32)
    resumed(4, 4, 32)
    resumed(2, 4, 128)
    resumed(2, 4, 1)
    resumed(2, 4, 32, "per_stream")
PYTHON
export OMP_NUM_THREADS=1 DATA_OPTIMIZER_CACHE_FOLDER="$folder/cache" DATA_OPTIMIZER_DATA_CACHE_FOLDER="$folder/cache"
"$folder/venv/bin/python" "$folder/resumed.py" "$folder" 2>/dev/null | grep 'batches of' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
one source, 4 workers, batches of 32: not read 0, read again 0
2 sources, stratified, 1 workers, batches of 32: not read 0, read again 0
2 sources, stratified, 2 workers, batches of 32: not read 14, read again 14
2 sources, stratified, 4 workers, batches of 32: not read 28, read again 28
4 sources, stratified, 4 workers, batches of 32: not read 79, read again 79
2 sources, stratified, 4 workers, batches of 128: not read 240, read again 240
2 sources, stratified, 4 workers, batches of 1: not read 0, read again 0
2 sources, per_stream, 4 workers, batches of 32: not read 0, read again 0
EXPECTED
