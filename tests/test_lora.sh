#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train --lora`, `vjp sample`, `vjp eval` and `vjp merge` from outside: a run of adapters that is stopped or killed continues to the
# very bytes of one that never was, for any number of threads; what cannot be done ends with a sentence.
# Usage: test_lora.sh PATH_OF_VJP
set -u
vjp=$1
unset VJP_ISA VJP_GEMM
export VJP_THREADS=1
. "$(dirname "$0")/expect.sh"
cd "$work" || exit 1

# same ONE OTHER: both runs ended with the same bytes.
same() {
    for file in adapter_config.json adapter_model.safetensors optimizer.safetensors; do
        cmp -s "$1/latest/$file" "$2/latest/$file" || fault "$2: other bytes in $file"
    done
}

awk 'BEGIN { for (i = 0; i < 700; i++) print "line " i * i % 97 " of a text" }' >text.txt
expect 0 "done at step 4" train text.txt --steps 4 --batch 2 --context 32 --out base
lora="text.txt --from base --lora 4 --batch 4 --steps 16 --validate-every 5 --save-best --average 0.9 --seed 7"

# The same bytes for any number of threads, and after a stop, which --resume ends; a killed run continues, too.
expect 0 "adapters of rank 4" train $lora --out whole
expect 0 "merge:  vjp merge" train $lora --out threads --threads 2
same whole threads
expect 0 "stopped at step 7" train $lora --out stopped --stop-at 7
expect 0 "done at step 16" train --resume --out stopped
same whole stopped
"$vjp" train $lora --save-every 1 --out killed >out 2>err &
process=$!
tries=0
until [ -e killed/checkpoint-00000003 ] || [ $tries -gt 6000 ]; do
    tries=$((tries + 1))
    sleep 0.01
done
kill -9 $process 2>/dev/null
wait $process 2>/dev/null
[ ! -e killed/checkpoint-00000016 ] || echo "note: the run was over before it could be killed"
expect 0 "done at step 16" train --resume --out killed
same whole killed

# A base that has moved is found by --base; one with other weights is not that of the run.
cp -r base moved
mv base gone
expect 1 "the base model of the adapters cannot be opened" train --resume --out whole
expect 1 "give its folder by --base" sample whole
expect 0 "done at step 16" train --resume --out whole --base moved
mv gone base
expect 0 "done at step 4" train text.txt --steps 4 --batch 2 --context 32 --seed 2 --out other
expect 1 "is not the base model that this run began with" train --resume --out whole --base other
expect 0 "done at step 1" train text.txt --preset small --steps 1 --batch 1 --context 16 --out small
expect 1 "this base model needs [4, 384]" eval whole text.txt --base small
expect 1 "--base is for a folder of adapters" sample base --base other

# The model that validation saw, merged and not.
expect 0 "bits per byte" eval whole/best text.txt
grep loss out >adapted
expect 0 "the adapters of 28 weights are merged" merge whole/best -o merged
expect 0 "bits per byte" eval merged text.txt
cut -c1-20 adapted >one
grep loss out | cut -c1-20 >two
cmp -s one two || fault "the merged model has another loss"
expect 0 "line" sample whole/best --prompt line --bytes 40 --temperature 0
cp out adapted
expect 0 "line" sample merged --prompt line --bytes 40 --temperature 0
cmp -s out adapted || fault "the merged model writes another text"
expect 1 "merged is already there" merge whole -o merged
expect 1 "has no adapters" merge merged -o again
[ ! -e again ] && [ ! -e again.merging.tmp ] || fault "a merge that was refused left a folder"
expect 2 "-o is missing" merge whole
expect 0 "done at step 2" train text.txt --from merged --steps 2 --batch 2 --out further

# In 16 bits, by other optimisers, with parts and shards.
expect 0 "done at step 3" train text.txt --from base --lora 2 --lora-targets q_proj,down_proj --dtype bf16 --steps 3 --batch 2 --out narrow
expect 0 "done at step 3" train text.txt --from base --lora 2 --lora-alpha 3 --optimizer muon --accumulate 2 --steps 3 --batch 2 --out muon
expect 0 "in 2 shards" train text.txt --from base --lora 2 --shards 2 --steps 3 --batch 2 --optimizer sgd --out shards

# The plan: only adapters have gradients.
expect 0 "of which 18688 are trained" graph llama --lora 2
expect 2 "--lora is for the llama" graph convnet --lora 2

# Misuse, and files that were tampered with.
expect 2 "--lora adapts a model, which --from must name" train text.txt --lora 4 --out no
expect 2 "--lora is for the llama" train text.txt --model convnet --lora 4 --from base --out no
expect 2 "--lora-alpha is for --lora" train text.txt --lora-alpha 4 --out no
expect 2 "--lora-targets is for --lora" train text.txt --lora-targets all --out no
expect 2 "cannot be put on \"lm_head\"" train text.txt --from base --lora 4 --lora-targets lm_head --out no
expect 2 "--lora-alpha is 0" train text.txt --from base --lora 4 --lora-alpha 0 --out no
expect 2 "--lora" train text.txt --from base --lora 0 --out no
expect 2 "--base is for --resume" train text.txt --from base --base base --out no
expect 2 "cannot be used with --resume" train --resume --lora 4 --out whole
expect 1 "has adapters and not a model" train text.txt --from whole --out no
[ ! -e no ] || fault "a run that was refused left a folder"
mkdir broken
cp -r whole/latest/. broken
sed 's/"r": 4/"r": 0/' whole/latest/adapter_config.json >broken/adapter_config.json
expect 1 "\"r\" is 0" eval broken text.txt
sed 's/"lora_alpha": 8/"lora_alpha": NaN/' whole/latest/adapter_config.json >broken/adapter_config.json
expect 1 "adapter_config.json" eval broken text.txt
sed 's/"r": 4/"r": 5/' whole/latest/adapter_config.json >broken/adapter_config.json
expect 1 "this base model needs [5, 128]" sample broken
cp whole/latest/adapter_config.json broken
rm broken/adapter_model.safetensors
expect 1 "adapter_model.safetensors" eval broken text.txt
head -c 5000 whole/latest/adapter_model.safetensors >broken/adapter_model.safetensors
expect 1 "cut off" merge broken -o never

finish 'all passed'
