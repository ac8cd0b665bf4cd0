#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train`, `vjp sample` and `vjp graph` from outside, on data that this script writes: the same losses for any number
# of threads; a run that is stopped, interrupted or killed continues to the very bytes of one that never was; what cannot be
# read, written or computed ends with a sentence and leaves the last checkpoint whole.
# Usage: test_train.sh PATH_OF_VJP
set -u
vjp=$1
. "$(dirname "$0")/runs.sh"
steps=24

# xml FILE: whether it is well-formed, where something here can tell.
xml() {
    if command -v python3 >/dev/null; then
        python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$1" 2>"$work/err" || fault "$1 is no XML"
    elif command -v xmllint >/dev/null; then
        xmllint --noout "$1" 2>"$work/err" || fault "$1 is no XML"
    fi
    grep -qiE '[ "](-?nan|-?inf)[", ]' "$1" && fault "$1 holds a number that is none"
}

# wait_for FILE COUNT: until the file has so many lines, at most a minute.
wait_for() {
    waited=0
    while [ "$(lines "$1")" -lt "$2" ] && [ $waited -lt 1200 ]; do
        sleep 0.05
        waited=$((waited + 1))
    done
}

small="--preset tiny --batch 2 --context 32 --warmup 2 --steps $steps --validate-every 5 --save-every 4"
train="train $work/text $small"

# ---- A run from its beginning to its end ----
expect 0 "done at step $steps" $train --out "$work/whole"
grep -q "^step *1/$steps  loss 5\." "$work/out" || fault 'no line for step 1'
grep -q 'validation [0-9]' "$work/out" || fault 'no validation'
grep -q 'arena' "$work/out" || fault 'nothing on memory'
for file in config.json model.safetensors optimizer.safetensors trainer.json; do
    [ -s "$work/whole/latest/$file" ] || fault "no $file"
done
[ "$(lines "$work/whole/metrics.jsonl")" -eq $steps ] || fault 'metrics.jsonl: not a line a step'
[ "$(cd "$work/whole" && echo checkpoint-*)" = 'checkpoint-00000020 checkpoint-00000024' ] || fault 'not the last two checkpoints'
[ -z "$(ls -A "$work/whole" | grep tmp)" ] || fault 'a temporary file is left'
xml "$work/whole/loss.svg"
# It learns: the last loss is below the first.
awk -F'"loss": *' '{ split($2, part, ","); loss[NR] = part[1] } END { exit !(loss[NR] < loss[1] - 0.5) }' \
    "$work/whole/metrics.jsonl" || fault 'the loss does not fall'
expect 0 "done at step $steps" train --resume --out "$work/whole" # nothing is left to do

# ---- Data that were moved, the hash of all losses, and sizes ----
losses=$(sed -n 's/^losses: //p' "$work/out")
grep -q "\"loss_hash\": \"$losses\"" "$work/whole/latest/trainer.json" || fault 'the hash of the losses is not in the checkpoint'
cp "$work/text" "$work/before"
expect 0 'stopped at step 10' train "$work/before" $small --out "$work/moved" --stop-at 10
mv "$work/before" "$work/after"
expect 1 'before: it cannot be opened' train --resume --out "$work/moved"
expect 0 "losses: $losses" train "$work/after" --resume --out "$work/moved"
cmp -s "$work/whole/latest/model.safetensors" "$work/moved/latest/model.safetensors" || fault 'moved: other bytes'
echo more >>"$work/after"
expect 1 'has changed since this run began' train "$work/after" --resume --out "$work/moved"
expect 0 'losses: ' $train --seed 2 --stop-at 1 --out "$work/seed"
[ "$(sed -n 's/^losses: //p' "$work/out")" != "$losses" ] || fault 'another seed has the same hash of losses'
expect 0 'stopped at step 1' $train --dim 48 --layers 3 --heads 6 --kv-heads 2 --ffn 80 --stop-at 1 --out "$work/sizes"
for size in '"hidden_size": 48' '"num_hidden_layers": 3' '"num_attention_heads": 6' '"num_key_value_heads": 2' '"intermediate_size": 80'; do
    grep -q "$size" "$work/sizes/latest/config.json" || fault "config.json has no $size"
done
expect 0 'stopped at step 2' train --resume --stop-at 2 --out "$work/sizes"
expect 1 'cannot be split into 5 heads' $train --heads 5 --out "$work/never"
expect 1 '"num_key_value_heads" is 3, which does not divide' $train --heads 4 --kv-heads 3 --out "$work/never"

# ---- The arena that is printed is large enough for every program: muon's update needs more than so small a part ----
for optimizer in adamw muon; do
    expect 0 'done at step 1' train "$work/text" --preset tiny --batch 1 --context 8 --accumulate 2 --steps 1 --optimizer $optimizer --out "$work/arena.$optimizer"
    sed -n 's/.*; arena \(.*\) (without reuse.*/\1/p' "$work/out" >"$work/arena.$optimizer.text"
done
[ -s "$work/arena.muon.text" ] || fault 'no arena'
cmp -s "$work/arena.adamw.text" "$work/arena.muon.text" && fault 'the arena of the first program is printed'

# ---- Any number of threads, any way of stopping: the same bytes ----
expect 0 '"loss": ' $train --json --out "$work/twice"
[ "$(lines "$work/out")" -eq $steps ] || fault '--json: not a line a step'
same "$work/whole" "$work/twice"
for threads in 1 2 5; do # two steps only: five threads on fewer cores wait for each other
    expect 0 'stopped at step 2' $train --stop-at 2 --threads $threads --out "$work/threads$threads"
    same "$work/threads1" "$work/threads$threads"
