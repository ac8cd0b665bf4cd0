#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` on several processes, one of which is killed (SIGKILL) at a random moment, 4 times, with VJP_ALL=1 50 times: while the run
# starts, computes or saves.
# Each time all other processes end, one line has the rank and the reason, the last checkpoint opens, and the run is resumed on another number of processes and by another MPI;
# the runs that come to their end have the bytes of one that was never killed.
# Usage: test_train_kills.sh PATH_OF_VJP KINDS (openmpi, mpich); status 77: it cannot run here
set -u
vjp=$1
kinds=$2
. "$(dirname "$0")/ranks.sh"
# Milliseconds until a kill: with 50 of them more than a run takes, so that some come to their end.
max=4 longest=1500
[ -z "${VJP_ALL:-}" ] || max=50 longest=4000
options="train $work/text --preset tiny --batch 8 --context 32 --warmup 2 --steps 24 --validate-every 6 --save-every 2 --shards 4"
"$vjp" $options --out "$work/whole" >"$work/out" 2>"$work/err" || fault 'one process'
seed=$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')
echo "seed $seed"

# random N: sets $drawn to a number from 0 to N - 1
random() {
    seed=$(((seed * 75 + 74) % 65537))
    drawn=$((seed % $1))
}

# pick WORDS...: sets $picked to one of them
pick() {
    random $#
    shift $drawn
    picked=$1
}

kills=0 starting=0 saving=0 ends=0 last=0 runs=0
while [ $kills -lt $max ] && [ $failures -eq 0 ] && [ $runs -lt 500 ]; do
    runs=$((runs + 1))
    pick $found && kind=$picked
    count=$last
    while [ $count -eq $last ]; do
        pick 1 2 4 && count=$picked
    done
    last=$count
    [ -e "$work/victim/latest" ] && how='train --resume' || how=$options
    [ "$how" != "$options" ] || rm -rf "$work/victim"
    $(launch $kind $count) "$vjp" $how --out "$work/victim" >"$work/out" 2>"$work/err" &
    parent=$!
    random $longest
    sleep "$((drawn / 1000)).$(printf %03d $((drawn % 1000)))"
    random $count
    [ -e "$work/victim/metrics.jsonl" ] && begun=1 || begun=0
    victim=$(processes $parent | sed -n "$((drawn + 1))p")
    [ -n "$victim" ] && kill -KILL "$victim" 2>/dev/null && killed=1 || killed=0
    wait $parent
    status=$?
    kills=$((kills + killed))
    what="kill $kills, rank $drawn of $count by $kind"
    # The launcher ends the others.
    waited=0
    while pgrep -f -- "--out $work/victim" >/dev/null && [ $waited -lt 100 ]; do
        sleep 0.1
        waited=$((waited + 1))
    done
    [ $waited -lt 100 ] || fault "$what: a process is left"
    if [ $status -eq 0 ]; then
        ends=$((ends + 1))
        same "$work/whole" "$work/victim"
        rm -rf "$work/victim"
        last=0
        continue
    fi
    [ $killed -eq 1 ] || fault "$what: status $status without a kill"
    # Once the processes have met, one line has the rank and the reason: Open MPI's, or the program's own.
    if [ $begun -eq 1 ]; then
        [ $kind = openmpi ] && reason="process rank $drawn with PID .*signal 9 (Killed)" || reason="vjp train: rank $drawn of $count has died: Killed (signal 9)"
        [ "$(grep -c "$reason" "$work/err")" -eq 1 ] || fault "$what: it does not say once: $reason"
        [ "$(grep -c 'has died' "$work/err")" -le 1 ] || fault "$what: another rank is named"
    fi
    [ -z "$(find "$work/victim" -maxdepth 1 -name '.checkpoint-*.tmp' 2>/dev/null)" ] || saving=$((saving + 1))
    [ -e "$work/victim/latest" ] || { starting=$((starting + 1)) && continue; }
    "$vjp" sample "$work/victim" --bytes 1 >"$work/out" 2>"$work/err" || fault "$what: the checkpoint does not open"
done
[ -e "$work/victim/latest" ] || "$vjp" $options --stop-at 1 --out "$work/victim" >"$work/out" 2>"$work/err"
ranks ${found##* } $((last == 2 ? 4 : 2)) train --resume --out "$work/victim"
[ $status -eq 0 ] || fault "the last resume: status $status"
same "$work/whole" "$work/victim"
finish "$kills kills in $runs launches by$found: $saving of them during a save, $starting before the first; $((ends + 1)) runs came to their end, with the same bytes"
