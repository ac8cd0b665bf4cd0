#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` on a device that is not the processor: a small llama and a small convnet have the CPU's losses, the same
# bytes in a second run, and the same bytes after a stop and a resume. A llama on packed documents has the CPU's losses,
# too. The rate is low: with that of the preset and so small a batch AdamW makes differences of a last bit a thousand
# times as large (`cpu` and `ref` then differ by 6e-4).
# Usage: test_train_device.sh PATH_OF_VJP DEVICE [STEPS [OPTIONS OF THE LLAMA...]]
set -u
vjp=$1 device=$2 steps=${3:-16}
shift $(($# < 3 ? $# : 3))
[ $# -gt 0 ] || set -- --preset tiny --batch 1 --context 24 --lr 3e-4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

fault() {
    failures=$((failures + 1))
    printf 'FAILED: %s\n' "$1"
    tail -n 5 "$work/log" | sed 's/^/    /'
}

train() { # NAME ARGUMENTS...
    out=$1
    shift
    "$vjp" train "$@" --out "$work/$out" >"$work/log" 2>&1 || fault "vjp train $*"
}

same_bytes() { # ONE OTHER
    for file in model.safetensors optimizer.safetensors; do
        cmp -s "$work/$1/latest/$file" "$work/$2/latest/$file" || fault "$2: other bytes in $file than $1"
    done
}

losses() { sed 's/.*"loss": \([^,]*\),.*/\1/' "$work/$1/metrics.jsonl"; }

# The largest difference between the losses of two runs.
near() { # ONE OTHER BOUND
    losses "$1" >"$work/one"
    losses "$2" >"$work/other"
    paste "$work/one" "$work/other" | awk -v bound="$3" -v steps="$steps" -v name="$2" '
        { d = $1 - $2; d = d < 0 ? -d : d; if (!(d <= worst)) worst = d }
        END { printf "%s: %d losses, largest difference %.2g\n", name, NR, worst; exit !(NR == steps && worst <= bound) }' ||
        fault "$2: losses more than $3 from those of $1"
}

compare() { # NAME BOUND ARGUMENTS...: trains on both
    name=$1 bound=$2
    shift 2
    train "$name.cpu" "$@" --device cpu
    train "$name" "$@" --device "$device"
    train "$name.again" "$@" --device "$device"
    train "$name.stopped" "$@" --device "$device" --stop-at $((steps / 2))
    train "$name.stopped" --resume
    near "$name.cpu" "$name" "$bound"
    same_bytes "$name" "$name.again"
    same_bytes "$name" "$name.stopped"
}

awk 'BEGIN { for (i = 0; i < 400; i++) printf "line %d of a text whose next line is %d.\n", i, i + 1 }' >"$work/text"
compare llama 1e-4 "$work/text" --steps "$steps" --warmup 2 --seed 1 "$@"

# A part of each batch, the update and a validation in turn: programs that share an arena.
compare parts 1e-4 "$work/text" --steps "$steps" --warmup 2 --seed 1 "$@" --accumulate 2 --validate-every 2

# TF32 gives other bits, near those of f32, and a resumed run keeps it. Products of 16 bits have no use for it.
case $device in cuda*)
    for run in tf32 tf32.stopped; do
        stop=$([ $run = tf32 ] || echo "--stop-at $((steps / 2))")
        train $run "$work/text" --steps "$steps" --warmup 2 --seed 1 "$@" --device "$device" --products tf32 $stop
    done
    train tf32.stopped --resume
    near llama tf32 1e-2
    same_bytes tf32 tf32.stopped
    case " $* " in *' --dtype bf16 '* | *' --dtype f16 '* | *' --dtype=bf16 '* | *' --dtype=f16 '*) ;;
    *) ! cmp -s "$work/llama/latest/model.safetensors" "$work/tf32/latest/model.safetensors" || fault '--products tf32 changes nothing' ;;
    esac
    ;;
esac

# Documents that share rows: attention keeps them apart.
awk 'BEGIN { for (i = 0; i < 200; i++) printf "{\"text\": \"%d and %d\"}\n", i * i % 97, i }' >"$work/documents.jsonl"
for on in cpu "$device"; do
    train "documents.$on" "$work/documents.jsonl" --steps "$steps" --warmup 2 --seed 1 "$@" --pack --device "$on"
    grep -q 'documents share rows' "$work/log" || fault "documents do not share rows on $on"
done
near documents.cpu "documents.$device" 1e-4

# Pictures of 8 x 8: bright to the left or to the right.
bright='\350\344\360\326' dark='\020\034\012\044'
for number in 1 2 3 4 5 6 7 8; do
    mkdir -p "$work/pictures/left" "$work/pictures/right"
    noise="\\0$((number % 8))0"
    { printf 'P5 8 8 255\n' && for row in 1 2 3 4 5 6 7; do printf "$bright$dark"; done && printf "$bright$dark" | tr '\020' "$noise"; } \
        >"$work/pictures/left/$number.pgm"
    { printf 'P5 8 8 255\n' && for row in 1 2 3 4 5 6 7; do printf "$dark$bright"; done && printf "$dark$bright" | tr '\020' "$noise"; } \
        >"$work/pictures/right/$number.pgm"
done
compare convnet 1e-4 "$work/pictures" --model convnet --batch 4 --steps "$steps" --warmup 2 --seed 1
[ $failures -eq 0 ]