done
# --recompute gives the same losses, too; its trainer.json tells of it.
expect 0 'done' $train --recompute --out "$work/again"
cmp -s "$work/whole/latest/model.safetensors" "$work/again/latest/model.safetensors" || fault '--recompute: other bytes'
grep -q '"recompute": 4,' "$work/again/latest/trainer.json" || fault '--recompute: not all four blocks'
# Older checkpoints say true where all blocks are recomputed.
sed 's/"recompute": 4,/"recompute": true,/' "$work/again/latest/trainer.json" >"$work/json" &&
    cp "$work/json" "$work/again/latest/trainer.json"
expect 0 "done at step $steps" train --resume --out "$work/again"
grep -q '"recompute": 4,' "$work/again/latest/trainer.json" || fault 'true is not read as all blocks'

# Limits of memory between what a step needs and what it needs with all blocks recomputed, for which values that one pass
# computes are recomputed, or a block, too: the same bytes, also after a resume, which keeps the choice.
needed() {
    "$vjp" graph llama --batch 4 --context 64 --json "$@" | sed 's/.*"training_bytes": \([0-9]*\).*/\1/'
}
most=$(needed) least=$(needed --recompute)
some=$(((7 * most + 3 * least) / 10 / 1024)) little=$(((3 * most + 7 * least) / 10 / 1024))
wider="train $work/text --preset tiny --batch 4 --context 64 --steps 4"
expect 0 'done' $wider --out "$work/free"
expect 0 'allowed; values that take one pass over memory are recomputed, which saves ' $wider --memory ${some}KiB --stop-at 2 --out "$work/limited$some"
expect 0 ' blocks are recomputed, which saves ' $wider --memory ${little}KiB --stop-at 2 --out "$work/limited$little"
grep -q '"recompute_mlp": 0,' "$work/limited$some/latest/trainer.json" || fault '--memory: a block is recomputed without need'
grep -q '"recompute_mlp": [1234],' "$work/limited$little/latest/trainer.json" || fault '--memory: the blocks are not recorded'
for limit in $some $little; do
    grep -q "\"memory\": $((limit * 1024))," "$work/limited$limit/latest/trainer.json" || fault '--memory is not recorded'
    expect 0 ' are recomputed' train --resume --out "$work/limited$limit"
    for file in model optimizer; do
        cmp -s "$work/free/latest/$file.safetensors" "$work/limited$limit/latest/$file.safetensors" ||
            fault "--memory: other bytes in $file"
    done
done
expect 1 'GiB even with blocks recomputed; --memory allows 0.0009766 GiB' $train --memory 1MiB --out "$work/never"
grep -q 'training needs at least 0.0[0-9]* GiB' "$work/err" || fault '--memory: it does not say how much is needed'
expect 1 'cpu does not report its memory' $train --memory 50% --out "$work/never"
for amount in 5 5Gib GiB -1GiB 0MiB 101% nan% 1e30TiB; do
    expect 2 "such as 40GiB, 512MiB or 24GB" $train --memory "$amount" --out "$work/never"
done
expect 2 '--memory chooses the blocks' $train --memory 1GiB --recompute --out "$work/never"
expect 2 '--memory cannot be used with --resume' train --resume --memory 1GiB --out "$work/limited$some"

# An f32 residual stream beside bf16 activations: another curve, kept by a resume.
expect 0 'done' $train --dtype bf16 --out "$work/narrow"
expect 0 'stopped' $train --dtype bf16 --residual f32 --stop-at 5 --out "$work/wide"
grep -q '"residual": "f32"' "$work/wide/latest/trainer.json" || fault '--residual is not recorded'
expect 0 'done' train --resume --out "$work/wide"
expect 0 'done' $train --dtype bf16 --residual f32 --out "$work/wide2"
same "$work/wide" "$work/wide2"
cmp -s "$work/narrow/latest/model.safetensors" "$work/wide/latest/model.safetensors" && fault '--residual changes nothing'
expect 2 '--residual is bf16; it must be f32 or the type of --dtype' $train --residual bf16 --out "$work/never"

# Fewer bits for moments and gradients, and a scaled loss: kept by a resume, to the same bytes.
for options in '--dtype f16' '--dtype bf16 --moments bf16 --gradients bf16'; do
    rm -rf "$work/few" "$work/few2"
    expect 0 'stopped' $train $options --steps 6 --stop-at 3 --out "$work/few"
    expect 0 'done' train --resume --out "$work/few"
    expect 0 'done' $train $options --steps 6 --out "$work/few2"
    same "$work/few" "$work/few2"
    [ "$options" = '--dtype f16' ] || continue
    grep -q '"loss_scale": ' "$work/few2/metrics.jsonl" || fault 'f16: no loss scale in the record'
    skipped=$(grep -c '"skipped": true' "$work/few2/metrics.jsonl") # the products of another engine may skip none
    [ "$(grep -c 'was skipped: its gradients were not finite' "$work/out")" -eq "$skipped" ] || fault 'f16: skipped steps are not shown'
    grep -q "the loss scale is [0-9]*; steps skipped: $skipped\$" "$work/out" || fault 'f16: nothing on the loss scale'
done
grep -q '"dtype":"BF16"' "$work/few/latest/optimizer.safetensors" || fault '--moments bf16: no moments in BF16'
grep -q '"dtype":"F32"' "$work/few/latest/optimizer.safetensors" && fault '--moments bf16: moments in F32'
# Settings that do not belong to the moments.
sed 's/"moments": "bf16"/"moments": "f32"/' "$work/few/latest/trainer.json" >"$work/json" &&
    cp "$work/json" "$work/few/latest/trainer.json"
