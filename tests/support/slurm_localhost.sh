#!/usr/bin/env bash
# A real SLURM of several nodes on one machine, without systemd: each node has its own network, hostname, process ids,
# /dev/shm and /local_nvme. It needs Linux, root with CAP_SYS_ADMIN and CAP_NET_ADMIN, and `make env-slurm`.
#
#   slurm_localhost.sh up    [N]     start N nodes (default 4) and wait until they are idle
#   slurm_localhost.sh down          stop exactly what `up` started
#   slurm_localhost.sh kill  nX      power-cut a node: all its processes end at once
#   slurm_localhost.sh start nX      bring it back
#   slurm_localhost.sh env           print the `export` that a client's shell needs
#
# One cluster per machine: addresses and names are fixed. No accounting: Snakemake asks `squeue` (profile slurm-localhost).
set -euo pipefail

BASE=${SLURM_LOCALHOST:-/var/tmp/slurm-localhost}
CPUS=${CPUS:-8}      # advertised, not real
MEMORY=${MEMORY:-4000} # MB per node, advertised
GPUS=${GPUS:-8}      # fake: copies of /dev/null
NETWORK=10.77.0
BRIDGE=slbr0
CONTROL_PORT=16817
NODE_PORT=16818
export SLURM_CONF="$BASE/etc/slurm.conf"

say() { echo "[slurm_localhost] $*" >&2; }

# start NAME command...: the process id goes to run/NAME.pid
start() {
  local name=$1; shift
  if is_running "$name"; then say "$name runs already"; return 0; fi
  setsid "$@" > "$BASE/log/$name.out" 2>&1 < /dev/null &
  echo $! > "$BASE/run/$name.pid"
}

is_running() { [ -f "$BASE/run/$1.pid" ] && kill -0 "$(cat "$BASE/run/$1.pid")" 2> /dev/null; }

# stop NAME [SIGNAL]
stop() {
  local file="$BASE/run/$1.pid"
  [ -f "$file" ] || return 0
  kill -"${2:-TERM}" "$(cat "$file")" 2> /dev/null || true
  for _ in $(seq 50); do is_running "$1" || break; sleep 0.1; done
  if is_running "$1"; then kill -KILL "$(cat "$file")" 2> /dev/null || true; fi
  rm -f "$file"
}

write_configuration() {
  local count=$1 last=$(( $1 - 1 )) i
  mkdir -p "$BASE"/{etc,run,log,state,spool,munge,dev,nodes}
  chmod 755 "$BASE" "$BASE/munge"; chmod 700 "$BASE/state"
  # Character devices, or slurmd sets no CUDA_VISIBLE_DEVICES.
  for i in $(seq 0 $((GPUS - 1))); do [ -c "$BASE/dev/nvidia$i" ] || mknod -m 666 "$BASE/dev/nvidia$i" c 1 3; done
  cat > "$BASE/etc/slurm.conf" << CONF
ClusterName=localhost
SlurmctldHost=ctl($NETWORK.1)
AuthType=auth/munge
AuthInfo=socket=$BASE/munge/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
SlurmctldPort=$CONTROL_PORT
SlurmdPort=$NODE_PORT
StateSaveLocation=$BASE/state
SlurmdSpoolDir=$BASE/spool/%n
SlurmctldPidFile=$BASE/run/slurmctld.self
SlurmdPidFile=$BASE/run/slurmd-%n.self
SlurmctldLogFile=$BASE/log/slurmctld.log
SlurmdLogFile=$BASE/log/slurmd-%n.log
# No cgroups: they are not there in containers and without systemd.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$BASE/log/jobcomp.txt
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=100000
# Without accounting, squeue is what tells Snakemake about finished jobs.
MinJobAge=3600
ReturnToService=2
SlurmdTimeout=15
SlurmctldTimeout=60
KillWait=5
WaitTime=10
JobRequeue=1
RebootProgram=/bin/false
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=n[0-$last] NodeAddr=$NETWORK.[10-$((10 + last))] CPUs=$CPUS RealMemory=$MEMORY Gres=gpu:$GPUS State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
  echo "NodeName=n[0-$last] Name=gpu File=$BASE/dev/nvidia[0-$((GPUS - 1))]" > "$BASE/etc/gres.conf"
  echo "CgroupAutomount=no" > "$BASE/etc/cgroup.conf"
  { echo "127.0.0.1 localhost"; echo "$NETWORK.1 ctl $(hostname)"
    for i in $(seq 0 "$last"); do echo "$NETWORK.$((10 + i)) n$i"; done
  } > "$BASE/etc/hosts"
  mkdir -p /etc/slurm /local_nvme
  echo "$count" > "$BASE/count"
}

