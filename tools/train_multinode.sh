#!/usr/bin/env bash
# Trains a config with torchrun on several hosts that share a file system, without a scheduler. Run it on
# every host, from the same folder; only --node_rank differs. Node 0 makes the run directory, or continues
# an existing one.
#
#   tools/train_multinode.sh --num_nodes 2 --node_rank 0 --num_gpus 4 --master_addr host0 \
#       --config configs/gpt.yaml [train.lr=3e-4 …]
#
# --master_addr: the name or address of node 0 for the other nodes; --master_port (29500): a free port
# there. Other arguments go to `hpcrun submit`: overrides, --name, --runs-dir, --cpu. $PYTHON: the interpreter.
set -euo pipefail
python=${PYTHON:-python3}
nodes=1 node_rank=0 gpus=1 master_addr='' master_port=29500
rest=()
while [ $# -gt 0 ]; do
    if [[ "$1" == --*=* ]]; then set -- "${1%%=*}" "${1#*=}" "${@:2}"; fi
    case "$1" in
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;;
        --num_nodes) nodes=${2:?} && shift ;;
        --node_rank) node_rank=${2:?} && shift ;;
        --num_gpus) gpus=${2:?} && shift ;;
        --master_addr) master_addr=${2:?} && shift ;;
        --master_port) master_port=${2:?} && shift ;;
        *) rest+=("$1") ;;
    esac
    shift
done
if [ "$nodes" -gt 1 ] && [ -z "$master_addr" ]; then
    echo "hpcrun: --master_addr is missing: the name or address of node 0" >&2
    exit 2
fi
if [ "$node_rank" -ge "$nodes" ]; then
    echo "hpcrun: --node_rank $node_rank is not below --num_nodes $nodes; nodes count from 0" >&2
    exit 2
fi

submit=("$python" -m hpcrun submit --json --nodes "$nodes" --gpus "$gpus" "${rest[@]}")
field='import json, sys; print(json.loads(sys.argv[1]).get(sys.argv[2], ""))'
if [ "$node_rank" -eq 0 ]; then
    answer=$("${submit[@]}" --prepare)
    if [ -n "$("$python" -c "$field" "$answer" result)" ]; then
        echo "hpcrun: this run is finished already; for a new one choose another --name"
        exit 0
    fi
else
    answer=$("${submit[@]}" --prepare --dry-run)
fi
run=$("$python" -c "$field" "$answer" run)
# The ranks start when all hosts have joined, after node 0 has made the directory. This loop waits for
# a file system that shows the directory late.
for _ in $(seq 120); do
    if [ -e "$run/run.json" ]; then break; fi
    sleep 1
done
exec "$python" -m torch.distributed.run --nnodes="$nodes" --node-rank="$node_rank" \
    --nproc-per-node="$gpus" --master-addr="${master_addr:-127.0.0.1}" --master-port="$master_port" \
    --max-restarts=0 -m hpcrun.worker "$run"