expect 1 'is BF16 in the file, and the run keeps it in f32' train --resume --out "$work/few"
expect 2 '--moments is f16; it must be f32 or bf16' $train --moments f16 --out "$work/never"
expect 2 '--moments is for AdamW' $train --moments bf16 --optimizer sgd --out "$work/never"
expect 2 'with --moments bf16 it must be at most 0.99' $train --moments bf16 --beta2 0.999 --out "$work/never"
expect 2 '--gradients bf16 needs --dtype bf16' $train --gradients bf16 --out "$work/never"
expect 2 '--gradients bf16 is for batches of one part' $train --dtype bf16 --gradients bf16 --accumulate 2 --out "$work/never"
for scale in 0 -1 nan 1e40 2x; do
    expect 2 'it must be auto, off or a number' $train --loss-scale "$scale" --out "$work/never"
done
expect 2 '--moments cannot be used with --resume' train --resume --moments bf16 --out "$work/few2"

# And the rewrites of graphs, which the CPU does without.
export VJP_REWRITES=+all
expect 0 'done' $train --out "$work/rewritten"
unset VJP_REWRITES
same "$work/whole" "$work/rewritten"

expect 0 'stopped at step 7' $train --stop-at 7 --out "$work/stopped" # off the beat of --save-every
grep -q 'resume: vjp train --resume' "$work/out" || fault '--stop-at: does not say how to resume'
expect 0 'stopped at step 8' train --resume --stop-at 8 --out "$work/stopped" --threads 2
expect 0 "done at step $steps" train -o "$work/stopped" --resume
same "$work/whole" "$work/stopped"

# saved RUN: its last step is in its newest checkpoint
saved() {
    [ "$(readlink "$1/latest")" = "checkpoint-$(printf %08d "$(lines "$1/metrics.jsonl")")" ] ||
        fault "$1: the last step is not saved"
}

# Ctrl-C and a closed terminal, in a run that would save at its end only; once more if that came first
for signal in INT HUP; do
    tries=0
    while [ $tries -lt 5 ]; do
        rm -rf "$work/$signal"
        "$vjp" $train --save-every 0 --out "$work/$signal" >"$work/out" 2>"$work/err" &
        pid=$!
        wait_for "$work/$signal/metrics.jsonl" 2
        kill -$signal $pid
        wait $pid || fault "SIG$signal: the status is not 0"
        [ "$(lines "$work/$signal/metrics.jsonl")" -eq $steps ] || break
        tries=$((tries + 1))
    done
    grep -q 'stopped at step' "$work/out" || fault "SIG$signal: does not say where it stopped"
    saved "$work/$signal"
    expect 0 "done at step $steps" train --resume --out "$work/$signal"
    same "$work/whole" "$work/$signal"
done
# Under nohup a closed terminal does not stop a run.
(
    trap '' HUP
    exec "$vjp" $train --save-every 0 --out "$work/nohup" >"$work/out" 2>"$work/err"
) &
pid=$!
wait_for "$work/nohup/metrics.jsonl" 1
kill -HUP $pid
wait $pid || fault 'nohup: the status is not 0'
same "$work/whole" "$work/nohup"

# Output that cannot be written stops a run, and its steps are saved.
{ "$vjp" $train --save-every 0 --json --out "$work/pipe" 2>"$work/err"; echo $? >"$work/status"; } | head -n 2 >"$work/out"
[ "$(cat "$work/status")" -eq 1 ] || fault '| head: the status is not 1'
grep -q 'standard output cannot be written: Broken pipe; the run is saved at step' "$work/err" || fault '| head: no sentence'
saved "$work/pipe"
[ "$(lines "$work/pipe/metrics.jsonl")" -lt $steps ] || fault '| head: the run did not stop'
expect 0 "done at step $steps" train --resume --out "$work/pipe"
same "$work/whole" "$work/pipe"
if [ -c /dev/full ]; then
    "$vjp" $train --save-every 0 --out "$work/device" >/dev/full 2>"$work/err" && fault '>/dev/full: the status is 0'
    grep -q 'No space left on device; the run is saved at step' "$work/err" || fault '>/dev/full: no sentence'
    saved "$work/device"
fi
# A closed stdout is a wish for silence, and nothing is printed into the files of the run.
"$vjp" $train --out "$work/silent" >&- 2>"$work/err" || fault '>&-: the status is not 0'
same "$work/whole" "$work/silent"

# ---- One run at a time in a folder ----
"$vjp" $train --steps 100000 --out "$work/busy" >"$work/out" 2>"$work/err" &
pid=$!
wait_for "$work/busy/metrics.jsonl" 5
expect 1 "$work/busy: another run is training there (process $pid)" train --resume --out "$work/busy"
rm -rf "$work/busy"/checkpoint-* "$work/busy/latest" # as if it had not saved yet
expect 1 "$work/busy: another run is training there (process $pid)" $train --out "$work/busy"
kill -KILL $pid 2>/dev/null
wait $pid 2>/dev/null

# ---- A copy in which the link `latest` is a folder ----
expect 0 'stopped at step 5' $train --stop-at 5 --out "$work/linked"
cp -rL "$work/linked" "$work/copied"
expect 0 'stopped at step 9' train --resume --stop-at 9 --out "$work/copied"
[ -L "$work/copied/latest" ] || fault 'cp -rL: latest is not a link again'
saved "$work/copied"
cp -rL "$work/copied" "$work/copied2"
rm -rf "$work/copied2/latest" && cp -r "$work/linked/checkpoint-00000005" "$work/copied2/latest" # older than its checkpoints
expect 0 "done at step $steps" train --resume --out "$work/copied2"
same "$work/whole" "$work/copied2"

