#!/bin/sh
# SPDX-License-Identifier: MIT Adding an op touches one line of src/op/ops.def and the op's own files: adds the op of
# tests/add_op/ to a copy of the tree, generates what follows from it, builds ref and cpu, and checks the new op on
# both. Then breaks its CPU kernel and expects the check to fail. Usage: test_add_op.sh SOURCE_FOLDER
set -eu
source=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

(cd "$source" && tar cf - CMakeLists.txt cmake include src scripts docs/ops tests/samples.h python) | (cd "$work" && tar xf -)
cp -r "$source"/tests/add_op/src "$source"/tests/add_op/docs "$work"
sed -i 's|^/\* clang-format on \*/|OP(square, elementwise, no, no)\n&|' "$work/src/op/ops.def"
[ "$(diff "$source/src/op/ops.def" "$work/src/op/ops.def" | grep -c '^[<>]')" -eq 1 ]

cd "$work"
scripts/generate
scripts/generate --check
scripts/structure
set_name=avx2
grep -q avx512vl /proc/cpuinfo 2>/dev/null && set_name=avx512
case $(uname -m) in aarch64 | arm64) set_name=neon ;; esac
generator=
command -v ninja >/dev/null && generator="-G Ninja"
# shellcheck disable=SC2086
cmake -S . -B build $generator -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS=-O0 -DVJP_SETS=$set_name -DVJP_PLAIN=OFF -DVJP_CUDA=off \
    -DVJP_WEBGPU=off -DVJP_METAL=off -DVJP_BUILD_TESTS=OFF >build.log
cmake --build build --parallel ${CMAKE_BUILD_PARALLEL_LEVEL:-} --target vjp >>build.log || { tail -n 30 build.log; exit 1; }
build/vjp ops square
build/vjp check square --device ref | tail -n 1
build/vjp check square | tail -n 1

sed -i 's|vf_set(2), e->in\[1\]|vf_set(1), e->in[1]|' src/cpu/elementwise/square.c
cmake --build build --parallel ${CMAKE_BUILD_PARALLEL_LEVEL:-} --target vjp >>build.log || { tail -n 30 build.log; exit 1; }
if build/vjp check square --quick >broken.txt; then
    echo "the check did not catch a broken backward"
    exit 1
fi
grep -c 'FAILED' broken.txt
