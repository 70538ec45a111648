# Writes the whole configuration of the cluster below $STATE: sourced by up, which sets the parameters.

W=${#NODES}; [ "$W" -ge 3 ] || W=3
node_name() { printf "node%0${W}d" "$1"; }

write_gres() {
  local i
  gres_node= gres_types=
  echo 'AutoDetect=off' >"$STATE/gres.conf"
  [ "$GPUS" -gt 0 ] || return 0
  gres_types="GresTypes=gpu" gres_node="Gres=gpu:$GPUS"
  if [ "$REAL_GPUS" = yes ]; then # the machine's devices, the first $GPUS of them for the first node and so on
    for i in $(seq 1 "$NODES"); do
      echo "NodeName=$(node_name "$i") Name=gpu File=/dev/nvidia[$(((i - 1) * GPUS))-$((i * GPUS - 1))]"
    done >>"$STATE/gres.conf"
    return 0
  fi
  # Slurm 22.05 drops a gpu that has a count and no file; these are /dev/null by another name.
  for i in $(seq 0 $((GPUS - 1))); do
    [ -c "$STATE/dev/nvidia$i" ] || mknod -m 666 "$STATE/dev/nvidia$i" c 1 3
  done
  echo "Name=gpu File=$STATE/dev/nvidia[0-$((GPUS - 1))]" >>"$STATE/gres.conf"
}

write_slurm_conf() {
  local acct host
  host=$(hostname -s)
  if [ "$ACCOUNTING" = dbd ]; then
    acct="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$((PORT + 1))
# not a password: the munge socket for the connection to slurmdbd (AuthInfo does not count there)
AccountingStoragePass=$STATE/munge/socket
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment
AccountingStorageEnforce=limits,qos"
  else
    acct="AccountingStorageType=accounting_storage/none"
  fi
  cat >"$STATE/slurm.conf" <<CONF
# written at each start: do not edit
ClusterName=lab
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
# listen on what the names resolve to (loopback), not on 0.0.0.0
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits before it may start again (120 s unless told)
AuthInfo=socket=$STATE/munge/socket,cred_expire=10
StateSaveLocation=$STATE/ctld
SlurmdSpoolDir=$STATE/spool/%n
SlurmctldPidFile=$STATE/run/slurmctld.pid
SlurmdPidFile=$STATE/run/slurmd.%n.pid
SlurmctldLogFile=$STATE/log/slurmctld.log
SlurmdLogFile=$STATE/log/slurmd.%n.log
SlurmctldDebug=info
SlurmdDebug=info
# no cgroups: processes are found by their parent
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
# what is declared below counts, not what the machine has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
$gres_types
# A node that was down for not answering is used again once it answers; one set down by hand stays so.
ReturnToService=1
SlurmdTimeout=15
SlurmctldTimeout=30
KillWait=5
UnkillableStepTimeout=30
MinJobAge=300
MaxJobCount=100000
MaxArraySize=$MAX_ARRAY
MaxStepCount=1000000
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,default_queue_depth=1000,bf_max_job_test=1000,max_rpc_cnt=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# a preempted job gets the signal that it asked for
SlurmctldParameters=preempt_send_user_signal
$acct
JobCompType=jobcomp/none
NodeName=node[$FIRST-$LAST] NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((PORT + 2))-$((PORT + 1 + NODES))] CPUs=$CPUS RealMemory=$MEM $gres_node State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF DefaultTime=60 MaxTime=INFINITE State=UP
CONF
}

write_dbd_conf() {
  [ "$ACCOUNTING" = dbd ] || return 0
  (umask 077; cat >"$STATE/slurmdbd.conf") <<CONF
AuthType=auth/munge
AuthInfo=socket=$STATE/munge/socket
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$((PORT + 1))
CommunicationParameters=NoInAddrAny
SlurmUser=root
DebugLevel=info
LogFile=$STATE/log/slurmdbd.log
PidFile=$STATE/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
CONF
  chmod 600 "$STATE/slurmdbd.conf"
}

configure() {
  FIRST=$(printf "%0${W}d" 1) LAST=$(printf "%0${W}d" "$NODES")
  write_gres
  write_slurm_conf
  write_dbd_conf
  # slurmd loads a cgroup plugin though nothing uses one; that for cgroup v2 ends slurmd where no systemd runs.
  echo 'CgroupPlugin=cgroup/v1' >"$STATE/cgroup.conf"
  # The nodes' own /etc/hosts. Every node is 127.0.0.1: with an address of its own srun inside a job would listen there,
  # but be called back on the source address of its request, which is 127.0.0.1.
  { cat /etc/hosts; for i in $(seq 1 "$NODES"); do echo "127.0.0.1 $(node_name "$i")"; done; } >"$STATE/hosts"
  for v in NODES GPUS REAL_GPUS CPUS MEM ACCOUNTING PORT MAX_ARRAY NAMESPACES DISK_MB OPEN; do
    printf '%s=%q\n' $v "${!v}"
  done >"$STATE/cluster.env"
}