# SIGKILL at any moment, also while it saves
seed=$(od -An -N2 -tu2 /dev/urandom | tr -d ' ')
kills=0
while [ $kills -lt 5 ]; do
    again='--resume'
    [ -e "$work/killed/latest" ] || again="$work/text $small"
    before=$(lines "$work/killed/metrics.jsonl")
    "$vjp" train $again --out "$work/killed" >"$work/out" 2>"$work/err" &
    pid=$!
    seed=$(((seed * 75 + 74) % 65537))
    # A resumed run first drops the lines after its checkpoint, so the number of lines may be the old one.
    wait_for "$work/killed/metrics.jsonl" $((before > steps - 6 ? steps - 4 : before + 1 + seed % 4))
    sleep "0.0$((seed % 10))"
    kill -KILL $pid 2>/dev/null
    wait $pid 2>/dev/null
    kills=$((kills + 1))
    [ ! -e "$work/killed/latest" ] || "$vjp" sample "$work/killed" --bytes 1 >"$work/out" 2>"$work/err" ||
        fault "killed (seed $seed): the checkpoint does not open"
done
expect 0 "done at step $steps" train --resume --out "$work/killed"
same "$work/whole" "$work/killed"
[ -z "$(ls -A "$work/killed" | grep tmp)" ] || fault 'killed: a temporary file is left'

# ---- A full disk: a sentence, and the last checkpoint is whole ----
expect 0 'stopped' $train --stop-at 4 --out "$work/full"
(
    trap '' XFSZ
    ulimit -f 6000 # less than a checkpoint's files, in blocks of 512 or of 1024 bytes
    "$vjp" train --resume --out "$work/full" >"$work/out" 2>"$work/err"
)
[ $? -eq 1 ] || fault 'a full disk: the status is not 1'
grep -q '\.safetensors: .*File too large' "$work/err" || fault 'a full disk: no sentence'
[ "$(readlink "$work/full/latest")" = checkpoint-00000004 ] || fault 'a full disk: latest is another'
expect 0 "done at step $steps" train --resume --out "$work/full"
same "$work/whole" "$work/full"

# ---- A loss that is no number: the step, the tensor, and nothing lost ----
expect 1 'where it first appears: ' $train --out "$work/nan" --lr 1000 --clip 0 --warmup 0 --save-every 1 --steps 200
grep -qE 'vjp train: step [0-9]+: the (loss|norm of the gradients) is -?(nan|inf); .* makes .*the last checkpoint is intact' \
    "$work/err" || fault 'a NaN: not the whole sentence'
# Its weights are whole, but may predict nothing.
"$vjp" sample "$work/nan" --bytes 1 >"$work/out" 2>"$work/err" ||
    grep -q "the model's prediction is not a number; its training may have diverged" "$work/err" ||
    fault 'a NaN: the checkpoint is not intact'

# ---- What is refused ----
printf '' >"$work/empty"
printf 'too short' >"$work/short"
mkdir "$work/nothing"
expect 1 "$work/absent: " train "$work/absent" --out "$work/never"
expect 1 "$work/empty: there is no text in it" train "$work/empty" --out "$work/never"
expect 1 "$work/nothing: there is no text in it" train "$work/nothing" --out "$work/never"
expect 1 'the text has 9 bytes' train "$work/short" --out "$work/never"
expect 1 'a context of 100000000 needs at least' train "$work/text" --context 100000000 --out "$work/never"
expect 1 'it has neither a config.json nor a checkpoint' train --resume --out "$work/nothing"
expect 1 'cannot be opened: No such file' train --resume --out "$work/never"
expect 1 'already holds a run' $train --out "$work/whole"
expect 2 'unknown preset "huge"; presets are tiny, small' train "$work/text" --preset huge --out "$work/never"
expect 2 'unknown model "bert"; models are llama and convnet' train "$work/text" --model bert --out "$work/never"
expect 1 'unknown device "tpu"' $train --device tpu --out "$work/never"
expect 1 "$work/nothing: it has neither" $train --from "$work/nothing" --out "$work/never"
expect 1 'a context of 64 is too long; the model was made for at most 32' train "$work/text" --context 64 --from "$work/whole" --out "$work/never"
expect 1 'Not a directory' $train --out "$work/text/run"
expect 2 '--dtype is i32; it must be f32, bf16 or f16' $train --dtype i32 --out "$work/never"
expect 2 '--steps cannot be used with --resume' train --resume --steps 50 --out "$work/whole"
expect 2 '--lr=1 cannot be used with --resume' train --resume --lr=1 --out "$work/whole"
expect 2 '--steps is "0"' $train --steps 0 --out "$work/never"
expect 2 '--lr is "fast"' $train --lr fast --out "$work/never"
expect 2 'unexpected argument' train "$work/text" "$work/text"
[ ! -e "$work/never" ] || fault 'a refused run has left a folder'

# Only regular files are read, and the reason is the system's.
mkfifo "$work/fifo"
mkdir "$work/photo" "$work/photo/class"
mkfifo "$work/photo/class/pipe"
expect 1 '/dev/zero: it is a device; only regular files are read' train /dev/zero --out "$work/never"
expect 1 "$work/fifo: it is a pipe; only regular files are read" train "$work/fifo" --out "$work/never"
expect 1 'class/pipe: it is a pipe; only regular files are read' train "$work/photo" --model convnet --out "$work/never"
expect 2 'DATA is empty; it must be a file or a folder' train '' --out "$work/never"
expect 1 'it cannot be opened: No such file' train "$work/absent" --out "$work/never"
if [ "$(id -u)" -ne 0 ]; then
    printf secret >"$work/secret" && chmod 0 "$work/secret"
    mkdir "$work/closed" && printf text >"$work/closed/text" && chmod 0 "$work/closed"
    expect 1 'it cannot be opened: Permission denied' train "$work/secret" --out "$work/never"
    expect 1 'it cannot be opened: Permission denied' train "$work/closed/text" --out "$work/never"
    chmod 700 "$work/closed"
fi
expect 1 'is a single checkpoint: continue its run with --resume --out and the folder' train --resume --out "$work/whole/checkpoint-00000020"
expect 1 'is a single checkpoint' train --resume --out "$work/whole/latest"
expect 2 '--allow-other-bits is for --resume' $train --allow-other-bits --out "$work/never"
[ ! -e "$work/never" ] || fault 'a refused run has left a folder'

