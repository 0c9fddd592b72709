#!/usr/bin/env bash
# Trains a config with torchrun on this host, without a scheduler: makes the run directory, or continues
# an existing one, and starts a rank per GPU. Ctrl-C or SIGTERM saves a checkpoint and stops.
#
#   tools/train_dist_torchrun.sh --num_gpus 4 --config configs/gpt.yaml [train.lr=3e-4 …]
#
# Other arguments go to `hpcrun submit`: overrides, --name, --runs-dir, --cpu. $PYTHON: the interpreter.
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
answer=$("$python" -m hpcrun submit --prepare --json --nodes 1 --gpus "$gpus" "${rest[@]}")
run=$("$python" -c 'import json, sys; answer = json.loads(sys.argv[1]); print("" if "result" in answer else answer["run"])' "$answer")
if [ -z "$run" ]; then echo "hpcrun: this run is finished already; for a new one choose another --name"; exit 0; fi
# --standalone: torchrun finds a free port. Its restarts are off: without a scheduler, a person
# decides on a restart, with the same command.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" --max-restarts=0 \
    -m hpcrun.worker "$run"
