#!/usr/bin/env bash
# torch 2.13.0, torchrun. A signal for "save now" ends torchrun and not its workers, and no worker's exit status passes it.
#
# Expected: torchrun passes SIGUSR1, the signal that Slurm is asked for ahead of a time limit (`--signal=USR1@120`), on to its
# workers, which save and exit with a status that says "requeue"; or it ends them. It exits with its worker's status, as a shell
# or srun does.
# Behaviour: of its own, torchrun handles SIGTERM, SIGINT, SIGHUP and SIGQUIT. SIGUSR1 sent to its process kills it at once
# (status 138), and the workers, which nobody watches any more, run on, with the devices and ports. They do not get the signal.
# `--signals-to-handle` with SIGUSR1 in it passes the signal on, as part of a shutdown: workers have 30 seconds from then on,
# whatever they do, and are killed. And whatever a worker exits with, torchrun exits with 1: a status of 85 for "requeue me"
# cannot be told from a crash by who called it.
# Who meets it: checkpoints on notice, and wrappers that decide by status whether to start again.
#
# Output of 2026-11-29:
#   SIGUSR1: torchrun exits with 138 after less than 15 seconds, workers that got the signal 0, workers alive 2
#   SIGUSR1, --signals-to-handle: torchrun exits with 1 after some 30 seconds, workers that got the signal 2, workers alive 0
#   workers exit with 85: torchrun exits with 1
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/worker.py" <<'PYTHON'
import os
import signal
import sys
import time
from pathlib import Path

folder, what = Path(sys.argv[1]), sys.argv[2]
rank = os.environ["RANK"]
if what == "exit":
    sys.exit(85)
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(time.monotonic()))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(folder / f"pid{rank}").write_text(str(os.getpid()))
for _ in range(3000):  # a save that takes longer than anything here waits for it
    time.sleep(0.1)
    (folder / f"got{rank}").write_text(str(len(got)))
PYTHON
alive() {
  local count=0
  for rank in 0 1; do kill -0 "$(cat "$folder/pid$rank")" 2>/dev/null && count=$((count + 1)); done
  echo $count
}
# Sends SIGUSR1 to torchrun once its workers are there, waits for it to end, and says what is left.
signalled() {
  rm -f "$folder"/pid? "$folder"/got?
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$@" "$folder/worker.py" "$folder" wait >"$folder/log" 2>&1 &
  local agent=$! status=0 start
  until [ -s "$folder/got0" ] && [ -s "$folder/got1" ]; do kill -0 $agent && sleep 0.2; done
  start=$SECONDS
  kill -USR1 $agent
  wait $agent 2>/dev/null || status=$?
  sleep 1
  local seconds=$((SECONDS - start)) left
  left=$(alive)
  echo "torchrun exits with $status after $([ $seconds -lt 15 ] && echo "less than 15" || echo "some 30") seconds," \
    "workers that got the signal $(cat "$folder"/got? | tr -d '\n' | tr -d 0 | wc -c), workers alive $left"
  for rank in 0 1; do kill -9 "$(cat "$folder/pid$rank")" 2>/dev/null || true; done
}
{
  echo "SIGUSR1: $(signalled)"
  echo "SIGUSR1, --signals-to-handle: $(signalled --signals-to-handle=SIGTERM,SIGINT,SIGUSR1)"
  status=0
  "$folder/venv/bin/torchrun" --standalone --nproc-per-node=2 "$folder/worker.py" "$folder" exit >"$folder/log" 2>&1 || status=$?
  echo "workers exit with 85: torchrun exits with $status"
} | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
SIGUSR1: torchrun exits with 138 after less than 15 seconds, workers that got the signal 0, workers alive 2
SIGUSR1, --signals-to-handle: torchrun exits with 1 after some 30 seconds, workers that got the signal 2, workers alive 0
workers exit with 85: torchrun exits with 1
EXPECTED
