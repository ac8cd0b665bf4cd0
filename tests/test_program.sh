#!/bin/sh
# SPDX-License-Identifier: MIT
# The program `vjp` from outside: every subcommand answers --help; misuse gives status 2, a sentence on stderr and
# nothing on stdout; failure gives status 1 and a sentence; `vjp run` computes what it should and survives bad files.
# Usage: test_program.sh PATH_OF_VJP
set -u
vjp=$1
unset VJP_ISA VJP_THREADS VJP_GEMM
# A layer of Mesa's Vulkan, which WebGPU finds, complains on stderr where no desktop runs.
export NODEVICE_SELECT=1
strict=1
. "$(dirname "$0")/expect.sh"

# make_file NAME HEADER DATA: a safetensors file; DATA in printf's notation.
make_file() {
    length=${#2}
    {
        printf "\\$(printf %03o $((length % 256)))\\$(printf %03o $((length / 256)))\000\000\000\000\000\000"
        printf %s "$2"
        printf "$3"
    } >"$work/$1"
}

# ---- Help and version ----
expect 0 'Usage: vjp COMMAND'
expect 0 'Usage: vjp COMMAND' --help
expect 0 'Usage: vjp COMMAND' help
expect 0 'vjp 0' --version
for command in info ops run check bench; do
    expect 0 "vjp $command" $command --help
    expect 0 "vjp $command" help $command
    expect 0 '--json' $command -h
    grep -q 'Options:' "$work/out" || fault "vjp $command -h: no options"
done

# ---- Misuse ----
expect 2 'unknown command "frobnicate"' frobnicate
expect 2 'did you mean bench' bnch
expect 2 'the first argument must be a command' --json
expect 2 'unknown command "frobnicate"' help frobnicate
expect 2 'unexpected argument' help run ops
for command in info ops run check bench; do
    expect 2 'unknown option --frobnicate' $command --frobnicate
    expect 2 'did you mean --json' $command --jsn
    expect 2 '--json takes no value' $command --json=yes
    expect 2 '--help takes no value' $command --help=me
    expect 2 "Try: vjp $command --help" $command --frobnicate
    expect 2 'unknown option -z' $command -z
done
for command in run check bench; do
    expect 2 '--device needs a value' $command --device
    expect 2 '--device is empty' $command --device=
    expect 2 '--threads is "0"; it must be an integer from 1 to 1024' $command --threads 0
    expect 2 '--threads is "two"' $command --threads=two
    expect 2 '--threads is ""' $command --threads=
done
for command in ops check bench; do
    expect 2 'did you mean layer_norm' $command layer_nrom
    expect 2 'unknown op "frobnicate"' $command frobnicate
done
expect 2 'unexpected argument' info extra
expect 2 'unexpected argument' ops layer_norm extra
expect 2 'exclude each other' ops --json --markdown
expect 2 '--markdown takes no value' ops --markdown=yes
expect 2 'too few arguments' run
expect 2 'too few arguments' run layer_norm.forward
expect 2 '-o is missing' run layer_norm.forward in
expect 2 'unknown op "frobnicate"; `vjp ops` lists them' run frobnicate.forward in -o out
expect 2 'unknown op "layr_norm"; did you mean layer_norm?' run layr_norm.forward in -o out
expect 2 'write rope.forward or rope.backward' run rope in -o out
expect 2 'write rope.forward or rope.backward' run rope.sideways in -o out
expect 2 'adamw has no backward pass' run adamw.backward in -o out
expect 2 'is not a pass: write adamw.forward' run adamw.sideways in -o out
expect 2 'layer_norm has no attribute "epsilon"; it has axes, eps' run layer_norm.forward in -o out epsilon=1
expect 2 'eps of layer_norm is "small"; it must be a number' run layer_norm.forward in -o out eps=small
expect 2 'it must be one of half, interleaved' run rope.forward in -o out pairing=third
expect 2 'write name=value' run rope.forward in -o out interleaved
expect 2 'has no output "dz"; it has dx, dgamma, dbeta' run layer_norm.backward in -o out --outputs dx,dz
expect 2 'empty word' run layer_norm.backward in -o out --outputs dx,,dgamma
expect 2 'has no output "x"' run layer_norm.backward in -o out --accumulate x
expect 2 'write OUTPUT=DTYPE' run layer_norm.backward in -o out --output-dtype f32
expect 2 'unknown dtype "f31"; dtypes are f32' run layer_norm.backward in -o out --output-dtype dgamma=f31
expect 2 'it has the dtype of the file' run layer_norm.backward in -o out --accumulate dx --output-dtype dx=f32

# ---- info and ops ----
expect 0 'instruction set' info
expect 0 '"version": "' info --json
expect 0 'layer_norm.backward' ops
expect 0 'adamw.forward' ops
expect 0 'in place of dy or x' ops layer_norm
expect 0 '| `dx` | output, accumulates' ops layer_norm --markdown
expect 0 '"op": "layer_norm", "pass": "backward"' ops --json
[ "$(wc -l <"$work/out")" -eq "$("$vjp" ops --markdown | grep -c '^|.*| \(forward\|backward\) |')" ] || fault 'ops --json: not one line per pass'
expect 0 '| ref | cpu |' ops --markdown
expect 0 '"devices": {"cpu": [' ops --json --device cpu
expect 1 'unknown device "tpu"' ops --device tpu
# The docs' tables must not depend on the machine's devices or threads.
"$vjp" ops --markdown >"$work/one"
VJP_ISA=plain VJP_THREADS=1 "$vjp" ops --markdown >"$work/two"
cmp -s "$work/one" "$work/two" || fault 'ops --markdown depends on the machine'
VJP_ISA=sse9 "$vjp" ops --markdown >"$work/two"
cmp -s "$work/one" "$work/two" || fault 'ops --markdown depends on the processor'
# The set without FMA has other bits: the others are not compared with it.
case $("$vjp" info --json) in
*\"plain\"*) VJP_ISA=plain "$vjp" check linear --quick --dtype f32 >"$work/out" || fault 'check fails with the set without FMA' ;;
esac
if grep -q "$(printf '\033')" "$work/one"; then fault 'colour in a file'; fi
if command -v python3 >/dev/null; then
    for arguments in 'info' 'ops'; do
        "$vjp" $arguments --json | python3 -c 'import json, sys
for line in sys.stdin: assert type(json.loads(line)) is dict' || fault "$arguments --json is not JSON"
    done
fi
VJP_ISA=mmx "$vjp" info >"$work/out" 2>"$work/err" || fault 'info fails where the cpu does not open'
grep -q 'must be one of' "$work/out" || fault 'info does not say why the cpu does not open'

# ---- run: what it computes ----
one='\000\000\200\077' two='\000\000\000\100' three='\000\000\100\100' four='\000\000\200\100'
make_file good '{"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}' "$one$two$three$four"
for device in ref cpu; do
    expect 0 'y       [2, 2]  f32' run cumsum.forward "$work/good" -o "$work/y" --device $device
    # running sums along the last axis: 1, 3, 3, 7
    [ "$(tail -c 16 "$work/y" | od -An -tx1 | tr -d ' \n')" = 0000803f00004040000040400000e040 ] ||
        fault "cumsum.forward on $device is wrong"
    # along the first, reversed: 4, 6, 3, 4
    expect 0 '"min": 3, "max": 6' run cumsum.forward "$work/good" -o "$work/y" --device=$device --json axis=0 reverse=true
    [ "$(tail -c 16 "$work/y" | od -An -tx1 | tr -d ' \n')" = 000080400000c0400000404000008040 ] ||
        fault "cumsum.forward axis=0 reverse=true on $device is wrong"
done
# += : y starts from the file's tensor
make_file add '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"y":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}' \
    "$one$two$four$one"
expect 0 'y (+=)' run cumsum.forward "$work/add" -o "$work/y" --accumulate y
[ "$(tail -c 8 "$work/y" | od -An -tx1 | tr -d ' \n')" = 0000a04000008040 ] || fault 'accumulate is wrong' # 5, 4
expect 1 'which is an output: add to it with --accumulate y' run cumsum.forward "$work/add" -o "$work/z"
expect 0 'y       [2]    f32' run cumsum.forward "$work/add" -o "$work/z" --ignore-extra
expect 1 'no tensor "y" for --accumulate' run cumsum.forward "$work/good" -o "$work/z" --accumulate y
# run reads what run writes: its y is not an input of the op, and the message names it
expect 1 'has a tensor "y", which is an output' run cumsum.forward "$work/y" -o "$work/z"
expect 1 'has a tensor "y", which rope.backward does not take; it takes dy, cosine, sine, positions' \
    run rope.backward "$work/y" -o "$work/z"
# outputs by choice, and dtypes
expect 0 '1 tensor written' run layer_norm.forward "$work/good" -o "$work/z" --outputs rstd --threads 1
grep -q '"y":' "$work/z" && fault '--outputs rstd wrote y, too'
expect 1 'must be' run layer_norm.forward "$work/good" -o "$work/z" --output-dtype y=bf16
# indices of each type pick row 1: 3, 4
table='"table":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'
make_file i32 "{$table,\"index\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[16,20]}}" "$one$two$three$four"'\001\000\000\000'
make_file i64 "{$table,\"index\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[16,24]}}" "$one$two$three$four"'\001\000\000\000\000\000\000\000'
make_file f32 "{$table,\"index\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[16,20]}}" "$one$two$three$four$one"
for index in i32 i64 f32; do
    expect 0 '"min": 3, "max": 4' run gather.forward "$work/$index" -o "$work/z" --device ref --json
done
make_file past "{$table,\"index\":{\"dtype\":\"I32\",\"shape\":[1],\"data_offsets\":[16,20]}}" "$one$two$three$four"'\002\000\000\000'
expect 1 'gather.forward: index' run gather.forward "$work/past" -o "$work/never" --device ref
# more workspace than the default of 128 MiB: gather.backward takes 8 bytes per row of the table
make_file many '{"dy":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]},"index":{"dtype":"I32","shape":[1],"data_offsets":[2,6]}}' \
    '\040\100\003\000\000\000'
expect 0 '"shape": [18000000], "accumulated": false, "norm": 2.5,' run gather.backward "$work/many" -o "$work/z" --json rows=18000000
# a scalar, and a NaN without the sign that some processors give it
expect 0 'y       scalar  f32' run sum_squares.forward "$work/good" -o "$work/z"
make_file nan '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' '\000\000\300\377\000\000\300\177'
expect 0 '       nan ' run cumsum.forward "$work/nan" -o "$work/z"
grep -q -e '-nan' "$work/out" && fault 'run: a NaN with a sign'
# no rows at all
make_file empty '{"x":{"dtype":"F32","shape":[0,4],"data_offsets":[0,0]}}' ''
expect 0 '[0, 4]' run layer_norm.forward "$work/empty" -o "$work/z" --device ref
expect 0 '"min": null' run layer_norm.forward "$work/empty" -o "$work/z" --device ref --json

# ---- run: what the library refuses, by name and number ----
make_file shape '{"x":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"gamma":{"dtype":"F32","shape":[1],"data_offsets":[16,20]}}' \
    "$one$two$three$four$one"
expect 1 'layer_norm.forward: gamma has shape [1]; expected [2]' run layer_norm.forward "$work/shape" -o "$work/never"
expect 1 'dy is missing' run layer_norm.backward "$work/good" -o "$work/never"
expect 1 'axes is 3' run layer_norm.forward "$work/good" -o "$work/never" axes=3
expect 1 'unknown device "tpu"; there are ref, cpu' run cumsum.forward "$work/good" -o "$work/never" --device tpu
expect 1 'cuda:9: ' run cumsum.forward "$work/good" -o "$work/never" --device cuda:9
make_file f64 '{"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}' '\000\000\000\000\000\000\360\077'
expect 1 'cpu has no kernel for f64; it has f32, bf16, f16; use --device ref for f64' run layer_norm.forward "$work/f64" -o "$work/never"
expect 0 'f64' run layer_norm.forward "$work/f64" -o "$work/z" --device ref
make_file u8 '{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}' '\001'
expect 1 'tensor "x" is U8; vjp computes with F64, F32' run cumsum.forward "$work/u8" -o "$work/never"
make_file rank '{"x":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}}' "$one"
expect 1 'has rank 9; ranks go to 8' run cumsum.forward "$work/rank" -o "$work/never"
make_file integer '{"x":{"dtype":"I32","shape":[1],"data_offsets":[0,4]}}' '\001\000\000\000'
expect 1 'x is i32; it must be f32' run cumsum.forward "$work/integer" -o "$work/never"

# ---- run: malformed files ----
x='"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
make_file m01 "{$x" "$one"
make_file m02 "$x}" "$one"
make_file m03 "{$x}," "$one"
make_file m04 "{$x,$x}" "$one"
make_file m05 "{$x}" ''
make_file m06 "{$x}" "$one$two"
make_file m07 '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}' "$one"
make_file m08 '{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}' "$one"
make_file m09 '{"x":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}' "$one"
make_file m10 '{"x":{"dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]}}' "$one"
make_file m11 '{"x":{"dtype":"Q7","shape":[1],"data_offsets":[0,4]}}' "$one"
make_file m12 "{$x,"'"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}' "$one$two"
make_file m13 "{$x,"'"b":{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}' "$one$two$three"
make_file m14 '{"x":null}' ''
make_file m15 '{"x\u0000":{}}' ''
printf '\377\377\377\377\377\377\377\377{}' >"$work/m16"
printf '\002\000' >"$work/m17"
: >"$work/m18"
printf 'this is not such a file' >"$work/m19"
head -c 60 "$work/good" >"$work/m20"
for file in "$work"/m[0-9][0-9]; do
    expect 1 "vjp run: $file: " run cumsum.forward "$file" -o "$work/never"
done
expect 1 'No such file' run cumsum.forward "$work/absent" -o "$work/never"
expect 1 'Is a directory' run cumsum.forward "$work" -o "$work/never"

# ---- run: the input is not overwritten ----
cp "$work/good" "$work/kept"
expect 2 '-o names the input' run cumsum.forward "$work/good" -o "$work/good"
ln "$work/good" "$work/alias"
expect 2 '-o names the input' run cumsum.forward "$work/good" -o "$work/alias"
cmp -s "$work/good" "$work/kept" || fault 'run: the input was overwritten'

# ---- run: places that cannot be written ----
[ ! -e "$work/never" ] || fault 'a failed run has written its output'
expect 1 "$work/nowhere/y: it cannot be created: No such file" run cumsum.forward "$work/good" -o "$work/nowhere/y"
expect 1 'it is a folder' run cumsum.forward "$work/good" -o "$work"
# A pipe is written to, not replaced. Only if that works is one of the system's devices tried, too.
mkfifo "$work/pipe"
exec 9<>"$work/pipe"
expect 0 '1 tensor written' run cumsum.forward "$work/good" -o "$work/pipe"
exec 9>&-
if [ ! -p "$work/pipe" ]; then
    fault 'a pipe has been replaced by a file'
elif [ -c /dev/full ]; then
    expect 1 '/dev/full: it cannot be written: No space left on device' run cumsum.forward "$work/good" -o /dev/full
    for arguments in info ops 'ops --json' --help 'run --help' 'ops --markdown'; do
        "$vjp" $arguments >/dev/full 2>"$work/err"
        [ $? -eq 1 ] || fault "vjp $arguments >/dev/full: status is not 1"
        grep -q 'standard output cannot be written: No space left' "$work/err" || fault "vjp $arguments >/dev/full: no sentence"
    done
fi
"$vjp" ops >&- 2>"$work/err"
[ $? -eq 1 ] || fault 'a closed stdout: status is not 1'
# Files that are opened do not get the numbers of closed streams, so that what is printed does not end up in them.
"$vjp" run cumsum.forward "$work/good" -o "$work/z" >&- 2>&- <&-
"$vjp" run cumsum.forward "$work/good" -o "$work/y" >"$work/out"
cmp -s "$work/z" "$work/y" || fault 'closed streams: the output has something else in it'
if [ "$(id -u)" -ne 0 ]; then
    mkdir "$work/locked" && chmod 500 "$work/locked"
    expect 1 'Permission denied' run cumsum.forward "$work/good" -o "$work/locked/y"
fi
# A file that grows past a limit, as on a full disk: the old one stays, and no temporary file is left.
mkdir "$work/small" && printf old >"$work/small/y"
rows=$(head -c 4096 /dev/zero | tr '\000' a)
make_file wide '{"x":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}' "$rows"
(
    trap '' XFSZ
    ulimit -f 1
    "$vjp" run cumsum.forward "$work/wide" -o "$work/small/y" >/dev/null 2>&1
)
[ $? -eq 1 ] || fault 'a file past the limit: status is not 1'
[ "$(cat "$work/small/y")" = old ] || fault 'the old file is gone'
[ "$(ls "$work/small")" = y ] || fault 'a temporary file is left'

# ---- bench train: a step of the smallest model ----
expect 0 'vjp bench train' bench train --help
expect 0 'tokens/s' bench train --preset tiny --batch 1 --context 16 --steps 1 --threads 1
grep -q '^linear  *backward ' "$work/out" || fault 'bench train: no row of linear backward'
grep -q '^memory .*arena' "$work/out" || fault 'bench train: no line of memory'
expect 0 '"row": "step", "preset": "tiny"' bench train --preset tiny --batch 1 --context 16 --steps 1 --threads 1 --dtype bf16 --gradients bf16 --moments bf16 --json
expect 2 'train comes before its options' bench --threads 1 train
expect 2 '--dtype is i32; it must be f32, bf16 or f16' bench train --dtype i32
expect 2 '--gradients bf16 needs --dtype bf16' bench train --gradients bf16
expect 2 '--moments is i32; it must be f32 or bf16' bench train --moments i32
expect 2 'unexpected argument' bench train extra
expect 1 'unknown preset "huge"; presets are tiny' bench train --preset huge
expect 1 'unknown device "tpu"' bench train --device tpu

# ---- --products ----
abacus='unknown matrix products "abacus"; they must be one of builtin, amx, blas'
expect 0 'y       [2, 2]  f32' run cumsum.forward "$work/good" -o "$work/y" --products builtin
expect 1 "$abacus" run cumsum.forward "$work/good" -o "$work/y" --products abacus
expect 1 'ref: matrix_products is "builtin", but this device has no choice of it' run cumsum.forward "$work/good" -o "$work/y" --device ref --products builtin
expect 2 '--products needs a value' run cumsum.forward "$work/good" -o "$work/y" --products
expect 0 'cumsum' bench cumsum --quick --products builtin
expect 1 "$abacus" bench cumsum --quick --products abacus
expect 0 'tokens/s' bench train --preset tiny --batch 1 --context 16 --steps 1 --threads 1 --products builtin
expect 1 "$abacus" bench train --preset tiny --products abacus
for i in 1 2 3 4 5 6 7 8 9; do echo "line $i of a text"; done >"$work/text"
expect 0 'done at step 1' train "$work/text" --preset tiny --batch 1 --context 16 --steps 1 --validate-every 0 --out "$work/run"
expect 0 'perplexity' eval "$work/run" "$work/text" --products builtin
expect 1 "$abacus" eval "$work/run" "$work/text" --products abacus
expect 0 '' sample "$work/run" --bytes 4 --products builtin
expect 1 "$abacus" sample "$work/run" --bytes 4 --products abacus

# ---- check and bench fail on an unknown device ----
for command in check bench; do
    expect 1 'unknown device "tpu"' $command --device tpu
done

finish 'all passed'
