# SPDX-License-Identifier: MIT
# Two hosts on this machine: network namespaces, joined by a link with delay and packet loss (tc netem; without it a slow link whose short
# queue delays packets and drops what does not fit). Needs root. A test includes this file after expect.sh; where it cannot be done, it ends
# with status 77. The hosts are called one (10.77.0.1) and other (10.77.0.2), and the link veth0 on both.
skip() {
    echo "not run: $1"
    exit 77
}
[ "$(id -u)" -eq 0 ] || skip 'namespaces need root'
for tool in ip tc nsenter unshare; do
    command -v $tool >/dev/null 2>&1 || skip "there is no $tool"
done

# close_hosts: a test that starts more has a trap of its own, which ends with this.
close_hosts() {
    for host in one other; do
        ip netns del vjp-$$-$host 2>/dev/null
    done
    rm -rf "$work"
}
trap close_hosts EXIT
ip netns add vjp-$$-one 2>/dev/null && ip netns add vjp-$$-other || skip 'network namespaces are not allowed'
ip link add veth0 netns vjp-$$-one type veth peer name veth0 netns vjp-$$-other || skip 'a virtual link is not allowed'
at=1 link=''
for host in one other; do
    ip -n vjp-$$-$host link set lo up && ip -n vjp-$$-$host addr add 10.77.0.$at/24 dev veth0 && ip -n vjp-$$-$host link set veth0 up || skip 'no link'
    tc -n vjp-$$-$host qdisc add dev veth0 root netem delay 2ms 1ms loss 1% 2>/dev/null ||
        tc -n vjp-$$-$host qdisc add dev veth0 root tbf rate 80mbit burst 16kb latency 3ms 2>/dev/null ||
        link='; this kernel has neither netem nor tbf: without delay and loss'
    at=$((at + 1))
done

# on HOST COMMAND...: runs a command there; it cannot be a function. (`ip netns exec` would hide /sys/fs/cgroup, which Slurm reads.)
on() {
    host=$1
    shift
    nsenter --net=/run/netns/vjp-$$-$host unshare -u sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
}

# dropped: how many packets the link has lost on its way from the first host.
dropped() {
    tc -n vjp-$$-one -s qdisc show dev veth0 2>/dev/null | sed -n 's/.*dropped \([0-9]*\).*/\1/p' | head -n 1
}
