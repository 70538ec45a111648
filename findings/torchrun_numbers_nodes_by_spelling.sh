#!/usr/bin/env bash
# torch 2.13.0, torchrun with its c10d rendezvous, three agents. Nodes are numbered in the order of their spelling: 10 before 2.
#
# Expected: nodes are numbered in the order in which they arrive, in the order of their numbers, or by `--node-rank`, so that
# neighbours in a list of hosts that follows the network (racks, rails) have neighbouring ranks.
# Behaviour: when all are there, the agents are sorted by their address as text. node10 stands between node1 and node2, and
# 10.0.0.10 before 10.0.0.2. `--node-rank` is ignored (a warning says so). Of a hundred nodes counted from 1 to 100, 89 change
# their place: groups of consecutive ranks (stages of a pipeline, replicas that share a switch) are spread over racks, and a job
# on node8 to node11 starts with node10, one on node12 to node15 with node12. Numbers of equal width keep the order, and so does
# the static rendezvous, in which `--node-rank` counts.
# Who meets it: multi-node jobs by `torchrun --rdzv-backend=c10d` on hosts whose names or addresses have no leading zeros
# (reported and open: pytorch/pytorch#191190).
#
# Output of 2026-11-29 (started in the order 1, 2, 10, with node ranks 0, 1, 2):
#   rank 0: 127.0.0.1
#   rank 1: 127.0.0.10
#   rank 2: 127.0.0.2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 2>/dev/null
cat >"$folder/rank.py" <<'PYTHON'
import os

print(f"rank {os.environ['RANK']}: {os.environ['ADDRESS']}", flush=True)
PYTHON
node=0
for address in 127.0.0.1 127.0.0.2 127.0.0.10; do
  ADDRESS=$address timeout 300 "$folder/venv/bin/torchrun" --nnodes=3 --nproc-per-node=1 --node-rank=$node --rdzv-backend=c10d \
    --rdzv-endpoint=127.0.0.1:29583 --rdzv-id=order --local-addr=$address "$folder/rank.py" >"$folder/$address" 2>/dev/null &
  node=$((node + 1))
  sleep 3
done
wait
sort "$folder"/127.* | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
rank 0: 127.0.0.1
rank 1: 127.0.0.10
rank 2: 127.0.0.2
EXPECTED
