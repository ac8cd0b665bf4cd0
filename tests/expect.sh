# SPDX-License-Identifier: MIT
# What the tests of the program from outside share: a folder $work, expect() and fault(). A test sets $vjp, and strict=1 if a command that
# fails must print nothing on stdout; it includes this file, and ends with finish.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# fault SENTENCE: counts a failure, and shows what the last command printed.
fault() {
    failures=$((failures + 1))
    printf 'FAILED: %s\n' "$1"
    sed 's/^/    stdout: /' "$work/out" | tail -n 5
    sed 's/^/    stderr: /' "$work/err" | tail -n 5
}

# expect STATUS TEXT ARGUMENTS...: runs vjp; the text must be on stderr (status 1, 2) or on stdout (status 0).
expect() {
    status=$1 text=$2
    shift 2
    "$vjp" "$@" >"$work/out" 2>"$work/err"
    got=$?
    if [ "$got" -ne "$status" ]; then
        fault "vjp $*: status $got instead of $status"
    elif [ "$status" -eq 0 ]; then
        grep -qF -e "$text" "$work/out" || fault "vjp $*: stdout does not say: $text"
        [ ! -s "$work/err" ] || fault "vjp $*: something on stderr"
    else
        grep -qF -e "$text" "$work/err" || fault "vjp $*: stderr does not say: $text"
        [ -z "${strict:-}" ] || [ ! -s "$work/out" ] || fault "vjp $*: something on stdout"
    fi
}

# finish SENTENCE: the end of a test.
finish() {
    [ $failures -eq 0 ] || { echo "$failures failed" && exit 1; }
    echo "$1"
}
