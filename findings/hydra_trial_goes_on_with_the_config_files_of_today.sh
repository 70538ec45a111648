#!/usr/bin/env bash
# hydra-core 1.3.8, hydra-submitit-launcher 1.2.0, submitit 1.5.4. A trial that is preempted goes on with what its
# configuration files say by then.
#
# Expected: a multirun through the submitit launcher fixes each trial when it is submitted: the launcher composes the
# configuration, prints the trial's overrides and pickles the job, so that a trial that waits in the queue or is
# requeued after preemption or a time-out is the one that was submitted.
# Behaviour: pickled are the function and the overrides of the command line. The configuration is composed again from
# the YAML files when the job starts, each time that it starts. Whoever edits a file for the next experiment while
# trials wait changes those as well, and a trial that is requeued goes on from its checkpoint with another learning
# rate, data mixture or model. Its `.hydra/config.yaml`, which would tell, is overwritten by the new values. The
# function itself stays as it was at the submission, so that the pair may be one that never existed. Nothing is
# reported. Values given on the command line are kept; `--config-path` with a copy of the files for each sweep is
# right.
# Who meets it: sweeps on Slurm that wait for hours, or on preemptible partitions.
#
# Output of 2026-12-01 (lr is in the file, seed on the command line, code is a number in the function; all three are
# edited while the trial runs, then it is preempted and requeued by submitit's local executor):
#   run 1: lr 0.1, seed 7, code 1
#   .hydra/config.yaml: lr: 0.1 seed: 7
#   run 2: lr 0.3, seed 7, code 1
#   .hydra/config.yaml: lr: 0.3 seed: 7
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
packages=(hydra-core==1.3.8 hydra-submitit-launcher==1.2.0 submitit==1.5.4)
"$folder/venv/bin/pip" install --quiet "${packages[@]}" 2>/dev/null
cd "$folder"
mkdir conf
cat >conf/config.yaml <<'YAML'
defaults:
  - override hydra/launcher: submitit_local
  - _self_
lr: 0.1
seed: 0
hydra:
  sweep:
    dir: sweep
  launcher:
    timeout_min: 10
YAML
cat >train.py <<'PYTHON'
import os
import time

import hydra


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config):
    code = 1
    run = 2 if os.path.exists("first") else 1
    print(f"run {run}: lr {config.lr}, seed {config.seed}, code {code}", file=open("output", "a"), flush=True)
    if run == 1:
        open("first", "w").write(str(os.getpid()))
        time.sleep(60)


main()
PYTHON
saved() {
  echo ".hydra/config.yaml: $(grep -E '^(lr|seed)' sweep/0/.hydra/config.yaml | xargs)" >>output
}
venv/bin/python train.py --multirun seed=7 >log 2>&1 &
for _ in $(seq 300); do [ ! -s first ] || break; sleep 0.2; done
sleep 1
saved
sed -i 's/lr: 0.1/lr: 0.3/; s/seed: 0/seed: 1/' conf/config.yaml
sed -i 's/code = 1/code = 2/' train.py
kill -USR2 "$(cat first)" # the signal that submitit asks Slurm for
wait
saved
cat output
diff output - <<'EXPECTED'
run 1: lr 0.1, seed 7, code 1
.hydra/config.yaml: lr: 0.1 seed: 7
run 2: lr 0.3, seed 7, code 1
.hydra/config.yaml: lr: 0.3 seed: 7
EXPECTED
