#!/usr/bin/env bash
# grain 0.2.18. With `drop_remainder=False`, the default, Grain's DataLoader drops the remainder all the same, and repeats others.
#
# Expected: `ShardOptions(host, hosts, drop_remainder=False)` gives the records that are left over to the first hosts, as its
# documentation says, so that one epoch reads each record once, and three epochs three times.
# Behaviour: the shards are as documented, but how many records a host reads is the number of all records divided by that of hosts,
# rounded down. Each host with a record more leaves out one in an epoch: of 127 records on 64 hosts 63 are never read. That
# is what `drop_remainder=True` drops, which warns. With more epochs the hosts do not keep step: those with shorter shards begin
# their next epoch while the others are in the last, so that of 127 records some are read twice and one five times in three
# epochs. Nothing is reported. A `MapDataset` that is sliced by hosts reads all.
# Who meets it: held-out sets, read in one epoch by many hosts (a test loss of other examples on another number of hosts), and
# small corpora.
#
# Output of 2026-11-30 (how many records are read how often):
#   1000 records, 8 hosts, epochs 1, DataLoader, drop_remainder=True: 1000 records x 1
#   1000 records, 8 hosts, epochs 1, DataLoader, drop_remainder=False: 1000 records x 1
#   1000 records, 8 hosts, epochs 1, MapDataset[host::hosts]: 1000 records x 1
#   1000 records, 64 hosts, epochs 1, DataLoader, drop_remainder=True: 40 records x 0, 960 records x 1
#   1000 records, 64 hosts, epochs 1, DataLoader, drop_remainder=False: 40 records x 0, 960 records x 1
#   1000 records, 64 hosts, epochs 1, MapDataset[host::hosts]: 1000 records x 1
#   1000 records, 64 hosts, epochs 3, DataLoader, drop_remainder=True: 40 records x 0, 960 records x 3
#   1000 records, 64 hosts, epochs 3, DataLoader, drop_remainder=False: 80 records x 2, 896 records x 3, 24 records x 4
#   1000 records, 64 hosts, epochs 3, MapDataset[host::hosts]: 1000 records x 3
#   127 records, 64 hosts, epochs 1, DataLoader, drop_remainder=True: 63 records x 0, 64 records x 1
#   127 records, 64 hosts, epochs 1, DataLoader, drop_remainder=False: 63 records x 0, 64 records x 1
#   127 records, 64 hosts, epochs 1, MapDataset[host::hosts]: 127 records x 1
#   127 records, 64 hosts, epochs 3, DataLoader, drop_remainder=True: 63 records x 0, 64 records x 3
#   127 records, 64 hosts, epochs 3, DataLoader, drop_remainder=False: 63 records x 2, 63 records x 3, 1 records x 5
#   127 records, 64 hosts, epochs 3, MapDataset[host::hosts]: 127 records x 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.2.6 2>/dev/null
cat >"$folder/epochs.py" <<'PYTHON'
import collections

from grain import MapDataset
from grain.python import DataLoader, IndexSampler, ShardOptions


def loader(records, host, hosts, epochs, drop):
    shards = ShardOptions(host, hosts, drop_remainder=drop)
    return DataLoader(data_source=range(records), sampler=IndexSampler(records, shards, True, epochs, seed=0))


def sliced(records, host, hosts, epochs):
    return MapDataset.range(records)[host::hosts].shuffle(seed=0).repeat(epochs)


WAYS = {
    "DataLoader, drop_remainder=True": lambda *at: loader(*at, True),
    "DataLoader, drop_remainder=False": lambda *at: loader(*at, False),
    "MapDataset[host::hosts]": sliced,
}
for records, hosts, epochs in ((1000, 8, 1), (1000, 64, 1), (1000, 64, 3), (127, 64, 1), (127, 64, 3)):
    for name, way in WAYS.items():
        reads = collections.Counter(int(each) for host in range(hosts) for each in way(records, host, hosts, epochs))
        times = collections.Counter(reads[record] for record in range(records))
        text = ", ".join(f"{number} records x {read}" for read, number in sorted(times.items()))
        print(f"{records} records, {hosts} hosts, epochs {epochs}, {name}: {text}", flush=True)
PYTHON
"$folder/venv/bin/python" "$folder/epochs.py" 2>/dev/null | tee "$folder/output"
diff "$folder/output" - <<'EXPECTED'
1000 records, 8 hosts, epochs 1, DataLoader, drop_remainder=True: 1000 records x 1
1000 records, 8 hosts, epochs 1, DataLoader, drop_remainder=False: 1000 records x 1
1000 records, 8 hosts, epochs 1, MapDataset[host::hosts]: 1000 records x 1
1000 records, 64 hosts, epochs 1, DataLoader, drop_remainder=True: 40 records x 0, 960 records x 1
1000 records, 64 hosts, epochs 1, DataLoader, drop_remainder=False: 40 records x 0, 960 records x 1
1000 records, 64 hosts, epochs 1, MapDataset[host::hosts]: 1000 records x 1
1000 records, 64 hosts, epochs 3, DataLoader, drop_remainder=True: 40 records x 0, 960 records x 3
1000 records, 64 hosts, epochs 3, DataLoader, drop_remainder=False: 80 records x 2, 896 records x 3, 24 records x 4
1000 records, 64 hosts, epochs 3, MapDataset[host::hosts]: 1000 records x 3
127 records, 64 hosts, epochs 1, DataLoader, drop_remainder=True: 63 records x 0, 64 records x 1
127 records, 64 hosts, epochs 1, DataLoader, drop_remainder=False: 63 records x 0, 64 records x 1
127 records, 64 hosts, epochs 1, MapDataset[host::hosts]: 127 records x 1
127 records, 64 hosts, epochs 3, DataLoader, drop_remainder=True: 63 records x 0, 64 records x 3
127 records, 64 hosts, epochs 3, DataLoader, drop_remainder=False: 63 records x 2, 63 records x 3, 1 records x 5
127 records, 64 hosts, epochs 3, MapDataset[host::hosts]: 127 records x 3
EXPECTED
