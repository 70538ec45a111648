#!/usr/bin/env bash
# Slurm 22.05.8 of Debian 12 (slurmctld, slurmd, slurm-client, slurm-wlm-basic-plugins 22.05.8-4+deb12u3). A node's GPUs are
# counted from 0, whatever device files gres.conf gives it.
#
# Expected: a node whose gres.conf line says File=/dev/nvidia[2-3] sets CUDA_VISIBLE_DEVICES=2,3 in its jobs where no cgroup
# hides the other devices (TaskPlugin=task/none), since CUDA then counts all devices of the machine.
# Behaviour: it sets 0,1, the positions in the node's own list. Two nodes that share a machine by halves both give their jobs
# the first half; nothing is reported, and NCCL notices two ranks on one device only if their host names are equal.
# Who meets it: several slurmd on one machine (tests, "multiple slurmd support", one node split in partitions), and nodes that
# keep their first GPUs out of Slurm.
#
# Output of 2026-11-27:
#   node1 /dev/nvidia[0-1]: CUDA_VISIBLE_DEVICES=0,1
#   node2 /dev/nvidia[2-3]: CUDA_VISIBLE_DEVICES=0,1
set -euo pipefail
[ "$(id -u)" = 0 ] || { echo "slurmd needs root" >&2; exit 2; }
folder=$(mktemp -d)
trap 'for p in "$folder"/*.pid; do kill "$(cat "$p" 2>/dev/null)" 2>/dev/null || true; done; sleep 1; rm -rf "$folder"' EXIT
cd "$folder"
for package in slurmctld slurmd slurm-client slurm-wlm-basic-plugins; do
  apt-get download -qq "$package=22.05.8-4+deb12u3" 2>/dev/null
done
apt-get download -qq libmunge2 munge libhwloc15 libjson-c5 liblua5.1-0 libyaml-0-2 libdbus-1-3 libpam0g libnuma1 liblz4-1 2>/dev/null
for package in *.deb; do dpkg -x "$package" "$folder/root"; done
lib=$folder/root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$lib:$lib/slurm-wlm:$folder/root/lib/x86_64-linux-gnu SLURM_CONF=$folder/slurm.conf PATH=$PATH:$folder/root/usr/bin:$folder/root/usr/sbin
for name in slurmctld slurmd slurmstepd; do [ ! -e "root/usr/sbin/$name-wlm" ] || ln -sf "$name-wlm" "root/usr/sbin/$name"; done
mkdir state spool dev
for i in 0 1 2 3; do mknod "dev/nvidia$i" c 1 3; done
dd if=/dev/urandom of=munge.key bs=64 count=1 2>/dev/null; chmod 600 munge.key
mkdir munge; chmod 755 munge "$folder"
munged=$folder/root/usr/sbin/munged
"$munged" --force --key-file="$folder/munge.key" --socket="$folder/munge/socket" --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" 2>/dev/null
cat >slurm.conf <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=21917
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
GresTypes=gpu
NodeName=node1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=21918 CPUs=2 Gres=gpu:2 State=UNKNOWN
NodeName=node2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=21919 CPUs=2 Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES State=UP
CONF
echo 'CgroupPlugin=cgroup/v1' >cgroup.conf
cat >gres.conf <<CONF
AutoDetect=off
NodeName=node1 Name=gpu File=$folder/dev/nvidia[0-1]
NodeName=node2 Name=gpu File=$folder/dev/nvidia[2-3]
CONF
slurmctld >>start.log 2>&1
for node in node1 node2; do mkdir -p "spool/$node"; slurmd -N "$node" >>start.log 2>&1; done
for _ in $(seq 100); do [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && break; sleep 0.2; done
timeout 60 srun -N2 --ntasks-per-node=1 --gres=gpu:2 bash -c 'echo "$SLURMD_NODENAME CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES"' 2>srun.log | sort >seen
sed -e 's#^node1#node1 /dev/nvidia[0-1]:#' -e 's#^node2#node2 /dev/nvidia[2-3]:#' seen | tee output
diff output - <<'EXPECTED'
node1 /dev/nvidia[0-1]: CUDA_VISIBLE_DEVICES=0,1
node2 /dev/nvidia[2-3]: CUDA_VISIBLE_DEVICES=0,1
EXPECTED
