#!/usr/bin/env bash
# Slurm 22.05.8 of Debian 12 (slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins 22.05.8-4+deb12u3). Of a chain
# by `--dependency=singleton` or `--array=0-9%1` the next run starts while the last one is still saving its
# checkpoint.
#
# Expected: both keep one run at a time, so that a training longer than the time limit is a chain of runs, each of
# which reads the checkpoint that the one before has left. The manual lets a singleton begin after jobs of its name
# "have terminated", and lets one task of such an array run at a time.
# Behaviour: both look whether the last run still has the state RUNNING, and that ends when Slurm sends SIGTERM: at
# the time limit, at scancel, at a requeue or a preemption. The run then has KillWait (30 s unless told) to save, in
# the state COMPLETING, and the next one starts meanwhile where other resources are free. It reads the checkpoint
# before, and trains what was trained already; or one that is half written; or the first run saves over the second
# one's files. Where it has to wait for the nodes of the first one all is well. `afterany`, alone, waits until the
# last process has ended. Nothing is reported.
# Who meets it: chains of runs that save on SIGTERM. A signal earlier than that (--signal) hides it while saving is
# quick.
#
# Output of 2026-12-01 (two runs, the first one saves for 5 s when SIGTERM comes):
#   array, scancel: start start saved
#   array, requeue: start start saved
#   array, time-limit: start start saved
#   singleton, scancel: start start saved
#   singleton, time-limit: start start saved
#   afterany, scancel: start saved start
#   afterany, time-limit: start saved start
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
mkdir -p state spool/node1 spool/node2 munge
dd if=/dev/urandom of=munge.key bs=64 count=1 2>/dev/null
chmod 600 munge.key
chmod 755 munge "$folder"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge/socket" --pid-file="$folder/munged.pid" \
  --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" 2>/dev/null
cat >slurm.conf <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=22317
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a requeued job waits until its credential has expired, 120 s unless told
AuthInfo=socket=$folder/munge/socket,cred_expire=5
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
KillWait=30
JobRequeue=1
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=22318 CPUs=32 State=UNKNOWN
NodeName=node2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=22319 CPUs=32 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
echo 'CgroupPlugin=cgroup/v1' >cgroup.conf
slurmctld >>start.log 2>&1
for node in node1 node2; do slurmd -N "$node" >>start.log 2>&1; done
for _ in $(seq 100); do [ "$(sinfo -h -t idle -o %D 2>/dev/null)" != 2 ] || break; sleep 0.2; done
cat >run.sh <<'RUN'
#!/bin/bash
# run.sh FILE: the first run goes on until SIGTERM and saves then, the second one ends at once
echo start >>"$1"
[ "$(grep -c start "$1")" = 1 ] || exit 0
trap 'sleep 5; echo saved >>"$1"; exit 0' TERM
for _ in $(seq 1500); do sleep 0.1; done
RUN
chain() { # chain KIND END: submits two runs; prints the id of the first one
  local file=$folder/$1-$2 first
  case $1 in
    array) first=$(sbatch --parsable --output=/dev/null --time=1 --array=0-1%1 run.sh "$file")_0 ;;
    singleton)
      first=$(sbatch --parsable --output=/dev/null --time=1 -J "$2" --dependency=singleton run.sh "$file")
      sbatch --output=/dev/null --time=1 -J "$2" --dependency=singleton run.sh "$file" >/dev/null ;;
    afterany)
      first=$(sbatch --parsable --output=/dev/null --time=1 run.sh "$file")
      sbatch --output=/dev/null --time=1 --dependency="afterany:$first" run.sh "$file" >/dev/null ;;
  esac
  echo "$first"
}
for kind in array singleton afterany; do
  chain "$kind" time-limit >/dev/null
  cancelled+=("$(chain "$kind" scancel)")
  [ "$kind" != array ] || requeued=$(chain "$kind" requeue)
done
sleep 5
scancel "${cancelled[@]}"
scontrol requeue "$requeued"
for _ in $(seq 300); do [ -n "$(squeue -h)" ] || break; sleep 0.5; done
for kind in array singleton afterany; do
  for end in scancel requeue time-limit; do
    [ ! -e "$folder/$kind-$end" ] || echo "$kind, $end: $(head -3 "$folder/$kind-$end" | xargs)"
  done
done | tee output
diff output - <<'EXPECTED'
array, scancel: start start saved
array, requeue: start start saved
array, time-limit: start start saved
singleton, scancel: start start saved
singleton, time-limit: start start saved
afterany, scancel: start saved start
afterany, time-limit: start saved start
EXPECTED