start_munge() {
  local m="$BASE/munge"
  [ -f "$m/munge.key" ] || dd if=/dev/urandom of="$m/munge.key" bs=1 count=1024 status=none
  chmod 400 "$m/munge.key"
  start munged /usr/sbin/munged -F --key-file="$m/munge.key" --socket="$m/munge.sock" --pid-file="$m/munged.pid" \
    --log-file="$m/munged.log" --seed-file="$m/seed" --num-threads=4
  for _ in $(seq 50); do [ -S "$m/munge.sock" ] && return; sleep 0.1; done
  say "munge does not answer"; return 1
}

start_control() {
  ip link show "$BRIDGE" > /dev/null 2>&1 || {
    ip link add "$BRIDGE" type bridge; ip addr add "$NETWORK.1/24" dev "$BRIDGE"; ip link set "$BRIDGE" up
  }
  # A hostname of its own, so that it is SlurmctldHost's.
  start slurmctld unshare --uts --mount --propagation private \
    /bin/sh -c "hostname ctl && mount --bind $BASE/etc/hosts /etc/hosts && exec /usr/sbin/slurmctld -D"
}

start_node() {
  local node=$1 i=${1#n} own="$BASE/nodes/$1/local_nvme"
  mkdir -p "$BASE/spool/$node" "$own"
  chmod 1777 "$own"  # a scratch disk, every user's
  if ! ip netns list | grep -qw "sl-$node"; then
    ip netns add "sl-$node"
    ip link add "ve$node" type veth peer name eth0 netns "sl-$node"
    ip link set "ve$node" master "$BRIDGE" up
    ip -n "sl-$node" addr add "$NETWORK.$((10 + i))/24" dev eth0
    ip -n "sl-$node" link set eth0 up; ip -n "sl-$node" link set lo up
  fi
  # nsenter and not `ip netns exec`, which mounts a /sys without cgroups, and slurmd wants to see them.
  # bash stays process 1 and reaps slurmstepds, which slurmd does not.
  # /etc/slurm is there because Snakemake's jobstep executor takes every SLURM_* variable away, SLURM_CONF too.
  start "slurmd-$node" \
    nsenter --net="/run/netns/sl-$node" unshare --mount --uts --pid --fork --kill-child=KILL --mount-proc --propagation private \
    /bin/bash -c "hostname $node && mount --bind $own /local_nvme && mount --bind $BASE/etc/hosts /etc/hosts &&
      mount --bind $BASE/etc /etc/slurm && mount -t tmpfs tmpfs /dev/shm && { /usr/sbin/slurmd -D -N $node & wait \$!; }"
}

up() {
  local count=$1 i
  write_configuration "$count"
  start_munge
  start_control
  for i in $(seq 0 $((count - 1))); do start_node "n$i"; done
  for _ in $(seq 150); do
    if [ "$(sinfo -h -N -t idle -o %N 2> /dev/null | sort -u | wc -l)" = "$count" ]; then say "$count nodes are idle"; return 0; fi
    sleep 0.2
  done
  say "the nodes are not idle after 30 s; logs: $BASE/log"; sinfo -N -l >&2 || true; return 1
}

down() {
  [ -f "$BASE/count" ] || return 0
  local i
  for i in $(seq 0 $(($(cat "$BASE/count") - 1))); do stop "slurmd-n$i" KILL; done
  stop slurmctld; stop munged
  for i in $(seq 0 $(($(cat "$BASE/count") - 1))); do
    ip netns del "sl-n$i" 2> /dev/null || true; ip link del "ven$i" 2> /dev/null || true
  done
  ip link del "$BRIDGE" 2> /dev/null || true
  rm -rf "$BASE/state" "$BASE/spool"
}

case ${1:-} in
  up) up "${2:-4}" ;;
  down) down ;;
  kill) stop "slurmd-$2" KILL ;;
  start) start_node "$2" ;;
  env) echo "export SLURM_CONF=$SLURM_CONF" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
