#!/usr/bin/env bash
# orbax-checkpoint 0.12.8, jax 0.10.2, CPU. A run that is set back to an earlier checkpoint saves none until it has passed the old end.
#
# Expected: to go back behind a spike of the loss, one restores step 300 of 500 and trains on. `save(400)` then replaces the checkpoint
# of the run that is given up, or raises an error; `latest_step()` is where the run is.
# Behaviour: `CheckpointManager.save` leaves out each step that is not larger than the largest in the folder. It returns False, as
# it does for all steps between two saves, so nobody looks, and nothing is reported. The folder keeps the checkpoints of the run
# that is given up: what is interrupted now goes on from step 500 of that run, spike and all, and all steps since the rollback are
# lost. Later the folder has checkpoints of both runs with nothing to tell them apart, so an average over the last ones, or a
# plot of their evaluations, is of both. `force=True` meets the old step and raises StepAlreadyExistsError. `delete` of the later
# steps before the first save is right.
# Who meets it: rollbacks after a spike or a node that computed wrong numbers, where data seen twice and days of training depend on
# what the next restart finds. (It was asked in google/orbax#527 why earlier steps are not filled in.)
#
# Output of 2026-11-30 (a save each 100 steps; run 1 to step 500, run 2 from its step 300 on; the last checkpoints and their runs):
#   set back to 300, to step 500: saved [], a restart is from 500 of run 1
#   set back to 300, to step 600: saved [600], last 400 of run 1, 500 of run 1, 600 of run 2
#   set back to 300, force=True: StepAlreadyExistsError
#   set back to 300, later ones deleted, to step 500: saved [400, 500], a restart is from 500 of run 2
#   set back to 300, later ones deleted, to step 600: saved [600], last 400 of run 2, 500 of run 2, 600 of run 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 numpy==2.2.6 2>/dev/null
cat >"$folder/rollback.py" <<'PYTHON'
import sys

import jax.numpy as jnp
import orbax.checkpoint as ocp


def opened(path):
    return ocp.CheckpointManager(path, options=ocp.CheckpointManagerOptions(save_interval_steps=100))


def trained(manager, run, first, last):
    """The steps of a run that were saved, each step being offered."""
    steps = range(first, last + 1)
    saved = [step for step in steps if manager.save(step, args=ocp.args.StandardSave({"run": jnp.full(2, run)}))]
    manager.wait_until_finished()
    return saved


def kept(manager):
    steps = sorted(manager.all_steps())[-3:]
    runs = [int(manager.restore(step, args=ocp.args.StandardRestore({"run": jnp.zeros(2)}))["run"][0]) for step in steps]
    return ", ".join(f"{step} of run {run}" for step, run in zip(steps, runs))


for name, deletes in (("set back to 300", False), ("set back to 300, later ones deleted", True)):
    path = f"{sys.argv[1]}/{deletes}"
    with opened(path) as manager:
        trained(manager, 1, 100, 500)
    with opened(path) as manager:
        manager.restore(300, args=ocp.args.StandardRestore({"run": jnp.zeros(2)}))
        for step in (400, 500) if deletes else ():
            manager.delete(step)
        saved = trained(manager, 2, 301, 500)
    with opened(path) as manager:
        print(f"{name}, to step 500: saved {saved}, a restart is from {kept(manager).split(', ')[-1]}", flush=True)
        saved = trained(manager, 2, 501, 600)
        print(f"{name}, to step 600: saved {saved}, last {kept(manager)}", flush=True)
        if not deletes:
            try:
                manager.save(400, args=ocp.args.StandardSave({"run": jnp.full(2, 2)}), force=True)
            except ocp.checkpoint_manager.StepAlreadyExistsError as error:
                print(f"{name}, force=True: {type(error).__name__}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/rollback.py" "$folder" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
set back to 300, to step 500: saved [], a restart is from 500 of run 1
set back to 300, to step 600: saved [600], last 400 of run 1, 500 of run 1, 600 of run 2
set back to 300, force=True: StepAlreadyExistsError
set back to 300, later ones deleted, to step 500: saved [400, 500], a restart is from 500 of run 2
set back to 300, later ones deleted, to step 600: saved [600], last 400 of run 2, 500 of run 2, 600 of run 2
EXPECTED
