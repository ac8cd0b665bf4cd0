#!/bin/sh
# SPDX-License-Identifier: MIT
# Optimisers, schedules, averages, early stops, `vjp eval` and `vjp runs` from outside: a run that is stopped continues to the
# very bytes of one that never was, for any number of threads; what cannot be done ends with a sentence.
# Usage: test_runs.sh PATH_OF_VJP
set -u
vjp=$1
unset VJP_ISA VJP_GEMM
export VJP_THREADS=1 # on a machine with other work, threads of so small a model mostly wait for each other
. "$(dirname "$0")/expect.sh"

# same ONE OTHER: both runs ended with the same bytes.
same() {
    for file in model.safetensors optimizer.safetensors; do
        cmp -s "$1/latest/$file" "$2/latest/$file" || fault "$2: other bytes in $file"
    done
}

i=0
while [ $i -lt 300 ]; do
    echo "line $i: the quick brown fox learns to jump over $((i * i)) dogs"
    i=$((i + 1))
done >"$work/text"
train="train $work/text --batch 2 --context 16 --warmup 2 --steps 8 --validate-every 2 --save-every 0"

# ---- Optimisers, schedules, averages: resumed bit for bit, with another number of threads ----
for kind in 'muon --average 0.8 --schedule wsd --decay-share 0.5 --accumulate 2' 'sgd --schedule linear --momentum 0.5' \
    'adamw --average 0.5 --schedule constant'; do
    name=${kind%% *}
    expect 0 'done at step 8' $train --optimizer $kind --out "$work/$name"
    expect 0 'stopped at step 3' $train --optimizer $kind --threads 2 --stop-at 3 --out "$work/$name-2"
    expect 0 'done at step 8' train --resume --out "$work/$name-2"
    same "$work/$name" "$work/$name-2"
    grep -q "\"optimizer\": \"$name\"" "$work/$name/latest/trainer.json" || fault "trainer.json: no $name"
done
cmp -s "$work/muon/latest/model.safetensors" "$work/adamw/latest/model.safetensors" && fault 'muon is adamw'
# The model of a checkpoint is the average; the weights that are trained are beside the moments.
grep -aq 'lm_head.weight.trained' "$work/muon/latest/optimizer.safetensors" || fault 'no trained weights are kept'
grep -aq 'trained' "$work/sgd/latest/optimizer.safetensors" && fault 'weights are kept twice without an average'
# A checkpoint of another optimiser, or without its average, is refused.
cp -r "$work/sgd" "$work/other"
for change in '/"optimizer": "sgd"/s/sgd/adamw/' 's/"average": [0-9.]*/"average": 0.5/'; do
    cp "$work/sgd/latest/trainer.json" "$work/other/latest/trainer.json"
    sed "$change" "$work/sgd/latest/trainer.json" >"$work/other/latest/trainer.json"
    cmp -s "$work/sgd/latest/trainer.json" "$work/other/latest/trainer.json" && fault "trainer.json has no $change"
    expect 1 'optimizer.safetensors has ' train --resume --out "$work/other"
done
for change in 's/"schedule": "linear"/"schedule": "steep"/' 's/"average": [0-9.]*/"average": 1/' 's/"momentum": 0.5/"momentum": -1/'; do
    sed "$change" "$work/sgd/latest/trainer.json" >"$work/other/latest/trainer.json"
    expect 1 'which it cannot be' train --resume --out "$work/other"
done

expect 2 '--optimizer is "adam"; it must be adamw, muon or sgd' $train --optimizer adam --out "$work/never"
expect 2 '--schedule is "step"; it must be cosine, linear, wsd or constant' $train --schedule step --out "$work/never"
expect 2 '--momentum is for --optimizer muon and sgd' $train --momentum 0.9 --out "$work/never"
expect 2 '--momentum is 1; it must be less than 1' $train --optimizer sgd --momentum 1 --out "$work/never"
expect 2 '--decay-share is for --schedule wsd' $train --decay-share 0.5 --out "$work/never"
expect 2 '--average is 1; it must be at most 0.999999' $train --average 1 --out "$work/never"
expect 2 '--patience needs validation' $train --patience 2 --validate-every 0 --out "$work/never"
expect 2 '--save-best needs validation' $train --save-best --validate-every 0 --out "$work/never"
expect 2 '--optimizer cannot be used with --resume' train --resume --optimizer muon --out "$work/sgd"
head -c 20 "$work/text" >"$work/brief"
expect 1 'has too few data for it' train "$work/brief" --batch 1 --context 4 --steps 2 --patience 1 --out "$work/never"
[ ! -e "$work/never" ] || fault 'a refused run has left a folder'

