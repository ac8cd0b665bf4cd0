#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` by Slurm, on two nodes that are network namespaces of this machine (hosts.sh): srun with PMIx for Open MPI and with PMI2 for
# MPICH, a batch script, a resume on other nodes, a process that is killed, one that hangs, and srun without an MPI, which is refused. The
# daemons are this test's own: configuration, ports, state, key and sockets are in a folder that it removes, and the ports are in namespaces,
# so that a Slurm that is configured on this machine never meets them. Needs root; runs with VJP_ALL=1.
# Usage: test_train_slurm.sh PATH_OF_VJP KINDS (openmpi, mpich); status 77: it cannot run here
set -u
vjp=$1
kinds=$2
. "$(dirname "$0")/runs.sh"
. "$(dirname "$0")/hosts.sh"
[ -n "${VJP_ALL:-}" ] || skip 'only with VJP_ALL=1'
for tool in slurmctld slurmd munged srun sbatch sinfo; do
    command -v $tool >/dev/null 2>&1 || skip "there is no $tool"
done
for variable in $(env | sed -n 's/^\(\(SLURM\|SBATCH\|PMI\|PMIX\)_[A-Z0-9_]*\)=.*/\1/p'); do
    unset "$variable"
done
export SLURM_CONF="$work/slurm.conf"
unset VJP_THREADS # what Slurm gives each process

# alive: whether any of the processes $daemons is left; one that has ended and was not waited for has no command line.
alive() {
    for daemon in $daemons; do
        [ -z "$(tr '\0' ' ' 2>/dev/null <"/proc/$daemon/cmdline")" ] || return 0
    done
    return 1
}

# stop: ends jobs, then the daemons.
stop() {
    on one scancel -u root 2>/dev/null
    waited=0
    while [ -n "$(on one squeue -h 2>/dev/null)" ] && [ $waited -lt 100 ]; do
        sleep 0.2
        waited=$((waited + 1))
    done
    daemons=$(cat "$work"/slurm*.pid "$work"/munged.pid 2>/dev/null)
    [ -z "$daemons" ] || kill $daemons 2>/dev/null
    while alive && [ $waited -lt 200 ]; do
        sleep 0.1
        waited=$((waited + 1))
    done
    close_hosts
}
trap stop EXIT

# ---- A cluster ----
mkdir "$work/state" "$work/one" "$work/other"
: >"$work/plugstack.conf"
head -c 128 /dev/urandom >"$work/key" && chmod 600 "$work/key"
cat >"$SLURM_CONF" <<END
ClusterName=vjp
SlurmctldHost=one(10.77.0.1)
SlurmctldPort=46817
SlurmdPort=46818
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
CredType=cred/munge
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/%n
TmpFS=$work/%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd-%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd-%n.log
PlugStackConfig=$work/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
KillWait=5
SlurmdParameters=config_overrides
NodeName=one NodeAddr=10.77.0.1 CPUs=2
NodeName=other NodeAddr=10.77.0.2 CPUs=2
PartitionName=all Nodes=one,other Default=YES State=UP
END
munged --force --socket="$work/munge.socket" --key-file="$work/key" --pid-file="$work/munged.pid" --log-file="$work/munged.log" \
    --seed-file="$work/seed" >"$work/out" 2>"$work/err" || skip 'munged does not start'
on one slurmctld -c && on one slurmd -N one && on other slurmd -N other || skip 'Slurm does not start'
waited=0
while [ "$(on one sinfo -h -t idle -o %D 2>/dev/null)" != 2 ] && [ $waited -lt 100 ]; do
    sleep 0.2
    waited=$((waited + 1))
done
[ $waited -lt 100 ] || skip 'the nodes of Slurm do not answer'
version=$(srun --version)

# start ARGUMENTS...: runs a command on the first node, at most two minutes; sets $status.
start() {
    on one timeout 120 "$@" >"$work/out" 2>"$work/err"
    status=$?
}

