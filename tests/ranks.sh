# SPDX-License-Identifier: MIT
# What the tests of `vjp train` on several processes share: launchers, the comparison of two runs, and a text. A test sets $vjp and $kinds
# (openmpi, mpich) and includes this file; $found is the kinds that can be launched, and without any the test ends with status 77.
export VJP_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
unset VJP_ISA VJP_GEMM
. "$(dirname "$0")/expect.sh"

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

# processes LAUNCHER: the numbers of the ranks that it started, directly or by another process.
processes() {
    for child in $(pgrep -P "$1"); do
        case $(tr '\0' ' ' <"/proc/$child/cmdline" 2>/dev/null) in
        "$vjp train"*) echo "$child" ;;
        *) processes "$child" ;;
        esac
    done
}

# A text to train on.
i=0
while [ $i -lt 500 ]; do
    echo "line $i: the quick brown fox learns to jump over $((i * i)) dogs"
    i=$((i + 1))
done >"$work/text"
