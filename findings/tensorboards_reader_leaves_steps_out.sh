#!/usr/bin/env bash
# tensorboard 2.21.0, torch 2.13.0. TensorBoard's reader returns a sample of a long run, and its file rounds counts of tokens.
#
# Expected: `EventAccumulator(folder)` followed by `Reload()` and `Scalars(tag)`, which every script that reads a run's losses
# is made of, returns what was logged.
# Behaviour: at most 10,000 values a tag are kept, taken at random, and nothing tells how many there were. Of 25,000 steps three
# in five are missing. The last one is always there, so the curve looks whole: but a spike of one step is in it or not, the
# largest value, the mean of the last hundred and the time between neighbours are others than those of the run.
# `size_guidance={"scalars": 0}` keeps all.
# In the file a scalar has 24 bits: `add_scalar` of tokens seen is exact up to 16.8 million, and at 15 trillion (the length of
# Llama 3's training) in steps of a million: with a batch of half a million tokens half the steps show none.
# Who meets it: reports and plots made from event files.
#
# Output of 2026-11-29:
#   default: 10000 of 25000 steps, last 24999, spikes 113 of 250
#   size_guidance={"scalars": 0}: 25000 of 25000 steps, last 24999, spikes 250 of 250
#   tokens, of which every step reads 524288: 50 of 99 steps show none
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 tensorboard==2.21.0 2>/dev/null
cat >"$folder/read.py" <<'PYTHON'
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

STEPS, BATCH = 25_000, 2**19
SPIKES = range(50, STEPS, 100)
writer = SummaryWriter(sys.argv[1])
for step in range(STEPS):
    writer.add_scalar("loss", 100.0 if step in SPIKES else 2.0, step)
for step in range(100):
    writer.add_scalar("tokens", 15 * 10**12 + step * BATCH, step)
writer.close()
for name, options in (("default", {}), ('size_guidance={"scalars": 0}', {"size_guidance": {"scalars": 0}})):
    events = EventAccumulator(sys.argv[1], **options).Reload()
    loss = events.Scalars("loss")
    spikes = sum(event.value == 100.0 for event in loss)
    print(f"{name}: {len(loss)} of {STEPS} steps, last {loss[-1].step}, spikes {spikes} of {len(SPIKES)}")
tokens = [event.value for event in events.Scalars("tokens")]
still = sum(a == b for a, b in zip(tokens, tokens[1:]))
print(f"tokens, of which every step reads {BATCH}: {still} of {len(tokens) - 1} steps show none")
PYTHON
"$folder/venv/bin/python" "$folder/read.py" "$folder/run" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
default: 10000 of 25000 steps, last 24999, spikes 113 of 250
size_guidance={"scalars": 0}: 25000 of 25000 steps, last 24999, spikes 250 of 250
tokens, of which every step reads 524288: 50 of 99 steps show none
EXPECTED
