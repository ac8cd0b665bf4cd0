#!/bin/sh
# SPDX-License-Identifier: MIT
# tests/test_install.sh SOURCE BUILD: tests the installed library as a user would use it.
#
# Installs BUILD into a temporary prefix, moves that prefix elsewhere (nothing in it may depend on the old path), checks
# what libvjp.so exports, includes the header from strict C99 and from C++, then builds and runs every example and the
# README's program: by find_package() and by pkg-config, shared and static.
set -eu

source=$(cd "$1" && pwd)
build=$(cd "$2" && pwd)
cc=$(sed -n 's/^CMAKE_C_COMPILER:[A-Z]*=//p' "$build/CMakeCache.txt")
fail() {
    echo "test_install: $*" >&2
    exit 1
}
command -v pkg-config >/dev/null || fail "there is no pkg-config"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cmake --install "$build" --prefix "$work/first" >"$work/log" 2>&1 || fail "cmake --install: $(cat "$work/log")"
mv "$work/first" "$work/prefix"
prefix=$work/prefix
library=$(find "$prefix" -name libvjp.so)
if grep -rlF -e "$work/first" -e "$build" -e "$source" --include=*.cmake --include=*.pc --include=*.h "$prefix"; then
    fail "the files above name a folder of the build machine"
fi

# ---- What is exported: exactly the functions that the header declares -----------------------------------
"$cc" -E -P "$prefix/include/vjp.h" | tr '\n' ' ' | tr ';' '\n' | grep -v typedef |
    sed -n 's/.*[ *]\(vjp_[a-z0-9_]*\)(.*).*/\1/p' | sort -u >"$work/declared"
nm -D --defined-only "$library" | awk '{print $3}' | sort -u >"$work/exported"
[ "$(wc -l <"$work/declared")" -gt 40 ] || fail "found only $(wc -l <"$work/declared") functions in vjp.h"
diff "$work/declared" "$work/exported" >"$work/log" ||
    fail "declared in vjp.h (<) and exported by libvjp.so (>) differ: $(cat "$work/log")"
readelf -d "$library" | grep -q 'SONAME.*libvjp\.so\.[0-9]' || fail "libvjp.so has no versioned soname"

# ---- The header by itself --------------------------------------------------------------------------------
echo '#include <vjp.h>' >"$work/only.c"
strict="-pedantic-errors -Wall -Wextra -Werror -I$prefix/include -fsyntax-only"
# shellcheck disable=SC2086 # flags are words
"$cc" -std=c99 $strict "$work/only.c" || fail "vjp.h is not C99"
if command -v c++ >/dev/null; then
    # shellcheck disable=SC2086
    c++ -x c++ -std=c++11 $strict "$work/only.c" || fail "vjp.h is not C++11"
fi

# ---- The examples and the README's program --------------------------------------------------------------
run() { # PROGRAM: runs it; checks its status and its output
    said=$("$1" 2>&1) || fail "$1 failed with status $?: $said"
    case $said in
    "" | *DIFFERENT* | *WRONG* | *WROTE*) fail "$1 said: $said" ;;
    esac
    case $1 in
    *00_first_call | *readme)
        # By hand: the row (1, 2, 4) has mean 7/3 and variance 14/9.
        case $said in "y = -1.0690 -0.2673  1.3363"*) ;; *) fail "$1 said: $said" ;; esac
        ;;
    esac
}

sed -n '/^```c$/,/^```$/p' "$source/README.md" | sed '1d;/^```$/,$d' >"$work/readme.c"
[ -s "$work/readme.c" ] || fail "README.md has no C program"
while IFS= read -r line; do
    grep -qxF -- "$line" "$source/examples/00_first_call.c" || fail "README.md's program is not lesson 00's: $line"
done <"$work/readme.c"

for target in vjp::vjp vjp::vjp_static; do
    out=$work/cmake_${target#vjp::}
    { cmake -S "$source/examples" -B "$out" -DCMAKE_PREFIX_PATH="$prefix" -DVJP_LINK=$target -DCMAKE_C_COMPILER="$cc" &&
        cmake --build "$out" --parallel; } >"$work/log" 2>&1 ||
        fail "the examples do not build with $target: $(tail -n 20 "$work/log")"
    for lesson in "$source"/examples/[0-9]*.c; do
        program=$out/$(basename "$lesson" .c)
        run "$program"
        case $target/$(ldd "$program") in
        vjp::vjp_static/*libvjp*) fail "$program was linked with vjp::vjp_static and needs libvjp.so" ;;
        esac
    done
done

by_pkg_config() { # FOLDER PREFIX [--static]
    mkdir "$work/$1"
    folder=$(dirname "$(find "$2" -name vjp.pc)")
    flags=$(PKG_CONFIG_PATH=$folder pkg-config --cflags --libs ${3:-} vjp) || fail "pkg-config ${3:-} finds no vjp"
    for lesson in "$source"/examples/[0-9]*.c "$work/readme.c"; do
        program=$work/$1/$(basename "$lesson" .c)
        # shellcheck disable=SC2086 # flags are words
        "$cc" -std=c99 -O1 -pthread "$lesson" -o "$program" $flags -lm -Wl,-rpath,"$(dirname "$folder")" \
            >"$work/log" 2>&1 || fail "$lesson does not build by pkg-config ${3:-}: $(cat "$work/log")"
        run "$program"
    done
}
by_pkg_config pc_shared "$prefix"
# Where only libvjp.a is installed, -lvjp is the static library, and vjp.pc must name what that one needs.
cp -r "$prefix" "$work/static_prefix"
find "$work/static_prefix" -name 'libvjp.so*' -exec rm {} +
by_pkg_config pc_static "$work/static_prefix" --static

[ ! -x "$build/vjp" ] || "$prefix/bin/vjp" info >/dev/null || fail "the installed program does not run"
echo "installed, moved, and used four ways: the examples and the README's program"