# ---- A path of bytes that are not UTF-8 ----
strange=$(printf 'caf\351 "\\\377')
cp "$work/text" "$work/$strange"
expect 0 'stopped at step 3' train "$work/$strange" $small --stop-at 3 --out "$work/out $strange"
expect 0 "done at step $steps" train --resume --out "$work/out $strange"
cmp -s "$work/whole/latest/model.safetensors" "$work/out $strange/latest/model.safetensors" || fault 'a strange path: other bytes'
expect 0 '' sample "$work/out $strange" --bytes 1
expect 0 '' train "$work/$strange" $small --steps 1 --from "$work/out $strange" --out "$work/from strange"
if command -v python3 >/dev/null; then
    python3 -c 'import json, sys; json.loads(open(sys.argv[1], "rb").read())' "$work/out $strange/latest/trainer.json" 2>"$work/err" ||
        fault 'a strange path: trainer.json is not JSON'
fi

# ---- The arithmetic of a run is part of it ----
grep -q '"device": "cpu"' "$work/whole/latest/trainer.json" || fault 'trainer.json does not name the device'
grep -qE '"instructions": "(fma|plain)"' "$work/whole/latest/trainer.json" || fault 'trainer.json does not name the instructions'
grep -q '"products": "builtin"' "$work/whole/latest/trainer.json" || fault 'f32: trainer.json does not name the products'
narrow="train $work/text $small --dtype bf16 --steps 4"
VJP_GEMM=builtin "$vjp" $narrow --out "$work/builtin" >"$work/out" 2>"$work/err" || fault 'bf16 with built-in products'
expect 0 'done at step 4' $narrow --products builtin --out "$work/chosen"
same "$work/builtin" "$work/chosen"
grep -q '"products": "builtin"' "$work/chosen/latest/trainer.json" || fault '--products: trainer.json does not name the products'
expect 1 'unknown matrix products "tf32"; they must be one of builtin, amx, blas' $narrow --products tf32 --out "$work/none"
expect 1 'ref: matrix_products is "builtin", but this device has no choice of it' $narrow --device ref --products builtin --out "$work/none"
expect 2 '--products cannot be used with --resume: a run keeps the products it began with, unless --allow-other-bits is given' train --resume --products builtin --out "$work/chosen"
expect 1 'unknown matrix products "tf32"' train --resume --allow-other-bits --products tf32 --out "$work/chosen"
VJP_GEMM=builtin "$vjp" $narrow --stop-at 2 --out "$work/resumed" >"$work/out" 2>"$work/err" || fault 'bf16 with built-in products'
expect 0 'done at step 4' train --resume --out "$work/resumed" # where AMX would be the default
same "$work/builtin" "$work/resumed"
expect 0 'stopped at step 2' $narrow --stop-at 2 --out "$work/own"
products=$("$vjp" info --json | sed 's/.*"matrix_products": "\([^"]*\)".*/\1/')
grep -q "\"products\": \"$products\"" "$work/own/latest/trainer.json" || fault "bf16: trainer.json does not say $products"
# as on a machine that has no such engine
sed "s/\"products\": \"$products\"/\"products\": \"abacus\"/" "$work/own/latest/trainer.json" >"$work/cut"
cp "$work/cut" "$work/own/latest/trainer.json"
expect 1 "this run was computed on cpu with fma and products by abacus; here it would continue on cpu" train --resume --out "$work/own"
# as on a machine that has no such card
cp -r "$work/own" "$work/card"
sed 's/"device": "cpu"/"device": "cuda:0"/; s/"instructions": "[a-z]*"/"instructions": ""/; s/"products": "abacus"/"products": "tf32"/' "$work/cut" >"$work/card/latest/trainer.json"
expect 1 "this run was computed on cuda:0 with products by tf32; here it would continue on cpu" train --resume --device cpu --out "$work/card"
cp -r "$work/own" "$work/asked"
expect 0 'this run was computed on cpu with fma and products by abacus' train --resume --allow-other-bits --products builtin --out "$work/asked"
grep -q '"products": "builtin"' "$work/asked/latest/trainer.json" || fault '--resume --products: the products are not recorded'
expect 0 'done at step 4' train --resume --allow-other-bits --products builtin --out "$work/asked"
grep -q 'was computed on' "$work/out" && fault 'a run that is resumed with the same bits says that they differ'
# as of a device of a third party, whose choice is its own: it is opened with what was recorded
cp -r "$work/card" "$work/third"
sed 's/"device": "cuda:0"/"device": "ref"/; s/"products": "tf32"/"products": "fast"/' "$work/card/latest/trainer.json" >"$work/third/latest/trainer.json"
expect 1 'ref: matrix_products is "fast", but this device has no choice of it' train --resume --out "$work/third"
expect 0 'done at step 4' train --resume --allow-other-bits --out "$work/own"
grep -q "\"products\": \"$products\"" "$work/own/latest/trainer.json" || fault '--allow-other-bits: the old products stay recorded'
expect 1 'here it would continue on ref' train --resume --device ref --out "$work/whole"
if "$vjp" info --json | grep -q '"instruction_sets": \[[^]]*"plain"'; then
    VJP_ISA=plain "$vjp" $train --steps 4 --out "$work/plain" >"$work/out" 2>"$work/err" || fault 'the set without FMA'
    VJP_ISA=plain "$vjp" $train --steps 4 --stop-at 2 --out "$work/plain2" >"$work/out" 2>"$work/err" || fault 'the set without FMA'
    expect 0 'done at step 4' train --resume --out "$work/plain2"
    same "$work/plain" "$work/plain2"
