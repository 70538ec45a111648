#!/usr/bin/env bash
# torchdata 0.11.0, torch 2.13.0. A loader resumed in its second pass skips batches of the first pass's order.
#
# Expected: after `load_state_dict` a StatefulDataLoader gives the batches that were left, whether the loader shuffles itself
# (`shuffle=True`) or by a `RandomSampler` of torch, which is what `shuffle=True` makes in torch's own DataLoader; and a
# generator with a seed makes a run more repeatable, not less.
# Behaviour: the state holds the order only if the loader made its sampler itself. Given torch's RandomSampler, the resumed
# loader draws an order anew and drops as many batches as were read. In a process that starts with the same seed this is the
# order of the first pass, so a run that stops in its first pass resumes exactly, which is what a short test shows. A run that
# stops in a later pass goes on with the first pass's order: some examples come twice and as many never, and every later pass
# is a pass that the model has had already. `shuffle=True` with a generator and no workers resumes the pass exactly; from the
# next pass on the order is another than in the run that was not stopped.
# Who meets it: training of several passes (fine-tuning) with a sampler of one's own under jobs with a time limit.
#
# Output of 2026-11-30 (12 examples, batches of 2; the state is taken after 2 batches of a pass):
#   shuffle=True, in pass 1: the rest is right, lost [], the next pass is right
#   shuffle=True, in pass 2: the rest is right, lost [], the next pass is right
#   shuffle=True and a generator, in pass 1: the rest is right, lost [], the next pass is another
#   shuffle=True and a generator, in pass 2: the rest is right, lost [], the next pass is another
#   sampler=RandomSampler, in pass 1: the rest is right, lost [], the next pass is right
#   sampler=RandomSampler, in pass 2: the rest is pass 1's, lost [6, 8, 9, 11], the next pass is pass 2 again
#   sampler=RandomSampler and a generator, in pass 1: the rest is right, lost [], the next pass is right
#   sampler=RandomSampler and a generator, in pass 2: the rest is pass 1's, lost [1, 6, 9, 10], the next pass is pass 2 again
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 torchdata==0.11.0 2>/dev/null
cat >"$folder/resume.py" <<'PYTHON'
import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

DATA, READ = list(range(12)), 2


def loader(sampler, generator):
    """As a training program makes it: the process has set its seed before."""
    torch.manual_seed(5)
    drawn = torch.Generator().manual_seed(3) if generator else None
    how = {"sampler": RandomSampler(DATA, generator=drawn)} if sampler else {"shuffle": True, "generator": drawn}
    return StatefulDataLoader(DATA, batch_size=2, **how)


def read(batches):
    return [example for batch in batches for example in batch.tolist()]


for sampler in (False, True):
    for generator in (False, True):
        for stops_in in (1, 2):
            whole = loader(sampler, generator)
            passes = [read(whole) for _ in range(stops_in - 1)]
            running = iter(whole)
            begun = read([next(running) for _ in range(READ)])
            state = whole.state_dict()
            rest = read(running)
            passes += [begun + rest, read(whole)]
            resumed = loader(sampler, generator)
            resumed.load_state_dict(state)
            went_on, after = read(resumed), read(resumed)
            told = "right" if went_on == rest else "pass 1's" if went_on == passes[0][2 * READ :] else "another"
            later = "right" if after == passes[-1] else "pass 2 again" if stops_in == 2 and after == passes[1] else "another"
            lost = sorted(set(DATA) - set(begun) - set(went_on))
            name = ("sampler=RandomSampler" if sampler else "shuffle=True") + " and a generator" * generator
            print(f"{name}, in pass {stops_in}: the rest is {told}, lost {lost}, the next pass is {later}")
PYTHON
"$folder/venv/bin/python" "$folder/resume.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
shuffle=True, in pass 1: the rest is right, lost [], the next pass is right
shuffle=True, in pass 2: the rest is right, lost [], the next pass is right
shuffle=True and a generator, in pass 1: the rest is right, lost [], the next pass is another
shuffle=True and a generator, in pass 2: the rest is right, lost [], the next pass is another
sampler=RandomSampler, in pass 1: the rest is right, lost [], the next pass is right
sampler=RandomSampler, in pass 2: the rest is pass 1's, lost [6, 8, 9, 11], the next pass is pass 2 again
sampler=RandomSampler and a generator, in pass 1: the rest is right, lost [], the next pass is right
sampler=RandomSampler and a generator, in pass 2: the rest is pass 1's, lost [1, 6, 9, 10], the next pass is pass 2 again
EXPECTED
