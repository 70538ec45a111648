#!/usr/bin/env bash
# Slurm 22.05.8 of Debian 12 (slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins 22.05.8-4+deb12u3). A job whose
# time limit is extended after its warning signal gets no other one before it ends.
#
# Expected: `--signal=B:USR1@300` has the signal sent 300 s before the end of the job, as the manual says, and where
# the limit is extended (`scontrol update TimeLimit=`) 300 s before the new end, as the end that `squeue` shows moves
# along.
# Behaviour: the signal is sent once in a run. A job that is extended before its signal gets it before the new end.
# One that has had it, which is when users and administrators think of extending it, trains on through the extension
# and is ended at the new limit without a checkpoint. The job's record notes that the signal was sent, and a new limit
# does not reset the note; only another run, after a requeue, does. Nothing is reported, and `scontrol show job` does
# not tell. `scancel --batch --signal=USR1` at the right time, or a script that asks `squeue -h -o %L` for the time
# left, is right.
# Who meets it: scripts that save at the signal and train on. Those that save, requeue and exit end before.
#
# Output of 2026-12-01 (jobs of 3 minutes in the end, with a signal 50 s before it; two were shorter until they were
# extended; Slurm looks every 30 s, so that a signal comes up to half a minute early and the end as much late):
#   not-extended: signals 1, warned before its end
#   extended-before: signals 1, warned before its end
#   extended-after: signals 1, not warned before its end
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "slurmd needs root" >&2; exit 2; }
folder=$(mktemp -d)
leave() {
  for p in "$folder"/*.pid; do kill "$(cat "$p" 2>/dev/null)" 2>/dev/null || true; done
  sleep 1
  rm -rf "$folder"
}
trap leave EXIT
cd "$folder"
for package in slurmctld slurmd slurm-client slurm-wlm-basic-plugins; do
  apt-get download -qq "$package=22.05.8-4+deb12u3" 2>/dev/null
done
needed=(libmunge2 munge libhwloc15 libjson-c5 liblua5.1-0 libyaml-0-2 libdbus-1-3 libpam0g libnuma1 liblz4-1)
apt-get download -qq "${needed[@]}" 2>/dev/null
for package in *.deb; do dpkg -x "$package" "$folder/root"; done
lib=$folder/root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$lib:$lib/slurm-wlm:$folder/root/lib/x86_64-linux-gnu SLURM_CONF=$folder/slurm.conf
export PATH=$folder/root/usr/bin:$folder/root/usr/sbin:$PATH
for name in slurmctld slurmd slurmstepd; do
  [ ! -e "root/usr/sbin/$name-wlm" ] || ln -sf "$name-wlm" "root/usr/sbin/$name"
done
mkdir -p state spool/node1 munge
dd if=/dev/urandom of=munge.key bs=64 count=1 2>/dev/null
chmod 600 munge.key
chmod 755 munge "$folder"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge/socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" 2>/dev/null
cat >slurm.conf <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=22417
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$folder/munge/socket
PluginDir=$lib/slurm-wlm
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,bf_interval=2
KillWait=5
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=22418 CPUs=32 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
echo 'CgroupPlugin=cgroup/v1' >cgroup.conf
slurmctld >>start.log 2>&1
slurmd -N node1 >>start.log 2>&1
for _ in $(seq 100); do [ "$(sinfo -h -t idle -o %D 2>/dev/null)" != 1 ] || break; sleep 0.2; done
cat >job.sh <<'JOB'
#!/bin/bash
trap 'date +signal:%s >>"$1"' USR1
trap 'date +end:%s >>"$1"; exit' TERM
for _ in $(seq 3000); do sleep 0.1; done
JOB
submit() { # submit NAME MINUTES: prints the id of a job
  sbatch --parsable --output=/dev/null --time="$2" --signal=B:USR1@50 job.sh "$folder/$1"
}
submit not-extended 3 >/dev/null
before=$(submit extended-before 2)
scontrol update JobId="$before" TimeLimit=3
after=$(submit extended-after 1)
for _ in $(seq 300); do [ ! -e extended-after ] || break; sleep 0.2; done
scontrol update JobId="$after" TimeLimit=3
for _ in $(seq 600); do [ -n "$(squeue -h)" ] || break; sleep 0.5; done
for job in not-extended extended-before extended-after; do
  end=$(sed -n 's/end://p' "$job")
  last=$(sed -n 's/signal://p' "$job" | tail -1)
  if [ $((end - last)) -le 140 ]; then warned="warned before its end"; else warned="not warned before its end"; fi
  echo "$job: signals $(grep -c signal "$job"), $warned"
done | tee output
diff output - <<'EXPECTED'
not-extended: signals 1, warned before its end
extended-before: signals 1, warned before its end
extended-after: signals 1, not warned before its end
EXPECTED
