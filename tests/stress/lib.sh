# SPDX-License-Identifier: MIT
# Shared by the parts of tests/stress that are shell scripts. A part begins with
#
#     . "$(dirname "$0")/lib.sh"
#     stress_begin NAME "$@"
#
# which reads --seconds S, --seed N and --build DIR and sets: seconds, seed, build (absolute), vjp (the program), work (an
# empty folder, removed at the end). Then it loops `while stress_time_left`, calls `count WHAT` for what it did and `fault
# SENTENCE` for what went wrong, draws numbers with `random LIMIT`, and ends with `stress_end`, which prints one line
#
#     NAME: 12 kills, 3 signals, 0 failures
#
# and exits with 1 if anything failed. `stress_skip SENTENCE` leaves with status 77: this machine cannot run the part.

SKIPPED=77

stress_begin() { # NAME ARGUMENTS...
    part=$1 seconds=10 seed=1 build=build failures=0 counted=()
    shift
    while [ $# -gt 0 ]; do
        case $1 in
        --seconds | --seed | --build)
            [ $# -ge 2 ] || stress_usage
            printf -v "${1#--}" %s "$2"
            shift 2
            ;;
        *) stress_usage ;;
        esac
    done
    case $seconds$seed in *[!0-9]* | '') stress_usage ;; esac
    build=$(cd "$build" 2>/dev/null && pwd) || { echo "$part: there is no folder $build" >&2; exit 2; }
    vjp=$build/vjp
    [ -x "$vjp" ] || { echo "$part: there is no $vjp; build it first" >&2; exit 2; }
    random_state=$((seed * 2654435761 % 2147483648))
    # Memory instead of a disk, where there is some: the parts write many small files and sync each of them.
    work=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo "${TMPDIR:-/tmp}")/vjp-stress-XXXXXX") || exit 2
    trap 'rm -rf "$work"' EXIT
    deadline=$((SECONDS + seconds))
    unset VJP_ISA VJP_GEMM VJP_THREADS
}

stress_usage() {
    echo "usage: tests/stress/$part [--seconds S] [--seed N] [--build DIR]" >&2
    exit 2
}

stress_time_left() { [ $SECONDS -lt $deadline ]; }

# The next number of the seed's sequence, from 0 to LIMIT - 1, in $drawn.
random() { # LIMIT
    random_state=$(((random_state * 1103515245 + 12345) % 2147483648))
    drawn=$((random_state / 8 % $1))
}

# Adds to what the last line counts, in the order of the first calls. WHAT is a plural without blanks, or quoted.
count() { # WHAT [BY]
    local i
    for i in "${!counted[@]}"; do
        [ "${counted[$i]#* }" != "$1" ] || { counted[$i]="$((${counted[$i]%% *} + ${2:-1})) $1"; return; }
    done
    counted+=("${2:-1} $1")
}

fault() { # SENTENCE
    failures=$((failures + 1))
    printf 'FAILED: %s: %s\n    repeat: tests/stress/%s --seconds %s --seed %s --build %s\n' "$part" "$1" "$part" "$seconds" "$seed" "$build"
}

stress_skip() { # SENTENCE
    printf '%s: skipped: %s\n' "$part" "$1"
    exit $SKIPPED
}

stress_end() {
    local list
    printf -v list '%s, ' "${counted[@]}"
    printf '%s: %s%s failures\n' "$part" "$list" "$failures"
    [ "$failures" -eq 0 ]
    exit
}
