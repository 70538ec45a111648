#!/usr/bin/env bash
# Slurm 22.05.8 of Debian 12 (slurmctld, slurm-client, slurm-wlm-basic-plugins 22.05.8-4+deb12u3). The controller is what
# its file is called.
#
# Expected: a daemon started by the path of its file behaves as the same file started through a link. Debian ships the
# program as /usr/sbin/slurmctld-wlm and makes the link `slurmctld` when the package is installed; whoever unpacks the
# package into an image without running its scripts has the file alone.
# Behaviour: under its own file name the controller starts, answers and shows the nodes, and ignores `Gres=` of every node
# without an error: the nodes have no GPUs, and jobs that ask for some are refused ("Requested node configuration is not
# available", which looks like a mistake in gres.conf). Through a link called `slurmctld` the same file with the same
# configuration has them.
# Who meets it: images of login and controller nodes that are made from unpacked packages; clusters for tests.
#
# Output of 2026-11-27:
#   started as slurmctld-wlm: Gres=(null)
#   started as slurmctld: Gres=gpu:8
set -euo pipefail
folder=$(mktemp -d)
trap 'kill "$(cat "$folder/slurmctld.pid" 2>/dev/null)" 2>/dev/null || true; rm -rf "$folder"' EXIT
cd "$folder"
for package in slurmctld slurm-client slurm-wlm-basic-plugins; do
  apt-get download -qq "$package=22.05.8-4+deb12u3" 2>/dev/null
done
apt-get download -qq libmunge2 libhwloc15 libjson-c5 liblua5.1-0 libyaml-0-2 libdbus-1-3 2>/dev/null
for package in *.deb; do dpkg -x "$package" "$folder/root"; done
lib=$folder/root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$lib:$lib/slurm-wlm SLURM_CONF=$folder/slurm.conf
program=$folder/root/usr/sbin/slurmctld-wlm
ln -s slurmctld-wlm "$folder/root/usr/sbin/slurmctld"
cat >slurm.conf <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=21817
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=$(id -un)
AuthType=auth/none
CredType=cred/none
PluginDir=$lib/slurm-wlm
StateSaveLocation=$folder/state
SlurmctldPidFile=$folder/slurmctld.pid
SlurmctldLogFile=$folder/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=21818 CPUs=8 Gres=gpu:8 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
for name in slurmctld-wlm slurmctld; do
  rm -rf state; mkdir state
  "$folder/root/usr/sbin/$name" -c >>start.log 2>&1
  for _ in $(seq 50); do "$folder/root/usr/bin/scontrol" show node node1 >node 2>/dev/null && break; sleep 0.2; done
  echo "started as $name: $(grep -o 'Gres=[^ ]*' node)"
  kill "$(cat slurmctld.pid)"
  for _ in $(seq 100); do [ -e slurmctld.pid ] || break; sleep 0.1; done
done | tee output
diff output - <<'EXPECTED'
started as slurmctld-wlm: Gres=(null)
started as slurmctld: Gres=gpu:8
EXPECTED
