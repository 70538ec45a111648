#!/usr/bin/env bash
# datasets 5.2.0, torchdata 0.11.0, torch 2.13.0. A resumed stream begins every later pass where it was resumed, or is not resumed.
#
# Expected: `load_state_dict` goes on where `state_dict` was taken, in the epoch that the state names, and the pass after that one
# reads all data.
# Behaviour: the state is kept and applied at the begin of each pass in whose epoch it was taken. Without `set_epoch` every pass of
# the process is one: the resumed run reads the rest of the data again and again, and what comes before the checkpoint never; the
# state of a finished pass gives a stream without examples for good. The other way round, a state of a later epoch is ignored
# until `set_epoch` is called, although the state has the epoch in it: the run starts again at the first example. Which of
# the two happens, and whether later passes are whole, depends on the loader's workers as well: `StatefulDataLoader` with two of
# them (here new processes in each pass) reads later passes in full, and with none it does not. An uninterrupted run reads
# everything in each pass. Nothing is reported. `set_epoch(state["epoch"])` after loading, and another epoch for each pass, is right.
# Who meets it: loops that repeat a small corpus or a held-out set until the steps are done, and resume. (The first half is
# huggingface/datasets#7447, closed as intended.)
#
# Output of 2026-11-30 (40 examples; stopped after 20; examples in the first passes of the resumed run, and whether the part before
# the stop and the first of them are the whole):
#   epoch 0, the stream itself: 20 20 20, whole True
#   epoch 0, the stream itself, stopped at the end: 0 0 0, whole True
#   epoch 0, no workers: 20 20 20, whole True
#   epoch 0, two workers: 20 40 40, whole True
#   epoch 1, the stream itself: 40 40 40, whole False
#   epoch 1, the stream itself, stopped at the end: 40 40 40, whole False
#   epoch 1, no workers: 40 40 40, whole False
#   epoch 1, two workers: 40 40 40, whole False
#   epoch 1, the stream itself, set_epoch each pass: 20 40 40, whole True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 datasets==5.2.0 torchdata==0.11.0 2>/dev/null
cat >"$folder/resume.py" <<'PYTHON'
from datasets import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

EXAMPLES, BATCH, PASSES = 40, 4, 3


def reader(workers):
    """A stream of four shards, and what is iterated: the stream itself, or a loader of it."""
    stream = Dataset.from_dict({"number": range(EXAMPLES)}).to_iterable_dataset(num_shards=4)
    if workers is None:
        return stream, stream.batch(BATCH)
    return stream, StatefulDataLoader(stream, batch_size=BATCH, num_workers=workers)


def numbers(batches):
    return [int(number) for batch in batches for number in batch["number"]]


def stopped(workers, epoch, after):
    """The examples before the stop, and the state of that moment."""
    stream, batches = reader(workers)
    target = batches if workers is None else stream
    target.set_epoch(epoch)
    seen = []
    for batch in batches:
        seen += numbers([batch])
        if len(seen) == after < EXAMPLES:
            return seen, batches.state_dict()
    return seen, batches.state_dict()


def resumed(workers, state, epochs):
    stream, batches = reader(workers)
    batches.load_state_dict(state)
    target = batches if workers is None else stream
    passes = []
    for at in range(PASSES):
        if epochs is not None:
            target.set_epoch(epochs + at)
        passes.append(numbers(batches))
    return passes


def tell(name, workers, epoch, after=EXAMPLES // 2, epochs=None):
    seen, state = stopped(workers, epoch, after)
    passes = resumed(workers, state, epochs)
    whole = sorted(seen + passes[0]) == list(range(EXAMPLES))
    print(f"epoch {epoch}, {name}: {' '.join(str(len(part)) for part in passes)}, whole {whole}", flush=True)


for epoch in (0, 1):
    tell("the stream itself", None, epoch)
    tell("the stream itself, stopped at the end", None, epoch, after=EXAMPLES)
    tell("no workers", 0, epoch)
    tell("two workers", 2, epoch)
tell("the stream itself, set_epoch each pass", None, 1, epochs=1)
PYTHON
"$folder/venv/bin/python" "$folder/resume.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
epoch 0, the stream itself: 20 20 20, whole True
epoch 0, the stream itself, stopped at the end: 0 0 0, whole True
epoch 0, no workers: 20 20 20, whole True
epoch 0, two workers: 20 40 40, whole True
epoch 1, the stream itself: 40 40 40, whole False
epoch 1, the stream itself, stopped at the end: 40 40 40, whole False
epoch 1, no workers: 40 40 40, whole False
epoch 1, two workers: 40 40 40, whole False
epoch 1, the stream itself, set_epoch each pass: 20 40 40, whole True
EXPECTED