fi
# A checkpoint that has not recorded it is resumed as it is.
cp -r "$work/stopped" "$work/old"
grep -vE '"(tokenizer|memory|recompute_mlp|residual|device|instructions|products|optimizer|schedule|decay_share|momentum|average|patience|save_best|shards|lora|lora_alpha|lora_targets|moments|gradients|loss_scale|loss_scale_steps|cache|skip_bad|pack|arena_limit|loss_hash)"' "$work/stopped/latest/trainer.json" | sed 's/\("seed": [0-9]*\),/\1/' >"$work/old/latest/trainer.json"
expect 0 "done at step $steps" train --resume --out "$work/old"

# Data that changed would not give the same bits; the record stays as it was.
cp -r "$work/whole" "$work/changed"
printf 'and one line more' >>"$work/text"
expect 1 'has changed since this run began' train --resume --out "$work/changed"
cmp -s "$work/whole/metrics.jsonl" "$work/changed/metrics.jsonl" || fault 'a refused --resume changed metrics.jsonl'
size=$(wc -c <"$work/text")
head -c $((size - 17)) "$work/text" >"$work/restored" && mv "$work/restored" "$work/text"

# ---- Broken checkpoints ----
# broken SENTENCE FILE COMMAND: COMMAND breaks FILE, $broken, of a copy; then neither --resume nor sample accepts it.
broken() {
    rm -rf "$work/broken"
    cp -r "$work/stopped" "$work/broken"
    broken="$work/broken/latest/$2"
    eval "$3"
    expect 1 "$1" train --resume --out "$work/broken"
}
broken 'model.safetensors: ' model.safetensors 'head -c 1000 "$broken" >"$work/cut"; cp "$work/cut" "$broken"'
expect 1 'model.safetensors: ' sample "$work/broken"
broken 'model.safetensors: ' model.safetensors 'head -c 100000 "$broken" >"$work/cut"; cp "$work/cut" "$broken"'
broken 'model.safetensors: ' model.safetensors 'printf "" >"$broken"'
broken 'model.safetensors: ' model.safetensors 'printf "\377\377\377\377\377\377\377\177{}" >"$broken"'
expect 1 'model.safetensors: ' sample "$work/broken"
broken 'optimizer.safetensors: ' optimizer.safetensors 'printf "\002\000\000\000\000\000\000\000{]" >"$broken"'
broken 'optimizer.safetensors' optimizer.safetensors 'cp "$work/broken/latest/model.safetensors" "$broken"'
# as many tensors, but one is named like a weight, which it would overwrite
broken 'optimizer.safetensors has no tensor model.norm.weight.exp_avg' optimizer.safetensors \
    'sed "s/\"model.norm.weight.exp_avg\"/\"model.norm.weight\"        /" "$broken" >"$work/cut"; cp "$work/cut" "$broken"'
cmp -s "$work/cut" "$work/stopped/latest/optimizer.safetensors" && fault 'optimizer.safetensors was not changed'
broken 'optimizer.safetensors to resume from' optimizer.safetensors 'rm "$work"/broken/checkpoint-*/optimizer.safetensors'
broken 'config.json' config.json 'printf "{" >"$broken"'
broken 'trainer.json' trainer.json 'printf "[]" >"$broken"'
broken 'no trainer.json' trainer.json 'rm "$work"/broken/checkpoint-*/trainer.json'
# A copy that lacks files of its newest checkpoint continues from the one before, with the same bits.
cp -r "$work/stopped" "$work/torn"
rm "$work/torn/latest/trainer.json"
expect 0 "done at step $steps" train --resume --out "$work/torn"
same "$work/whole" "$work/torn"
# change KEY VALUE: another value in trainer.json
change() {
    sed "s/\"$1\": [^,}]*/\"$1\": $2/" "$broken" >"$work/cut"
    cmp -s "$work/cut" "$broken" && fault "trainer.json has no $1"
    cp "$work/cut" "$broken"
}
for change in 'accumulate 0' 'accumulate -1' 'batch -3' 'batch 0' 'context 0' 'steps "many"' 'rate null' 'dtype "i32"' 'keep 0' \
    'dtype "f64"' 'shards 0' 'steps -1' 'warmup -5' 'validate_every -1' 'save_every -1' 'accumulate 4000000000000000000'; do
    broken 'trainer.json' trainer.json "change $change"
done

broken 'there are 6 shards; it must be a power of two' trainer.json 'change shards 6; change batch 6'
broken 'unknown model "gpt"' trainer.json 'change model "\"gpt\""'

# ---- sample ----
expect 0 'line 1' sample "$work/whole" --prompt 'line 1' --bytes 40
cp "$work/out" "$work/before"
expect 0 'line 1' sample "$work/whole/latest" --prompt 'line 1' --bytes 40 --threads 1
cmp -s "$work/before" "$work/out" || fault 'the same seed gives another text'
expect 0 'line 1' sample "$work/whole" --prompt 'line 1' --bytes 40 --seed 2
cmp -s "$work/before" "$work/out" && fault 'another seed gives the same text'
expect 0 '' sample "$work/whole" --temperature 0 --bytes 40
cp "$work/out" "$work/before"
expect 0 '' sample "$work/whole" --temperature 0 --bytes 40 --seed 3
cmp -s "$work/before" "$work/out" || fault 'temperature 0 depends on the seed'
expect 0 '' sample "$work/whole" --top-k 1 --bytes 40 --temperature 2
cmp -s "$work/before" "$work/out" || fault 'the likeliest of one is not the likeliest'
[ "$(wc -c <"$work/out")" -eq 41 ] || fault 'sample --bytes 40: not 40 bytes and a newline'
expect 0 '"text": "' sample "$work/whole" --json --bytes 70 --temperature 100 --top-k 0
if command -v python3 >/dev/null; then
    python3 -c 'import json, sys; json.loads(open(sys.argv[1], "rb").read())' "$work/out" 2>"$work/err" ||
        fault 'sample --json is no JSON'
