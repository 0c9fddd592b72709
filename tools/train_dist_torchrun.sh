#!/usr/bin/env bash
# Trains a config with torchrun on this host, without any scheduler: makes the run directory, or continues
# the one that is there, and starts a rank per GPU. Ctrl-C or SIGTERM saves a checkpoint and stops.
#
#   tools/train_dist_torchrun.sh --num_gpus 4 --config configs/gpt.yaml [train.lr=3e-4 …]
#
# Everything else goes to `hpcrun submit`: overrides, --name, --runs-dir, --cpu. $PYTHON: the interpreter.
set -euo pipefail
python=${PYTHON:-python3}
gpus=1
rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '$d'; exit 0 ;;
        --num_gpus) gpus=${2:?--num_gpus needs a number}; shift ;;
        --num_gpus=*) gpus=${1#*=} ;;
        *) rest+=("$1") ;;
    esac
    shift
done
told=$("$python" -m hpcrun submit --prepare --json --nodes 1 --gpus "$gpus" "${rest[@]}")
run=$("$python" -c 'import json, sys; told = json.loads(sys.argv[1]); print("" if "result" in told else told["run"])' "$told")
if [ -z "$run" ]; then echo "hpcrun: this run is finished already; for a new one choose another --name"; exit 0; fi
# --standalone: torchrun finds a free port by itself. Its own restarts stay off: without a scheduler a
# person decides whether to go on, by this same line.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" --max-restarts=0 \
    -m hpcrun.worker "$run"
