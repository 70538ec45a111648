#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0. A grown corpus is learned as it was, or evaluated with what is learned.
#
# Expected: a file of documents written anew under its old name, with more documents in it, is split and sampled anew:
# the cache of sample indices belongs to the file that it was made of, and training and held-out documents are disjoint,
# since the split is one of documents.
# Behaviour: `GPTDataset` names an index by a hash of the file's path, number of samples, split, seed, sequence length
# and tokenizer. Nothing of the file itself is in it, not its size, time or number of documents; an index that is found
# is read and not compared with the file. By default indices lie in a folder beside the file, which outlives it. Each of
# the splits is looked up on its own. So a run with the same settings never reads a new document. A longer run has a new
# number of training samples and a new index for them, while the held-out samples, if as many as before, have the old
# one: the old last documents, which now lie inside the new training part. The whole validation set is then learned, and
# its loss says nothing. A mixture of paths without weights asks for all samples of each, a number that is not known
# beforehand and not in the hash: there no length of run finds new documents. Nothing is reported, for the old documents
# are where they were. (If documents change their lengths or become fewer, samples have wrong sizes or there is an
# IndexError.) Another `path_to_cache` (`--data-cache-path`), or the removal of the old one, is right.
# Who meets it: corpora that grow shard by shard, are cleaned again, or were first tried as a small part, under one
# name. 0.19.2 has the same hash.
#
# Output of 2026-12-01 (share of the new half of the documents that is learned, and of the documents used for
# evaluation that is also learned; as many evaluation samples in each run):
#   a corpus: of new documents 0.00 learned, of evaluated ones 0.00 learned
#   a corpus and another: of new documents 0.00 learned, of evaluated ones 0.00 learned
#   twice the corpus, the same run: of new documents 0.00 learned, of evaluated ones 0.00 learned
#   twice the corpus and another, the same run: of new documents 0.00 learned, of evaluated ones 0.00 learned
#   twice the corpus, twice the run: of new documents 0.90 learned, of evaluated ones 1.00 learned
#   twice the corpus and another, a longer run: of new documents 0.00 learned, of evaluated ones 0.00 learned
#   twice the corpus, twice the run, a new folder: of new documents 0.90 learned, of evaluated ones 0.00 learned
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
"$folder/venv/bin/pip" install --quiet torch==2.13.0 megatron-core==0.16.1 2>/dev/null
cat >"$folder/grown.py" <<'PYTHON'
import sys
import types

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

LENGTH, DOCUMENTS, EVALUATED, OTHER = 64, 2000, 100, 10**6
lengths = np.random.default_rng(0).integers(20, 200, 2 * DOCUMENTS)
ends = lengths.cumsum().tolist()


def write(path, documents, first=0):
    """A file with the first documents of the corpus, each token of which has a number of its own."""
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for end, size in zip(ends[:documents], lengths.tolist()):
        builder.add_document(torch.arange(first + end - size, first + end, dtype=torch.int32), [size])
    builder.finalize(f"{path}.idx")


def documents(paths, samples, folder):
    """Documents of which a run of so many samples reads tokens: those it learns and those it is evaluated with."""
    tokenizer = types.SimpleNamespace(eod=OTHER - 2, pad=OTHER - 1, vocab_size=OTHER, unique_identifiers={})
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=LENGTH,
        blend=(paths, None),
        split="95,5,0",
        tokenizer=tokenizer,
        path_to_cache=folder,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, (samples, EVALUATED, 0), lambda: True, config)
    read = []
    for data, count in zip(builder.build(), (samples, EVALUATED)):
        tokens = np.unique([data[at]["tokens"].numpy() for at in range(min(count, len(data)))])
        read.append(set(np.searchsorted(ends, tokens[tokens < ends[-1]], side="right").tolist()))
    return read


def run(name, samples, paths=None, folder=None):
    learned, held_out = documents(paths or [corpus], samples, folder)
    new = sum(at >= DOCUMENTS for at in learned) / DOCUMENTS
    leaked = len(held_out & learned) / len(held_out)
    print(f"{name}: of new documents {new:.2f} learned, of evaluated ones {leaked:.2f} learned", flush=True)


corpus, other = f"{sys.argv[1]}/corpus", f"{sys.argv[1]}/other"
epoch = ends[DOCUMENTS - 1] // LENGTH
write(corpus, DOCUMENTS)
write(other, DOCUMENTS, OTHER)
run("a corpus", epoch)
run("a corpus and another", 2 * epoch, [corpus, other])
write(corpus, 2 * DOCUMENTS)
run("twice the corpus, the same run", epoch)
run("twice the corpus and another, the same run", 2 * epoch, [corpus, other])
run("twice the corpus, twice the run", 2 * epoch)
run("twice the corpus and another, a longer run", 3 * epoch, [corpus, other])
run("twice the corpus, twice the run, a new folder", 2 * epoch, folder=f"{sys.argv[1]}/new")
PYTHON
export OMP_NUM_THREADS=1
"$folder/venv/bin/python" "$folder/grown.py" "$folder" 2>/dev/null | grep ' learned$' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
a corpus: of new documents 0.00 learned, of evaluated ones 0.00 learned
a corpus and another: of new documents 0.00 learned, of evaluated ones 0.00 learned
twice the corpus, the same run: of new documents 0.00 learned, of evaluated ones 0.00 learned
twice the corpus and another, the same run: of new documents 0.00 learned, of evaluated ones 0.00 learned
twice the corpus, twice the run: of new documents 0.90 learned, of evaluated ones 1.00 learned
twice the corpus and another, a longer run: of new documents 0.00 learned, of evaluated ones 0.00 learned
twice the corpus, twice the run, a new folder: of new documents 0.90 learned, of evaluated ones 0.00 learned
EXPECTED