# ---- The best checkpoint, and an early stop: a rate this high makes every later validation worse ----
expect 0 'ended early: 2 validations in a row were no better than' $train --steps 100 --lr 0.5 --clip 0 --patience 2 --out "$work/early"
step=$(sed -n 's/.*validation loss [0-9.]* at step \([0-9]*\), in .*best$/\1/p' "$work/out")
[ -n "$step" ] && [ "$(readlink "$work/early/best")" = "$(printf 'checkpoint-%08d' "$step")" ] || fault 'best is another step'
[ "$(readlink "$work/early/latest")" = "$(printf 'checkpoint-%08d' $((step + 4)))" ] || fault 'it did not end two validations later'
grep -qF "sample: vjp sample $work/early/best" "$work/out" || fault 'no command that samples the best'
before=$(wc -l <"$work/early/metrics.jsonl")
expect 0 'ended early' train --resume --out "$work/early"
[ "$(wc -l <"$work/early/metrics.jsonl")" -eq "$before" ] || fault 'a run that ended early takes more steps'
expect 0 'stopped at step 3' $train --steps 100 --lr 0.5 --clip 0 --patience 2 --stop-at 3 --out "$work/early2"
expect 0 'ended early' train --resume --out "$work/early2"
same "$work/early" "$work/early2"
expect 0 '' sample "$work/early/best" --bytes 5

# ---- eval ----
expect 0 'bits per byte' eval "$work/muon" "$work/text"
expect 0 '"bits_per_byte": ' eval "$work/muon" "$work/text" --json
cp "$work/out" "$work/first"
expect 0 '"perplexity": ' eval "$work/muon/latest" "$work/text" --json --threads 3
[ "$(sed 's/.*"loss"//' "$work/first")" = "$(sed 's/.*"loss"//' "$work/out")" ] || fault 'eval: other bits with three threads'
expect 0 'windows of 4' eval "$work/muon" "$work/text" --context 4 --batch 64
expect 0 'loss' eval "$work/muon" "$work/text" --dtype bf16
expect 1 'a context of 17 is too long' eval "$work/muon" "$work/text" --context 17
printf x >"$work/byte"
expect 1 'has one token' eval "$work/muon" "$work/byte"
printf '' >"$work/none"
expect 1 'there is no text in it' eval "$work/muon" "$work/none"
expect 1 'No such file' eval "$work/muon" "$work/absent"
expect 1 'No such file' eval "$work/absent" "$work/text"
expect 1 'it is not a folder' eval "$work/text" "$work/text"
expect 2 'too few arguments' eval "$work/muon"
expect 2 '--dtype is f64' eval "$work/muon" "$work/text" --dtype f64
# Tokens of several bytes: bits per byte count bytes.
expect 0 '' tokenizer train "$work/text" -o "$work/tok" --vocab 300
expect 0 '' train "$work/text" --tokenizer "$work/tok" --context 16 --batch 2 --steps 1 --out "$work/words"
expect 0 '"bytes": ' eval "$work/words" "$work/text" --json
tr ',' '\n' <"$work/out" | awk -F': ' '/"loss"/ { loss = $2 } /"bits_per_byte"/ { bits = $2 } /"tokens"/ { tokens = $2 }
    /"bytes"/ { bytes = $2 } END { d = loss * tokens / log(2) / bytes - bits; exit !(tokens < bytes && d < 1e-9 && d > -1e-9) }' ||
    fault 'eval: bits per byte do not count bytes'

# ---- runs ----
expect 0 'best validation' runs "$work/muon" "$work/sgd" "$work/early"
grep -q "$work/muon .*8/8 .*muon .*wsd .*0.8" "$work/out" || fault 'runs: no settings'
[ "$(grep -c '[*]' "$work/out")" -eq 1 ] || fault 'runs: not one best'
[ "$(wc -l <"$work/out")" -eq 4 ] || fault 'runs: not one line per run'
expect 0 '"optimizer": "sgd"' runs "$work/muon" "$work/sgd" --json --svg "$work/runs.svg"
grep -q "$work/sgd" "$work/runs.svg" || fault 'runs.svg: no names'
if command -v python3 >/dev/null; then
    for picture in runs.svg muon/loss.svg; do
        python3 -c 'import sys, xml.dom.minidom as m; m.parse(sys.argv[1])' "$work/$picture" 2>"$work/err" || fault "$picture is no XML"
    done
fi
mkdir "$work/fresh" # a run that has not saved yet
cp "$work/sgd/metrics.jsonl" "$work/fresh"
expect 0 "$work/fresh" runs "$work/fresh" "$work/sgd"
expect 1 'metrics.jsonl: it cannot be opened: No such file' runs "$work/sgd" "$work/absent"
: >"$work/fresh/metrics.jsonl"
expect 1 'metrics.jsonl: it has no steps' runs "$work/fresh"
[ ! -s "$work/out" ] || fault 'runs: a table without one of its runs'
expect 1 'it cannot be written: No such file' runs "$work/sgd" --svg "$work/absent/x.svg"
expect 2 'too few arguments' runs

finish 'all passed'
