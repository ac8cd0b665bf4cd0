#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` on two hosts of Open MPI that are network namespaces of this machine, joined by a link with delay and packet
# loss (tc netem): the same bytes as on one process, by TCP alone. Needs root; runs with VJP_ALL=1.
# Usage: test_train_hosts.sh PATH_OF_VJP; status 77: it cannot run here
set -u
vjp=$1
skip() {
    echo "not run: $1"
    exit 77
}
[ -n "${VJP_ALL:-}" ] || skip 'only with VJP_ALL=1'
[ "$(id -u)" -eq 0 ] || skip 'namespaces need root'
for tool in ip tc unshare mpirun.openmpi; do
    command -v $tool >/dev/null 2>&1 || skip "there is no $tool"
done
export VJP_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
one=vjp-$$-a other=vjp-$$-b
clean() {
    ip netns del $one 2>/dev/null
    ip netns del $other 2>/dev/null
    rm -rf "$work"
}
trap clean EXIT
ip netns add $one 2>/dev/null && ip netns add $other || skip 'network namespaces are not allowed'
ip link add veth0 netns $one type veth peer name veth0 netns $other || skip 'a virtual link is not allowed'
at=1
for host in $one $other; do
    ip -n $host link set lo up && ip -n $host addr add 10.77.0.$at/24 dev veth0 && ip -n $host link set veth0 up || skip 'no link'
    # Without netem: a slow link, whose short queue delays packets and drops what does not fit.
    tc -n $host qdisc add dev veth0 root netem delay 2ms 1ms loss 1% 2>/dev/null ||
        tc -n $host qdisc add dev veth0 root tbf rate 80mbit burst 16kb latency 3ms 2>/dev/null || plain=1
    at=$((at + 1))
done

# What mpirun uses in the place of ssh: HOST COMMAND...
cat >"$work/agent" <<END
#!/bin/sh
shift
exec ip netns exec $other unshare -u sh -c "hostname other && \$*"
END
chmod +x "$work/agent"

i=0
while [ $i -lt 200 ]; do
    echo "line $i: the quick brown fox learns to jump over $((i * i)) dogs"
    i=$((i + 1))
done >"$work/text"
options="train $work/text --preset tiny --batch 4 --context 32 --steps 3 --warmup 1 --validate-every 0 --shards 2"
"$vjp" $options --out "$work/alone" >/dev/null || exit 1
failures=0 plain=${plain:-}
for how in '--zero on' '--zero off' '--no-overlap'; do
    run="$work/$(echo "$how" | tr -d ' -')"
    timeout 300 ip netns exec $one unshare -u sh -c 'hostname one && exec "$@"' sh mpirun.openmpi --host 10.77.0.1,10.77.0.2 -n 2 \
        --mca plm_rsh_agent "$work/agent" --mca btl tcp,self --mca btl_tcp_if_include veth0 --mca oob_tcp_if_include veth0 \
        "$vjp" $options $how --out "$run" >"$work/out" 2>"$work/err"
    status=$?
    for file in model optimizer; do
        [ $status -eq 0 ] && cmp -s "$work/alone/latest/$file.safetensors" "$run/latest/$file.safetensors" && continue
        failures=$((failures + 1))
        echo "FAILED: $how: status $status, other bytes in $file.safetensors"
        tail -n 5 "$work/err"
    done
done
[ $failures -eq 0 ] || exit 1
dropped=$(tc -n $one -s qdisc show dev veth0 2>/dev/null | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | head -n 1)
[ -z "$plain" ] || echo 'this kernel has neither netem nor tbf: without delay and loss'
echo "two hosts: the same bytes; ${dropped:-0} packets were dropped"
