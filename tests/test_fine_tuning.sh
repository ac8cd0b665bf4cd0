#!/bin/sh
# SPDX-License-Identifier: MIT
# test_fine_tuning.sh SOURCE VJP: runs the blocks of docs/fine-tuning.md as one program, and compares the losses that it speaks of. Status
# 77 where vjp was built without tokenizers.
set -eu
export VJP_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk '/^```sh$/ { on = 1; next } /^```$/ { on = 0 } on' "$1/docs/fine-tuning.md" >"$work/tutorial.sh"
[ "$(wc -l <"$work/tutorial.sh")" -ge 20 ] || { echo "docs/fine-tuning.md has lost its commands"; exit 1; }
mkdir "$work/bin"
ln -s "$2" "$work/bin/vjp"
PATH=$work/bin:$PATH
cd "$work"
echo text >probe.txt
vjp tokenizer train probe.txt --vocab 256 -o probe >out 2>&1 || { grep -q PCRE2 out && exit 77; }
sh -eu tutorial.sh >log 2>&1 || { tail -n 20 log; exit 1; }

# loss DIR: of the model on the habits, in millionths.
loss() {
    vjp eval "$1" texts/habits.txt --json | sed 's/.*"loss": *\([0-9.e-]*\).*/\1/' | awk '{ printf "%.0f\n", $1 * 1e6 }'
}
base=$(loss base) full=$(loss full/best) adapters=$(loss adapters/best) merged=$(loss merged)
echo "losses, in millionths: base $base, full $full, adapters $adapters, merged $merged"
[ "$full" -lt $((base / 2)) ] || { echo "fine-tuning has not halved the loss"; exit 1; }
[ "$adapters" -lt $((base * 3 / 5)) ] || { echo "adapters have not lowered the loss by two fifths"; exit 1; }
off=$((merged - adapters))
[ "${off#-}" -le 20 ] || { echo "the merged model has another loss than the adapters"; exit 1; }
[ -f merged/tokenizer.json ] && cmp -s merged/config.json base/latest/config.json || { echo "merged lacks files of the base"; exit 1; }
tail -n 20 log | grep -q "The cat" || { echo "nothing was sampled"; exit 1; }
