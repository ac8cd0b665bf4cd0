# SPDX-License-Identifier: MIT
# What the tests of `vjp train` on several processes share: launchers, and what runs.sh has. A test sets $vjp and $kinds
# (openmpi, mpich) and includes this file; $found is the kinds that can be launched, and without any the test ends with status 77.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
. "$(dirname "$0")/runs.sh"

# launcher KIND: the mpirun of that MPI. Debian names each; elsewhere there is one.
launcher() {
    for name in "mpirun.$1" mpirun; do
        command -v "$name" >/dev/null 2>&1 || continue
        case "$1-$("$name" --version 2>/dev/null)" in
        openmpi-*'Open MPI'* | openmpi-*Open*RTE*)
            echo "$name --oversubscribe"
            return
            ;;
        mpich-*HYDRA* | mpich-*MPICH*)
            echo "$name"
            return
            ;;
        esac
    done
}
for kind in $kinds; do
    eval "launcher_$kind=\$(launcher $kind)"
    eval "[ -z \"\$launcher_$kind\" ]" || found="${found:-} $kind"
done
if [ -z "${found:-}" ]; then
    echo "there is no mpirun for any of: $kinds"
    exit 77
fi

# launch KIND COUNT: the command that starts so many processes, without quotes.
launch() {
    eval "echo \$launcher_$1 -n $2"
}

# ranks KIND COUNT ARGUMENTS...: runs vjp on so many processes, at most two minutes; sets $status.
ranks() {
    kind=$1 count=$2
    shift 2
    timeout 120 $(launch "$kind" "$count") "$vjp" "$@" >"$work/out" 2>"$work/err"
    status=$?
    [ $status -ne 124 ] || fault "$*: it does not end"
}

# processes LAUNCHER: the numbers of the ranks that it started, directly or by another process. By MPICH a rank is the child of one that waits
# for it.
processes() {
    for child in $(pgrep -P "$1"); do
        case $(tr '\0' ' ' 2>/dev/null <"/proc/$child/cmdline") in
        "$vjp train"*) pgrep -P "$child" || echo "$child" ;;
        *) processes "$child" ;;
        esac
    done
}
