#!/usr/bin/env bash
# Slurm 22.05.8 of Debian 12 (slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins 22.05.8-4+deb12u3). The last
# element of an array that requeues itself by $SLURM_JOB_ID starts all of it again, also elements that have succeeded.
#
# Expected: each element of a job array has a job id of its own, and `scontrol requeue $SLURM_JOB_ID`, which scripts say
# shortly before the end of their time or when they are preempted, requeues the element that says it. The manual's page
# on arrays takes such an id and ARRAY_INDEX for two names of one element.
# Behaviour: the record that stands for the elements still waiting becomes the last of them when that one starts, so the
# id of the last element is that of the array, and what is done to it is done to the array. All elements but one requeue
# themselves alone. The last one also stops its running neighbours, which lose what they did since their checkpoints,
# and starts those again that have ended with status 0, if that was within MinJobAge (300 s unless told). `scancel
# $SLURM_JOB_ID` in it stops all that run. The manual does say that the array's id stands for all elements, and cancels
# an element by its index in an example; but it gives the array's id to the first element, and here it is that of the
# one with the highest index, so that a try with one element or a look at the first log files does not show it. Nothing
# is reported: the elements look as if each had been requeued. `${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID` is right in
# all elements.
# Who meets it: sweeps and evaluations as arrays with time limits or preemption, whose elements end at different times.
#
# Output of 2026-12-01 (array 0-3; elements 0 and 1 succeed at once; 3 s later one of the others does as is told, once,
# while the last one has some seconds left to run; how often each element is started, and which succeed):
#   element 2 requeues $SLURM_JOB_ID: starts 1 1 2 1, ended 0 1 2 3
#   element 3 requeues $SLURM_JOB_ID: starts 2 2 2 2, ended 0 0 1 1 2 3
#   element 3 requeues ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID: starts 1 1 1 2, ended 0 1 2 3
#   element 2 cancels $SLURM_JOB_ID: starts 1 1 1 1, ended 0 1 3
#   element 3 cancels $SLURM_JOB_ID: starts 1 1 1 1, ended 0 1
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
SlurmctldPort=22017
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
KillWait=3
JobRequeue=1
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=22018 CPUs=4 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
echo 'CgroupPlugin=cgroup/v1' >cgroup.conf
slurmctld >>start.log 2>&1
slurmd -N node1 >>start.log 2>&1
for _ in $(seq 100); do [ "$(sinfo -h -t idle -o %D 2>/dev/null)" != 1 ] || break; sleep 0.2; done
cat >element.sh <<'ELEMENT'
#!/bin/bash
# element.sh FOLDER INDEX COMMAND: the element INDEX runs COMMAND in its first run
echo "$SLURM_ARRAY_TASK_ID" >>"$1/starts"
if [ "$SLURM_ARRAY_TASK_ID" -ge 2 ] && [ -z "$SLURM_RESTART_COUNT" ]; then
  sleep 3
  [ "$SLURM_ARRAY_TASK_ID" != "$2" ] || { eval "$3"; sleep 60; }
  sleep 5
fi
echo "$SLURM_ARRAY_TASK_ID" >>"$1/ended"
ELEMENT
try() { # try INDEX NAME COMMAND WHAT
  local run=$folder/try-$1-$2-${#4} # a folder of its own
  mkdir "$run"
  sbatch --array=0-3 --output=/dev/null element.sh "$run" "$1" "$3 $4" >/dev/null
  sleep 2
  for _ in $(seq 120); do [ -n "$(squeue -h)" ] || break; sleep 0.5; done
  echo "element $1 $2 $4: starts $(sort "$run/starts" | uniq -c | awk '{print $1}' | xargs)," \
    "ended $(sort "$run/ended" | xargs)"
}
{
  try 2 requeues 'scontrol requeue' '$SLURM_JOB_ID'
  try 3 requeues 'scontrol requeue' '$SLURM_JOB_ID'
  try 3 requeues 'scontrol requeue' '${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID'
  try 2 cancels scancel '$SLURM_JOB_ID'
  try 3 cancels scancel '$SLURM_JOB_ID'
} | tee output
diff output - <<'EXPECTED'
element 2 requeues $SLURM_JOB_ID: starts 1 1 2 1, ended 0 1 2 3
element 3 requeues $SLURM_JOB_ID: starts 2 2 2 2, ended 0 0 1 1 2 3
element 3 requeues ${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID: starts 1 1 1 2, ended 0 1 2 3
element 2 cancels $SLURM_JOB_ID: starts 1 1 1 1, ended 0 1 3
element 3 cancels $SLURM_JOB_ID: starts 1 1 1 1, ended 0 1
EXPECTED