fi
expect 1 'it has neither' sample "$work/nothing"
expect 1 'No such file' sample "$work/absent"
expect 2 'too few arguments' sample
expect 2 '--temperature is "-1"' sample "$work/whole" --temperature -1

# ---- Models whose tokens are not bytes ----
cp -rL "$work/whole/latest" "$work/tokens"
rm "$work/tokens/trainer.json" "$work/tokens/optimizer.safetensors" # a run of vjp has bytes, whatever its vocabulary
sed 's/"vocab_size": 256/"vocab_size": 49152/' "$work/whole/latest/config.json" >"$work/tokens/config.json"
grep -q 49152 "$work/tokens/config.json" || fault 'config.json has no vocab_size'
expect 1 'a vocabulary of 49152 tokens and no tokenizer.json' sample "$work/tokens"
expect 1 'a vocabulary of 49152 tokens and no tokenizer.json' train "$work/text" --from "$work/tokens" --out "$work/never"
printf '{}' >"$work/tokens/tokenizer.json"
expect 1 'tokenizer.json: it has no model' sample "$work/tokens"
expect 1 'tokenizer.json: it has no model' train "$work/text" --from "$work/tokens" --out "$work/never"
mv "$work/tokens/tokenizer.json" "$work/tokens/tokenizer.model"
expect 1 "the model's tokens are made by its tokenizer.model, which vjp does not read" sample "$work/tokens"
rm "$work/tokens/tokenizer.model"
cp "$work/whole/latest/config.json" "$work/tokens/config.json"
expect 0 '' tokenizer train "$work/text" -o "$work/tok" --vocab 300
expect 1 'the tokenizer has 300 tokens, and the model only 256' train "$work/text" --from "$work/tokens" --tokenizer "$work/tok" --out "$work/never"
expect 1 'has no tokenizer.json' train "$work/text" --tokenizer "$work/text" --out "$work/never"
expect 1 'tokenizer.json: it cannot be created' tokenizer train "$work/text" -o "$work/tok" --vocab 300
[ ! -e "$work/never" ] || fault 'a refused run has left a folder'
expect 0 '' sample "$work/tokens" --bytes 1

expect 1 '/dev/zero: it is a device; only regular files are read' tokenizer encode "$work/tok" /dev/zero
expect 1 'only regular files are read' tokenizer decode "$work/tok" "$work"

# ---- A model with a tokenizer: it is in every checkpoint, and a resumed run has the same bytes ----
expect 0 '' train "$work/text" --tokenizer "$work/tok" --context 16 --batch 2 --steps 4 --out "$work/words"
cmp "$work/tok/tokenizer.json" "$work/words/latest/tokenizer.json" || fault 'the checkpoint has another tokenizer'
cmp "$work/tok/tokenizer_config.json" "$work/words/latest/tokenizer_config.json" || fault 'the checkpoint has another tokenizer_config.json'
grep -q '"vocab_size": 300' "$work/words/latest/config.json" || fault 'the model has not the tokenizer'"'"'s size'
grep -q '"eos_token_id": 0' "$work/words/latest/config.json" || fault 'the model has not the end token'
expect 0 '' sample "$work/words" --bytes 20
expect 0 '' train "$work/text" --tokenizer "$work/tok" --context 16 --batch 2 --steps 4 --stop-at 2 --out "$work/halves"
rm -r "$work/tok" # a resumed run does not need it any more
expect 0 '' train --resume --out "$work/halves"
cmp "$work/words/latest/model.safetensors" "$work/halves/latest/model.safetensors" || fault 'a resumed run with a tokenizer has other weights'
expect 0 '' train "$work/text" --from "$work/words" --context 16 --batch 2 --steps 1 --out "$work/tuned-words"
cmp "$work/words/latest/tokenizer.json" "$work/tuned-words/latest/tokenizer.json" || fault 'a tuned model has another tokenizer'

# ---- Beginning with other weights ----
expect 0 'done at step 3' train "$work/text" --from "$work/whole" --batch 2 --steps 3 --warmup 0 --lr 1e-4 --out "$work/tuned"
awk -F'"loss": *' 'NR == 1 { split($2, part, ","); exit !(part[1] < 5) }' "$work/tuned/metrics.jsonl" ||
    fault '--from begins where any run does'
expect 0 'done at step 3' $train --steps 3 --dtype bf16 --accumulate 2 --out "$work/bf16"
grep -q 'in bf16, batch 2 x 32 x 2' "$work/out" || fault 'bf16: not told'

# A context of one byte is text all the same.
expect 0 ' tokens/s ' train "$work/text" --batch 1 --context 1 --steps 2 --out "$work/bytes"

# ---- Pictures ----
# big NUMBER: four bytes, the highest first
big() {
    printf "\\$(printf %03o $(($1 / 16777216)))\\$(printf %03o $(($1 / 65536 % 256)))\\$(printf %03o $(($1 / 256 % 256)))\\$(printf %03o $(($1 % 256)))"
}
# digits NAME COUNT: pictures of 8 x 8, bright to the left (label 0), to the right (1) or all over (2)
digits() {
    { printf '\000\000\010\003' && big "$2" && big 8 && big 8; } >"$work/idx/$1-images-idx3-ubyte"
    { printf '\000\000\010\001' && big "$2"; } >"$work/idx/$1-labels-idx1-ubyte"
    i=0
    while [ $i -lt "$2" ]; do
        noise="\\$(printf %03o $((i * 37 % 60)))"
        bright="\\$(printf %03o $((200 + i * 11 % 50)))"
        case $((i % 3)) in
        0) row="$bright$bright$bright$bright$noise$noise$noise$noise" ;;
        1) row="$noise$noise$noise$noise$bright$bright$bright$bright" ;;
        *) row="$bright$bright$bright$bright$bright$bright$bright$bright" ;;
        esac
        printf "$row$row$row$row$row$row$row$row" >>"$work/idx/$1-images-idx3-ubyte"
        printf "\\00$((i % 3))" >>"$work/idx/$1-labels-idx1-ubyte"
        i=$((i + 1))
    done
}
mkdir "$work/idx"
digits train 60
digits t10k 12
pictures="--model convnet --batch 6 --steps 20 --warmup 2 --validate-every 10"
expect 0 'done at step 20' train "$work/idx" $pictures --out "$work/convnet"
grep -q '72 pictures' "$work/out" || fault 'convnet: not all pictures'
grep -q 'pictures/s' "$work/out" || fault 'convnet: no speed'
awk -F'"loss": *' '{ split($2, part, ","); loss[NR] = part[1] } END { exit !(loss[NR] < 0.6 * loss[1]) }' \
    "$work/convnet/metrics.jsonl" || fault 'convnet: the loss does not fall'
