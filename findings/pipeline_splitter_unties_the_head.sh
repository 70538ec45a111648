#!/usr/bin/env bash
# torch 2.13.0. `pipeline()` unties the head of a model, and its checkpoint may have the head that was never trained.
#
# Expected: the splitter takes a model as it is, keeps what it computes, and lets checkpoints work with the names that
# the weights had, as its documentation says. A weight that an embedding and a head share, in different stages, has one
# gradient, the sum of both, or the model is refused.
# Behaviour: each stage gets a copy of the shared weight, and that is all. The copies are listed in
# `pipe.replicated_params`; comments beside it speak of an all-reduce and of gradients that are added before the step,
# and no schedule or stage does either. Each copy is trained with the gradient of its own stage, and they part in the
# first step: what is trained is the model that is not tied. Moreover the first stage here still has the original
# weight by its second name, `head.weight`, which nothing uses and nothing trains. Two ranks then have a `head.weight`
# in their state, and distributed checkpoints, which take duplicates for equal, write one of them: that of the last
# stage here, or with `dedup_save_to_lowest_rank` the untrained one. Loaded into the tied model, the file gives both
# ends the weight of one. Nothing is reported, and the losses of training look right. Two things make it right: an
# all-reduce (sum) of the gradients of `replicated_params` before the step (the norm for clipping then counts them
# twice), and a state without the weights that have had no gradient.
# Who meets it: language models with tied weights that are split by tracing, such as GPT-2, which the documentation
# names as an example. Stages that are made by hand have their weights from their author.
#
# Output of 2026-12-01 (two gloo processes; norm of the shared weight's gradient at the first step; held-out loss; the
# checkpoint is loaded into a tied model and into one that is not; "summed": with the gradients of the copies summed and
# without the untrained weight in the checkpoint):
#   one process, tied: gradient 0.066, loss 4.3
#   one process, not tied: gradient 0.041 and 0.051, loss 4.2
#   two stages: gradients 0.041 and 0.051, copies differ
#   two stages: first stage has head.weight, not trained
#   two stages, checkpoint: loss 5.7 in a tied model, 4.2 in another
#   two stages, checkpoint, duplicates of lowest rank: loss 5.4 in a tied model, 5.0 in another
#   two stages, summed: gradients 0.066 and 0.066, copies equal
#   two stages, summed: first stage has head.weight, not trained
#   two stages, summed, checkpoint: loss 4.3 in a tied model, 4.3 in another
#   two stages, summed, checkpoint, duplicates of lowest rank: loss 4.3 in a tied model, 4.3 in another
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6 2>/dev/null
cat >"$folder/stages.py" <<'PYTHON'
import copy
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

WORDS, WIDTH, LENGTH, ROWS, STEPS, RATE = 256, 64, 16, 32, 300, 3e-3
chances = torch.rand(WORDS, WORDS, generator=torch.Generator().manual_seed(0)) ** 24


def block():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(4 * WIDTH, WIDTH))


class Model(torch.nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        torch.nn.init.normal_(self.embedding.weight, std=0.1)
        self.first, self.second = block(), block()
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight if tied else copy.deepcopy(self.embedding.weight)

    def forward(self, words):
        hidden = self.embedding(words)
        hidden = hidden + self.first(hidden)
        hidden = hidden + self.second(hidden)
        return self.head(hidden)


def loss_of(logits, following):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


def rows(step, count=ROWS):
    """Sequences of a chain in which each word follows the one before it with chances of its own."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, WORDS, (count, 1), generator=generator)
    for _ in range(LENGTH):
        words = torch.cat([words, torch.multinomial(chances[words[:, -1]], 1, generator=generator)], 1)
    return words[:, :-1], words[:, 1:]


def made(tied):
    torch.manual_seed(0)
    return Model(tied)


def norm(weight):
    return f"{weight.grad.norm():.3f}"


@torch.no_grad()
def held_out(model):
    words, following = rows(STEPS, 512)
    return f"{loss_of(model(words), following):.1f}"


def one_process(tied):
    model = made(tied)
    shared = {model.embedding.weight, model.head.weight}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for step in range(STEPS):
        words, following = rows(step)
        loss_of(model(words), following).backward()
        if step == 0:
            norms = " and ".join(sorted(map(norm, shared)))
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"one process, {'' if tied else 'not '}tied: gradient {norms}, loss {held_out(model)}", flush=True)


def two_stages(summed):
    name = f"two stages{', summed' if summed else ''}"
    pipe = pipeline(made(True), (rows(0)[0][: ROWS // 2],), split_spec={"second": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=loss_of)
    weights = dict(stage.submod.named_parameters())
    (names,) = pipe.replicated_params
    shared = weights[names[f"submod_pp_{rank}"]]
    optimizer = torch.optim.AdamW(weights.values(), lr=RATE)
    norms = [None, None]
    for step in range(STEPS):
        words, following = rows(step)
        schedule.step(words) if rank == 0 else schedule.step(target=following)
        if summed:
            dist.all_reduce(shared.grad)
        if step == 0:
            dist.all_gather_object(norms, norm(shared))
        optimizer.step()
        optimizer.zero_grad()
    copies = [torch.empty_like(shared) for _ in range(2)]
    dist.all_gather(copies, shared.detach())
    trained = {key for key, weight in weights.items() if optimizer.state[weight]}
    kept = trained if summed else set(weights)
    state = {key: value for key, value in stage.submod.state_dict().items() if key in kept}
    if rank == 0:
        same = "equal" if torch.equal(*copies) else "differ"
        print(f"{name}: gradients {' and '.join(norms)}, copies {same}", flush=True)
        print(f"{name}: first stage has {', '.join(set(weights) - trained)}, not trained", flush=True)
    for lowest in (False, True):
        path = f"{sys.argv[1]}/{summed}-{lowest}"
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
        dcp.save(state, checkpoint_id=path, planner=planner)
        losses = []
        for tied in (True, False):
            model = Model(tied)
            dcp.load(model.state_dict(), checkpoint_id=path)
            losses.append(held_out(model))
        if rank == 0:
            kind = ", duplicates of lowest rank" if lowest else ""
            print(f"{name}, checkpoint{kind}: loss {losses[0]} in a tied model, {losses[1]} in another", flush=True)


dist.init_process_group("gloo")
rank = dist.get_rank()
one_process(tied=True)
one_process(tied=False)
two_stages(summed=False)
two_stages(summed=True)
dist.destroy_process_group()
PYTHON
export OMP_NUM_THREADS=1
run=("$folder/venv/bin/torchrun" --standalone --nproc-per-node 2 "$folder/stages.py" "$folder")
"${run[@]}" 2>/dev/null | grep -E '^(one process|two stages)' | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
one process, tied: gradient 0.066, loss 4.3
one process, not tied: gradient 0.041 and 0.051, loss 4.2
two stages: gradients 0.041 and 0.051, copies differ
two stages: first stage has head.weight, not trained
two stages, checkpoint: loss 5.7 in a tied model, 4.2 in another
two stages, checkpoint, duplicates of lowest rank: loss 5.4 in a tied model, 5.0 in another
two stages, summed: gradients 0.066 and 0.066, copies equal
two stages, summed: first stage has head.weight, not trained
two stages, summed, checkpoint: loss 4.3 in a tied model, 4.3 in another
two stages, summed, checkpoint, duplicates of lowest rank: loss 4.3 in a tied model, 4.3 in another
EXPECTED
