#!/usr/bin/env bash
# webdataset 1.0.2 and 0.2.86, torch 2.13.0. `shardshuffle` gives every epoch the same order of shards, and epochs of a fixed length
# the same samples.
#
# Expected: `WebDataset(urls, shardshuffle=100)` reads the shards of each epoch in another order, so that ten epochs that are cut at
# half of the data (`with_epoch`, as ranks need it to make as many steps as each other) read nearly all of it.
# Behaviour: the dataset draws one seed when it is made, and each pass starts the shuffle of shards from it again, also in
# workers that live on and in `repeat()`. So all epochs have one order, and what lies behind the cut is never read: half of the
# data in all ten epochs, whether a seed is given or not. `detshuffle=True` counts passes, but in the workers' copies of the
# dataset, which a loader makes anew for each epoch: it is right only in the main process and with `persistent_workers`.
# `shuffle(n)` behind it draws another order of samples in each pass, so the batches differ and hide it, but only in a buffer of n
# samples. Release 0.2.86 has another order in each epoch. Nothing is reported. `resampled=True` draws shards anew.
# Who meets it: training of more than one epoch, and every one whose epochs are shorter than its data. (Reported, with a change
# that is not merged: webdataset/webdataset#502.)
#
# Output of 2026-11-30 (40 shards of 10 samples; orders of shards in 10 epochs, and what 10 epochs of half the data read; in the main
# process, with two workers, with two persistent workers):
#   1.0.2, options {}: 1, 50 %; 1, 50 %; 1, 50 %
#   1.0.2, options {'seed': 1}: 1, 50 %; 1, 50 %; 1, 50 %
#   1.0.2, options {'detshuffle': True}: 10, over 90 %; 1, 50 %; 10, over 90 %
#   0.2.86, options {}: 10, over 90 %; 10, over 90 %; 10, over 90 %
#   0.2.86, options {'detshuffle': True}: 10, over 90 %; 1, 50 %; 10, over 90 %
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 webdataset==1.0.2 2>/dev/null
"$folder/venv/bin/pip" install --quiet --no-deps --target "$folder/earlier" webdataset==0.2.86 2>/dev/null
cat >"$folder/epochs.py" <<'PYTHON'
import inspect
import sys
import warnings

import webdataset
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
SHARDS, SAMPLES, EPOCHS = 40, 10, 10
PATHS = [f"{sys.argv[2]}/{shard}.tar" for shard in range(SHARDS)]
LOADERS = ({}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True})


def dataset(options):
    return webdataset.WebDataset(PATHS, shardshuffle=100, **options)


def orders(options, loader):
    loader = DataLoader(dataset(options), batch_size=None, **loader)
    return len({tuple(sample["__key__"] for sample in loader) for _ in range(EPOCHS)})


def share(options, loader):
    length = SHARDS * SAMPLES // 2 // loader.get("num_workers", 1)
    loader = DataLoader(dataset(options).with_epoch(length), batch_size=None, **loader)
    read = len({sample["__key__"] for _ in range(EPOCHS) for sample in loader}) / (SHARDS * SAMPLES)
    return "over 90 %" if read > 0.9 else f"{100 * read:.0f} %"


for shard, path in enumerate(PATHS):
    with webdataset.TarWriter(path) as writer:
        for sample in range(SAMPLES):
            writer.write({"__key__": f"{shard:02d}_{sample}", "text": "word"})
for options in ({}, {"seed": 1}, {"detshuffle": True}):
    if options.keys() <= inspect.signature(webdataset.WebDataset).parameters.keys():
        texts = [f"{orders(options, loader)}, {share(options, loader)}" for loader in LOADERS]
        print(f"{sys.argv[1]}, options {options}: {'; '.join(texts)}", flush=True)
PYTHON
{
    "$folder/venv/bin/python" "$folder/epochs.py" 1.0.2 "$folder" 2>/dev/null
    PYTHONPATH="$folder/earlier" "$folder/venv/bin/python" "$folder/epochs.py" 0.2.86 "$folder" 2>/dev/null
} | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
1.0.2, options {}: 1, 50 %; 1, 50 %; 1, 50 %
1.0.2, options {'seed': 1}: 1, 50 %; 1, 50 %; 1, 50 %
1.0.2, options {'detshuffle': True}: 10, over 90 %; 1, 50 %; 10, over 90 %
0.2.86, options {}: 10, over 90 %; 10, over 90 %; 10, over 90 %
0.2.86, options {'detshuffle': True}: 10, over 90 %; 1, 50 %; 10, over 90 %
EXPECTED