expect 0 'stopped' train "$work/idx" $pictures --stop-at 9 --threads 2 --out "$work/convnet2"
expect 0 'done at step 20' train --resume --out "$work/convnet2"
same "$work/convnet" "$work/convnet2"
expect 0 ' allowed' train "$work/idx" $pictures --stop-at 9 --memory 64MiB --out "$work/convnet3"
expect 0 ' allowed' train --resume --out "$work/convnet3"
cmp -s "$work/convnet/latest/model.safetensors" "$work/convnet3/latest/model.safetensors" || fault 'convnet --memory: other bytes'
expect 1 'GiB; --memory allows 6.104e-05 GiB' train "$work/idx" $pictures --memory 64KiB --out "$work/never"
expect 1 'model_type' sample "$work/convnet"
expect 1 '--from is for the llama' train "$work/idx" $pictures --from "$work/whole" --out "$work/never"
# the same pictures as files, in a folder for each class
for class in left right; do
    mkdir -p "$work/classes/$class"
    for number in 1 2 3 4 5 6 7 8; do
        { printf 'P5 8 8 255\n' && head -c $((16 + 64 * (3 * number + ${#class} - 3))) "$work/idx/train-images-idx3-ubyte" | tail -c 64; } \
            >"$work/classes/$class/$number.pgm"
    done
done
expect 0 '16 pictures' train "$work/classes" --model convnet --batch 2 --steps 2 --out "$work/folders"
for class in smooth rough; do
    mkdir -p "$work/photos/$class"
    for number in 1 2 3 4; do
        cp "$(dirname "$0")/pictures/pillow_grey.jpg" "$work/photos/$class/$number.jpg"
    done
done
if "$vjp" train "$work/photos" --model convnet --stop-at 0 --out "$work/probe" 2>&1 | grep -q 'which this vjp was built without'; then
    echo 'skipped: training on JPEG pictures, which this vjp was built without'
else
    expect 0 '8 pictures' train "$work/photos" --model convnet --batch 2 --steps 2 --out "$work/photographs"
fi
mkdir "$work/tiny" "$work/tiny/a"
printf 'P5 2 2 255\nabcd' >"$work/tiny/a/1.pgm"
expect 1 'stages.' train "$work/tiny" --model convnet --out "$work/never"
expect 1 'neither IDX files' train "$work/nothing" --model convnet --out "$work/never"
expect 1 'it is not a folder; pictures are read from a folder' train "$work/text" --model convnet --out "$work/never"
head -c 100 "$work/idx/train-images-idx3-ubyte" >"$work/cut" && cp "$work/cut" "$work/idx/train-images-idx3-ubyte"
expect 1 'train-images-idx3-ubyte: it ends before the last of its 60 pictures' train "$work/idx" --model convnet --out "$work/never"
[ ! -e "$work/never" ] || fault 'a refused run has left a folder'

# ---- graph ----
expect 0 'calls per step' graph llama --batch 1 --context 16
expect 0 '"arena_bytes": ' graph llama --json --batch 1 --context 16 --dtype bf16
expect 0 'attention.backward' graph llama --text --batch 1 --context 16
expect 0 'digraph' graph llama --dot --batch 1 --context 16 --recompute
[ "$(tail -c 2 "$work/out")" = '}' ] || fault 'graph --dot: it does not end'
expect 0 'parameters' graph llama --svg "$work/llama.svg" --batch 1 --context 16
xml "$work/llama.svg"
expect 0 'parameters' graph convnet --svg "$work/convnet.svg" --batch 2
xml "$work/convnet.svg"
expect 0 'conv2d.backward' graph convnet --text --batch 2
expect 1 'x.svg: it cannot be written: No such file' graph llama --svg "$work/absent/x.svg" --batch 1 --context 16
expect 2 'unknown model "bert"' graph bert
expect 2 'unknown preset "huge"' graph llama --preset huge
expect 2 'MODEL is missing' graph
expect 2 'MODEL is given twice' graph llama --model llama
# Nothing is allocated: 7B is planned on any machine.
expect 0 'parameters          6607343616' graph --model llama --preset 7B --dtype bf16 --batch 1
expect 0 '"training_bytes": ' graph llama --preset 124M --json
expect 0 'for the limit       values that take one pass over memory and the feed-forward parts of ' graph llama --batch 4 --context 64 --memory ${little}KiB
expect 1 'GiB even with blocks recomputed; --memory allows 1 GiB' graph llama --preset 7B --memory 1GiB
expect 1 'GiB; --memory allows 0.0009766 GiB' graph convnet --memory 1MiB
for pair in '--text --json' '--dot --json' '--text --dot' '--markdown --json' '--text --svg x.svg'; do
    expect 2 'exclude each other' graph llama $pair
done

finish 'all passed'
