#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` on several processes that share one device, such as a GPU: the bytes of one process, with and without ZeRO and overlap.
# Usage: test_train_ranks.sh PATH_OF_VJP KINDS (openmpi, mpich) DEVICE; status 77: there is no launcher
set -u
vjp=$1
kinds=$2
device=$3
. "$(dirname "$0")/ranks.sh"
options="train $work/text --preset tiny --batch 8 --context 32 --warmup 2 --steps 6 --validate-every 3 --save-every 3 --shards 4 --device $device"
for dtype in f32 bf16; do
    "$vjp" $options --dtype $dtype --out "$work/$dtype" >"$work/out" 2>"$work/err" || fault "$dtype: one process"
    for how in '--zero on --overlap on' '--zero off --overlap on' '--zero on --overlap off' '--zero off --overlap off'; do
        for count in 2 4; do
            run=$work/$dtype-$count-$(echo "$how" | tr -d ' ')
            ranks ${found##* } $count $options --dtype $dtype $how --out "$run"
            [ $status -eq 0 ] || fault "$count processes, $dtype $how: status $status"
            grep '^no overlap' "$work/out" >>"$work/said"
            same "$work/$dtype" "$run"
        done
    done
done
finish "several processes on $device: the bytes of one; $(sort -u "$work/said" | grep . || echo 'with and without overlap')"
