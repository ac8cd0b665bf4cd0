# SPDX-License-Identifier: MIT
# What the tests of `vjp train` share: the comparison of two runs, and a text to train on, $work/text. A test sets $vjp and includes this
# file, which brings expect.sh with it.
export VJP_THREADS=1 # on a machine with other work, threads of so small a model mostly wait for each other
unset VJP_ISA VJP_GEMM
. "$(dirname "$0")/expect.sh"

# same ONE OTHER: the same checkpoint, settings and record, but for the time and how often each saved.
same() {
    files="config.json model.safetensors optimizer.safetensors"
    [ ! -e "$1/latest/adapter_config.json" ] || files="adapter_config.json adapter_model.safetensors optimizer.safetensors"
    for file in $files; do
        cmp -s "$1/latest/$file" "$2/latest/$file" || fault "$2: other bytes in $file"
    done
    for run in "$1" "$2"; do
        sed 's/"save_every": [0-9]*//' "$run/latest/trainer.json" >"$run.settings"
        sed 's/, *"seconds".*//' "$run/metrics.jsonl" >"$run.lines"
    done
    cmp -s "$1.settings" "$2.settings" || fault "$2: other settings in trainer.json"
    cmp -s "$1.lines" "$2.lines" || fault "$2: other lines in metrics.jsonl"
}

lines() {
    if [ -e "$1" ]; then wc -l <"$1"; else echo 0; fi
}

i=0
while [ $i -lt 500 ]; do
    echo "line $i: the quick brown fox learns to jump over $((i * i)) dogs"
    i=$((i + 1))
done >"$work/text"
