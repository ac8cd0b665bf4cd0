#!/bin/sh
# SPDX-License-Identifier: MIT
# `vjp train` on two hosts of Open MPI that are network namespaces of this machine, joined by a link with delay and packet loss: the same
# bytes as on one process, by TCP alone. Needs root. With VJP_ALL=1 also without ZeRO and without overlap.
# Usage: test_train_hosts.sh PATH_OF_VJP; status 77: it cannot run here
set -u
vjp=$1
kinds=openmpi
. "$(dirname "$0")/ranks.sh"
. "$(dirname "$0")/hosts.sh"

# What mpirun uses in the place of ssh: HOST COMMAND...
cat >"$work/agent" <<END
#!/bin/sh
shift
exec nsenter --net=/run/netns/vjp-$$-other unshare -u sh -c "hostname other && \$*"
END
chmod +x "$work/agent"

options="train $work/text --preset tiny --batch 4 --context 32 --steps 3 --warmup 1 --validate-every 0 --shards 2"
"$vjp" $options --out "$work/alone" >"$work/out" 2>"$work/err" || fault 'one process'
for how in zero-on zero-off overlap-off; do
    [ $how = zero-on ] || [ -n "${VJP_ALL:-}" ] || continue
    case $how in
    zero-*) more="--zero ${how#zero-}" ;;
    *) more='--overlap off' ;;
    esac
    on one timeout 300 $(launch openmpi 2) --host 10.77.0.1,10.77.0.2 --mca plm_rsh_agent "$work/agent" --mca btl tcp,self \
        --mca btl_tcp_if_include veth0 --mca oob_tcp_if_include veth0 "$vjp" $options $more --out "$work/$how" >"$work/out" 2>"$work/err"
    status=$?
    [ $status -eq 0 ] || fault "$how: status $status"
    same "$work/alone" "$work/$how"
done
lost=$(dropped)
finish "two hosts: the same bytes; ${lost:-0} packets were dropped$link"
