#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` and `vjp eval` on .jsonl files that this script writes: bad lines, templates and empty sets end with a sentence; the cache is
# made once, by several processes at a time, and again where it is broken; a resumed run and one with shards have the bytes
# of one that never stopped; and a model learns the answers.
# Usage: test_data.sh PATH_OF_VJP
set -u
vjp=$1
unset VJP_ISA VJP_GEMM
export VJP_THREADS=1
. "$(dirname "$0")/expect.sh"
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

same() {
    for file in model.safetensors optimizer.safetensors; do
        cmp -s "$1/latest/$file" "$2/latest/$file" || fault "$2: other bytes in $file"
    done
}

caches() {
    find "$1" -name '*.tokens' | wc -l
}

mkdir "$work/set"
i=0
while [ $i -lt 120 ]; do
    case $((i % 3)) in
    0) printf '{"text": "line %d: the quick brown fox learns to jump over %d dogs"}\n' $i $((i * i)) ;;
    1) printf '{"prompt": "%d plus 1 is ", "completion": "%d"}\n' $i $((i + 1)) ;;
    2) printf '{"messages": [{"role": "user", "content": "What follows %d?"}, {"role": "assistant", "content": "%d"}]}\n' $i $((i + 1)) ;;
    esac
    i=$((i + 1))
done >"$work/all.jsonl"
grep -v messages "$work/all.jsonl" >"$work/set/a.jsonl"
sed -n 1,30p "$work/set/a.jsonl" >"$work/set/b.jsonl"
echo 'this is not read' >"$work/set/README"
small="--preset tiny --batch 2 --context 32 --warmup 2 --steps 6 --validate-every 0 --save-every 0"

# ---- What is wrong is said ----
expect 1 'all.jsonl: line 3: the model has no chat template that vjp knows' train "$work/all.jsonl" $small --out "$work/no"
printf '{"text": "good line"}\n{"text": "bad line\n{"text": "another"}\n\n{}\n' >"$work/bad.jsonl"
expect 1 'bad.jsonl: line 2: it ends at byte 18' train "$work/bad.jsonl" $small --out "$work/no"
printf '{}\n\n' >"$work/none.jsonl"
expect 1 'none.jsonl: there is no document in it: every line was skipped' train "$work/none.jsonl" --skip-bad $small --out "$work/no"
: >"$work/empty.jsonl"
expect 1 'empty.jsonl: there is no document in it' train "$work/empty.jsonl" $small --out "$work/no"
expect 1 'missing.jsonl: it cannot be opened' train "$work/missing.jsonl" $small --out "$work/no"
expect 1 '--skip-bad is for .jsonl files' train "$work/set/README" --skip-bad $small --out "$work/no"
expect 2 '--pack and --no-pack exclude each other' train "$work/all.jsonl" --pack --no-pack $small --out "$work/no"
[ ! -e "$work/no" ] || fault "a run that was refused left its folder"
[ "$(caches "$work")" -eq 0 ] || fault "a data set that was refused left a cache"
expect 0 '2 bad lines were skipped, the first: ' train "$work/bad.jsonl" --skip-bad $small --steps 1 --out "$work/skip"
grep -q 'bad.jsonl: line 2: ' "$work/out" || fault "the first bad line is not shown"

# ---- The cache: made once, and again where it is broken ----
run="train $work/set $small --cache $work/cache"
for i in 1 2 3; do
    "$vjp" $run --out "$work/at-once-$i" >"$work/out-$i" 2>&1 &
done
wait
for i in 1 2 3; do
    grep -q 'documents in 2 files' "$work/out-$i" || fault "processes at once: $(tail -n 1 "$work/out-$i")"
    same "$work/at-once-1" "$work/at-once-$i"
done
[ "$(caches "$work/cache")" -eq 1 ] || fault "processes at once did not make one cache"
[ "$(find "$work/cache" -name '*.tmp' | wc -l)" -eq 0 ] || fault "a temporary file is left"
before=$(ls -i "$work"/cache/*.tokens)
expect 0 'documents share rows' $run --out "$work/whole"
[ "$before" = "$(ls -i "$work"/cache/*.tokens)" ] || fault "the cache was made again"
: >"$work/out"
for file in "$work"/cache/*.tokens; do head -c 1000 "$file" >"$work/short" && cp "$work/short" "$file"; done
expect 0 'documents share rows' $run --out "$work/again"
same "$work/whole" "$work/again"

# ---- The same bytes after a stop, with shards, and for a cache elsewhere ----
expect 0 'stopped at step 2' $run --stop-at 2 --out "$work/stopped"
rm -r "$work/cache"
expect 0 'done at step 6' train --resume --out "$work/stopped"
same "$work/whole" "$work/stopped"
expect 0 'done at step 6' train "$work/set" $small --shards 2 --out "$work/shards-2"
expect 0 'stopped at step 3' train "$work/set" $small --shards 2 --stop-at 3 --out "$work/shards-2b"
expect 0 'done at step 6' train --resume --out "$work/shards-2b"
same "$work/shards-2" "$work/shards-2b"
echo '{"text": "one more"}' >>"$work/set/b.jsonl"
expect 1 'has changed since this run began' train --resume --out "$work/shards-2b"
expect 0 'each document has rows of its own' train "$work/set" $small --steps 1 --no-pack --out "$work/own"

# ---- Evaluation: answers alone ----
expect 0 '2 documents, and 2 bad lines' eval "$work/whole" "$work/bad.jsonl" --skip-bad
expect 1 'bad.jsonl: line 2: ' eval "$work/whole" "$work/bad.jsonl"
printf '{"prompt": "1 plus 1 is ", "completion": "2"}\n{"text": "abc"}\n' >"$work/three.jsonl"
expect 0 ': 3 tokens of 3 bytes predicted, in 2 windows of 12' eval "$work/whole" "$work/three.jsonl"
expect 1 'three.txt: --cache is for .jsonl files' eval "$work/whole" "$work/three.txt" --cache "$work"

# ---- Conversations, where the tokenizer has a template's tokens (it needs PCRE2) ----
if "$vjp" tokenizer train "$work/all.jsonl" --vocab 300 --special '<|im_start|>,<|im_end|>' -o "$work/tok" >"$work/out" 2>"$work/err"; then
    expect 0 '120 documents in 1 files' train "$work/all.jsonl" --tokenizer "$work/tok" $small --steps 1 --out "$work/chat"
    "$vjp" tokenizer train "$work/all.jsonl" --vocab 300 -o "$work/plain" >"$work/out" 2>"$work/err"
    expect 1 'all.jsonl: line 3: the model has no chat template' train "$work/all.jsonl" --tokenizer "$work/plain" $small --out "$work/no"
    # A model that is trained on one question gives its answer, and nothing but it: the questions were not trained on.
    printf '{"messages": [{"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "Pong."}]}\n' >"$work/ping.jsonl"
    expect 0 'done at step 40' train "$work/ping.jsonl" --tokenizer "$work/tok" --preset tiny --batch 1 --context 32 --warmup 2 --steps 40 \
        --validate-every 0 --save-every 0 --out "$work/ping"
    # The answer is five bytes, and the token that ends it.
    expect 0 ' of 5 bytes predicted, in 1 windows' eval "$work/ping" "$work/ping.jsonl" --cache "$work/cache"
    expect 0 'Pong.' sample "$work/ping" --chat --prompt 'Ping?' --temperature 0 --tokens 20
elif ! grep -q PCRE2 "$work/err"; then
    fault "there is no tokenizer"
fi

finish "all of .jsonl data is as it should be"