# ---- The same bytes ----
options="train $work/text --preset tiny --batch 8 --context 32 --warmup 2 --steps 8 --validate-every 4 --save-every 3 --shards 4"
"$vjp" $options --out "$work/alone" >"$work/out" 2>"$work/err" || fault 'one process'
ran=''
for kind in $kinds; do
    [ $kind = openmpi ] && how=pmix || how=pmi2
    srun --mpi=list 2>&1 | grep -qw $how || continue
    ran="$ran $how ($kind)"
    for count in 2 4; do
        start srun -K --mpi=$how -N 2 -n $count "$vjp" $options --out "$work/$how-$count"
        [ $status -eq 0 ] || fault "$count processes by $how: status $status"
        grep -q "on $count processes" "$work/out" || fault "$count processes by $how: they do not say so"
        same "$work/alone" "$work/$how-$count"
    done
    printf '#!/bin/sh\n#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1\nsrun -K --mpi=%s %s %s --stop-at 5 --out %s\n' \
        $how "$vjp" "$options" "$work/batch-$how" >"$work/script"
    start sbatch --wait --output="$work/batch.log" "$work/script"
    [ $status -eq 0 ] && grep -q 'stopped at step 5' "$work/batch.log" || fault "the batch script with $how: status $status: $(tail -n 1 "$work/batch.log")"
    start srun -K --mpi=$how -N 1 -n 2 "$vjp" train --resume --out "$work/batch-$how"
    same "$work/alone" "$work/batch-$how"
done
[ -n "$ran" ] || skip "this Slurm has none of PMIx and PMI2 for $kinds"

# ---- Faults ----
start srun -n 2 "$vjp" $options --out "$work/never"
[ $status -ne 0 ] || fault 'srun without an MPI: status 0'
grep -q 'srun has started 2 processes without an MPI' "$work/err" || fault 'srun without an MPI: no sentence'
[ ! -e "$work/never/latest" ] || fault 'srun without an MPI: it has trained'

# signal SIGNAL: signals rank 3, on the other node; sets $status and $taken, the seconds until the run ended.
signal() {
    rm -rf "$work/victim"
    on one timeout 120 srun -K --mpi=$how -N 2 -n 4 "$vjp" $options --steps 3000 --validate-every 0 --timeout 4 --out "$work/victim" \
        >"$work/out" 2>"$work/err" &
    launcher=$! waited=0
    while [ "$(lines "$work/victim/metrics.jsonl")" -lt 4 ] && [ $waited -lt 600 ]; do
        sleep 0.05
        waited=$((waited + 1))
    done
    for victim in $(pgrep -f "^$vjp train .*--out $work/victim"); do
        tr '\0' '\n' <"/proc/$victim/environ" 2>/dev/null | grep -qx SLURM_PROCID=3 && kill "-$1" "$victim"
    done
    begin=$(date +%s)
    wait $launcher
    status=$?
    taken=$(($(date +%s) - begin))
    [ $status -ne 0 ] || fault "SIG$1 by $how: status 0"
    [ $taken -le 20 ] || fault "SIG$1 by $how: the run took $taken s more"
    "$vjp" sample "$work/victim" --bytes 1 >/dev/null 2>&1 || fault "SIG$1 by $how: the checkpoint does not open"
}
for kind in $kinds; do
    [ $kind = openmpi ] && how=pmix || how=pmi2
    case $ran in *" $how "*) ;; *) continue ;; esac
    signal KILL
    grep -q 'srun: error: other: task.* 3: Killed' "$work/err" || fault "SIGKILL by $how: rank 3 is not named"
    signal STOP
    [ "$(grep -c 'vjp train: rank 3 of 4 has not answered for 4 s; the last checkpoint is intact' "$work/err")" -eq 1 ] ||
        fault "SIGSTOP by $how: rank 3 is not named once"
done
finish "$version on two nodes: the same bytes by$ran$link"
