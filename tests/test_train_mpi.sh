#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` on several processes: the same bytes on 1, 2 and 4 of them, from one run to the next and after a resume on
# another number; a process that hangs, or has other data or settings, ends the run with a sentence, and the
# last checkpoint is whole. One MPI runs it all, and any other one case; with VJP_ALL=1 each MPI runs every case.
# Usage: test_train_mpi.sh PATH_OF_VJP KINDS (openmpi, mpich); status 77: there is no launcher
set -u
vjp=$1
kinds=$2
. "$(dirname "$0")/ranks.sh"
steps=8

# What the MPI makes no difference to is tested with one of them, unless all are asked for.
some=${found##* }
[ -z "${VJP_ALL:-}" ] || some=$found

# expect STATUS TEXT KIND COUNT ARGUMENTS...: as test_train.sh has it; any status but 0 fits 1, as launchers change it.
expect() {
    wanted=$1 text=$2
    shift 2
    ranks "$@"
    [ $((status != 0)) -eq "$wanted" ] || fault "$*: status $status"
    if [ "$wanted" -eq 0 ]; then
        grep -qF -e "$text" "$work/out" || fault "$*: stdout does not say: $text"
    else
        [ "$(grep -cF -e "$text" "$work/err")" -eq 1 ] || fault "$*: stderr does not say once: $text"
    fi
}

# signal SIGNAL KIND COUNT LINES ARGUMENTS...: starts a run, and signals one of its processes, chosen by $seed, once the
# record of --out "$work/victim" has so many lines. Sets $status, $rank and $taken, the seconds that the run then took.
signal() {
    sent=$1 kind=$2 count=$3 after=$4
    shift 4
    $(launch "$kind" "$count") "$vjp" "$@" --out "$work/victim" >"$work/out" 2>"$work/err" &
    parent=$! waited=0
    while [ "$(lines "$work/victim/metrics.jsonl")" -lt "$after" ] && [ $waited -lt 600 ]; do
        sleep 0.05
        waited=$((waited + 1))
    done
    rank=$((seed % count))
    victim=$(processes $parent | sed -n "$((rank + 1))p")
    begin=$(date +%s)
    [ -n "$victim" ] && kill "-$sent" "$victim" 2>/dev/null
    wait $parent
    status=$?
    taken=$(($(date +%s) - begin))
    [ -z "$victim" ] || kill -KILL "$victim" 2>/dev/null
}

sed 's/quick/slow/' "$work/text" >"$work/other"
printf 'too short' >"$work/short"
# 12 x 12 pictures of two classes, light and dark
for class in 0 1; do
    mkdir -p "$work/pictures/$class"
    i=0
    while [ $i -lt 12 ]; do
        { printf 'P5 12 12 255\n' && head -c 144 "$work/text" | tr 'a-z' "$([ $class -eq 0 ] && echo '\001-\032' || echo '\301-\332')" &&
            true; } >"$work/pictures/$class/$i.pgm"
        i=$((i + 1))
    done
done
small="--warmup 2 --steps $steps --validate-every 4 --save-every 3 --shards 4"
llama="train $work/text --preset tiny --batch 8 --context 32 $small"
convnet="train $work/pictures --model convnet --batch 4 $small"

# ---- The same bytes on any number of processes ----
for case in llama-f32 llama-bf16 convnet-f32 convnet-bf16; do
    eval "options=\"\$${case%-*} --dtype ${case#*-}\""
    "$vjp" $options --out "$work/$case" >"$work/out" 2>"$work/err" || fault "$case: one process"
    for kind in $found; do
        for count in 2 4; do
            for how in on off on-late off-late; do
                # Late: no overlap.
                name=$case-$kind-$count-$how
                case "${VJP_ALL:-}$case-$count-$how" in
                1* | llama-f32-2-off-late) ;;
                llama-f32-4-on | llama-bf16-2-on-late | convnet-f32-2-off | convnet-bf16-4-on) [ $kind = ${found##* } ] || continue ;;
                *) continue ;;
                esac
                late=
                [ "$how" = "${how%-late}" ] || late='--overlap off'
                expect 0 "done at step $steps" $kind $count $options --zero ${how%-late} $late --out "$work/$name"
                ! grep -q "$(printf '\033')" "$work/out" || fault "$name: colours in a file"
                same "$work/$case" "$work/$name"
            done
        done
    done
done
whole="$work/llama-f32"
grep -q '"shards": 4' "$whole/latest/trainer.json" || fault 'the shards are not recorded'
# Parts of a batch beside shards.
set -- $llama --accumulate 2 --steps 3
"$vjp" "$@" --out "$work/parts" >"$work/out" 2>"$work/err" || fault 'accumulate: one process'
expect 0 'done at step 3' ${found##* } 2 "$@" --out "$work/parts2"
same "$work/parts" "$work/parts2"
# Adapters, whose gradients alone are summed.
set -- train "$work/text" --lora 2 --batch 8 $small --steps 4
"$vjp" "$@" --from "$whole" --out "$work/lora" >"$work/out" 2>"$work/err" || fault 'adapters: one process'
expect 0 'done at step 4' ${found##* } 2 "$@" --from "$whole" --out "$work/lora2"
same "$work/lora" "$work/lora2"

# An optimiser and an average beside it, whose states are split; resumed with whole ones.
set -- $llama --optimizer muon --average 0.9 --steps 4
"$vjp" "$@" --out "$work/muon" >"$work/out" 2>"$work/err" || fault 'muon: one process'
expect 0 'stopped at step 2' ${found##* } 2 "$@" --stop-at 2 --out "$work/muon2"
expect 0 'done at step 4' ${found##* } 2 train --resume --zero off --out "$work/muon2"
same "$work/muon" "$work/muon2"

# Documents: one process makes the cache, and a bad line is the failure of all.
sed 's/.*/{"text": "&"}/' "$work/text" >"$work/documents.jsonl"
set -- train "$work/documents.jsonl" --preset tiny --batch 8 --context 32 $small --steps 3
"$vjp" "$@" --out "$work/documents" >"$work/out" 2>"$work/err" || fault 'documents: one process'
rm -r "$work/.vjp-cache"
expect 0 'done at step 3' ${found##* } 4 "$@" --out "$work/documents4"
same "$work/documents" "$work/documents4"
[ "$(find "$work/.vjp-cache" -name '*.tokens' | wc -l)" -eq 1 ] || fault 'documents: there is not one cache'
{ cat "$work/documents.jsonl" && echo '{"text": 7}'; } >"$work/bad.jsonl"
expect 1 'bad.jsonl: line 501: "text" is 7; it must be a text' ${found##* } 2 train "$work/bad.jsonl" --preset tiny --shards 2 --out "$work/refused"

# The example, a network of its own, on 4 processes.
example=$(dirname "$vjp")/several_processes
"$example" >"$work/alone" 2>"$work/err" || fault 'the example: one process'
grep -q '^step 400  loss 0' "$work/alone" || fault 'the example does not learn'
for kind in $some; do
    started=$vjp vjp=$example
    ranks $kind 4
    vjp=$started
    cmp -s "$work/alone" "$work/out" || fault "the example: other losses on 4 processes by $kind"
done

# ---- Other numbers after a resume; a signal to one process saves and stops all ----
for kind in $some; do
    expect 0 'stopped at step 2' $kind 4 $llama --stop-at 2 --out "$work/resumed-$kind"
    expect 0 'stopped at step 5' $kind 2 train --resume --stop-at 5 --zero off --out "$work/resumed-$kind"
    "$vjp" train --resume --out "$work/resumed-$kind" >"$work/out" 2>"$work/err" || fault "$kind: resume on one process"
    same "$whole" "$work/resumed-$kind"
done
if [ -n "${VJP_ALL:-}" ]; then
    # 8 processes; batches of 8 shards are another run.
    "$vjp" $llama --shards 8 --out "$work/eight" >"$work/out" 2>"$work/err" || fault '8 shards: one process'
    for kind in $found; do
        expect 0 'stopped at step 3' $kind 8 $llama --shards 8 --stop-at 3 --out "$work/eight-$kind"
        expect 0 "done at step $steps" $kind 2 train --resume --out "$work/eight-$kind"
        same "$work/eight" "$work/eight-$kind"
    done
fi
# Processors that differ: every instruction set with FMA that this one has, in rank 1.
kind=${found##* }
for set in $("$vjp" info --json | sed -n 's/.*"instruction_sets": \[\([^]]*\)\].*/\1/p' | tr -d '",'); do
    [ $set != plain ] || continue
    rm -rf "$work/sets"
    timeout 60 $(launch $kind 1) "$vjp" $llama --out "$work/sets" : -n 1 env VJP_ISA=$set "$vjp" $llama --out "$work/sets" >"$work/out" 2>"$work/err" ||
        fault "rank 1 with $set: status $?"
    same "$whole" "$work/sets"
done
seed=1
rm -rf "$work/victim"
signal TERM $kind 2 1 $llama --steps 3000 --validate-every 0
[ $status -eq 0 ] || fault "SIGTERM: status $status"
[ "$(readlink "$work/victim/latest")" = "checkpoint-$(printf %08d "$(lines "$work/victim/metrics.jsonl")")" ] ||
    fault 'SIGTERM: the last step is not saved'

# ---- A process that is slow, and one that hangs; test_train_kills.sh kills some ----
# Stopped for a while, again and again.
rm -rf "$work/slow"
$(launch ${found##* } 2) "$vjp" $llama --out "$work/slow" >"$work/out" 2>"$work/err" &
parent=$! stops=0
while kill -0 $parent 2>/dev/null && [ $stops -lt 100 ]; do
    victim=$(processes $parent | tail -n 1)
    [ -z "$victim" ] || { kill -STOP "$victim" && sleep 0.2 && kill -CONT "$victim"; } 2>/dev/null
    sleep 0.1
    stops=$((stops + 1))
done
wait $parent || fault 'a slow process: the run fails'
same "$whole" "$work/slow"

seed=$(od -An -N1 -tu1 /dev/urandom | tr -d ' ')
for kind in $some; do
    rm -rf "$work/victim"
    signal STOP $kind 4 4 $llama --steps 3000 --validate-every 0 --timeout 2
    [ $status -ne 0 ] || fault "a hanging process ($kind): the status is 0"
    [ $taken -le 12 ] || fault "a hanging process ($kind): the run took $taken s more"
    [ "$(grep -c "vjp train: rank $rank of 4 has not answered for 2 s; the last checkpoint is intact" "$work/err")" -eq 1 ] ||
        fault "a hanging process ($kind): rank $rank is not named once"
    "$vjp" sample "$work/victim" --bytes 1 >"$work/out" 2>"$work/err" || fault "a hanging process ($kind): the checkpoint does not open"
done

# ---- What is refused, by every process, with one sentence ----
kind=${found##* }
one=$(launch $kind 1)
never="--out $work/never"
expect 1 '4 processes cannot share 2 shards: --shards must be a multiple of their number' $kind 4 $llama --shards 2 $never
expect 1 'a batch of 6 rows cannot be split into 4 shards' $kind 2 $llama --batch 6 $never
ranks $kind 3 $llama $never
grep -q 'there are 3 processes; it must be a power of two' "$work/err" || fault 'three processes: no sentence'
expect 1 '--zero is "perhaps"; it must be on or off' $kind 2 $llama --zero perhaps $never
# both TEXT ARGUMENTS : -n 1 vjp ARGUMENTS: runs that fail in both processes, with this text once
both() {
    text=$1
    shift
    timeout 60 $one "$vjp" "$@" >"$work/out" 2>"$work/err"
    status=$?
    [ $status -ne 0 ] && [ $status -ne 124 ] || fault "$text: status $status"
    [ "$(grep -cF -e "vjp train: $text" "$work/err")" -eq 1 ] || fault "it does not say once: $text"
}
# unlike TEXT ARGUMENTS...: rank 1 has these arguments, rank 0 those of $llama
unlike() {
    text=$1
    shift
    both "$text" $llama $never : -n 1 "$vjp" "$@"
}
unlike 'rank 1 has other data than rank 0, so they cannot train together' train "$work/other" ${llama#train "$work/text"} $never
unlike "rank 1: the text has 9 bytes" train "$work/short" ${llama#train "$work/text"} $never
unlike 'rank 1 has other settings than rank 0, so they cannot train together' $llama --lr 1e-4 $never
unlike 'rank 1 has other settings than rank 0, so they cannot train together' $llama --zero off $never
LC_ALL=C sed 's/vjp-sources:./vjp-sources:x/' "$vjp" >"$work/changed" && chmod +x "$work/changed"
ln -s "$(dirname "$vjp")"/libvjp-* "$work"
both 'rank 1 has other code than rank 0, so they cannot train together' $llama $never : -n 1 "$work/changed" $llama $never
unlike "rank 1: $work/elsewhere is not there: --out must be a folder that all processes share" $llama --out "$work/elsewhere"
unlike 'unknown device "nothing"' $llama --device nothing $never
unlike "rank 1: $work/absent: it cannot be opened" train "$work/absent" ${llama#train "$work/text"} $never
for step in 1 2; do
    "$vjp" $llama --stop-at $step --out "$work/step$step" >"$work/out" 2>"$work/err" || fault "--stop-at $step"
done
both 'rank 1 has other weights than rank 0, so they cannot train together' train --resume --out "$work/step1" : -n 1 "$vjp" train --resume --out "$work/step2"
both "rank 1: $work/absent: it cannot be opened" train --resume --out "$work/step1" : -n 1 "$vjp" train --resume --out "$work/absent"
lora="train $work/text --lora 2 --batch 8 $small $never"
both 'rank 1 has other base weights than rank 0' $lora --from "$work/step1" : -n 1 "$vjp" $lora --from "$work/step2"
[ -z "$(ls -A "$work/never" 2>/dev/null | grep checkpoint)" ] || fault 'a refused run has saved'
# A process whose disk is full; what MPI shares by files fits.
printf '#!/bin/sh\ntrap "" XFSZ\nulimit -f 9600\nexec "$@"\n' >"$work/limited" && chmod +x "$work/limited"
both "rank 1: $work/step1/.checkpoint-00000003.tmp/optimizer.safetensors: it cannot be written: File too large; the last checkpoint is intact" \
    train --resume --out "$work/step1" : -n 1 "$work/limited" "$vjp" train --resume --out "$work/step1"
expect 0 "done at step $steps" $kind 2 train --resume --out "$work/step1"
same "$whole" "$work/step1"
rm -rf "$work/nan"
expect 1 'where it first appears: ' $kind 2 $llama --lr 1000 --clip 0 --warmup 0 --save-every 1 --steps 200 --out "$work/nan"
grep -qE 'step [0-9]+: the (loss|norm of the gradients) is -?(nan|inf); .*the last checkpoint is intact' "$work/err" || fault 'a NaN: not the whole sentence'
"$vjp" $llama --shards 3 $never >"$work/out" 2>"$work/err" && fault '--shards 3: status 0'
grep -q 'shards is 3; it must be a power of two' "$work/err" || fault '--shards 3: no sentence'
PMI_RANK=0 LD_LIBRARY_PATH= "$vjp" $llama --group nothing $never >"$work/out" 2>"$work/err" && fault '--group nothing: status 0'
grep -q 'group nothing: its engine is not installed' "$work/err" || fault '--group nothing: no sentence'

finish "training on several processes: all as it should be, by$found"
