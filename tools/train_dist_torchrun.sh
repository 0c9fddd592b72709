#!/usr/bin/env bash
# Trains a config with torchrun on this host, without a scheduler: makes the run
# directory, or continues an existing one, and starts a rank per GPU. Ctrl-C or
# SIGTERM saves a checkpoint and stops.
#
#   tools/train_dist_torchrun.sh [--num_gpus 4] --config configs/gpt.yaml [train.lr=3e-4 …]
#
# Without --num_gpus (or with `gpu`), all GPUs that CUDA_VISIBLE_DEVICES shows;
# without a GPU, 1 rank on the CPU. Other arguments go to `hpcrun submit`:
# overrides, --name, --runs-dir, --cpu. $PYTHON: the interpreter.
set -euo pipefail
python=${PYTHON:-python3}
gpus=gpu
rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --num_gpus | --num-gpus)
            if [ $# -lt 2 ]; then echo "hpcrun: --num_gpus needs a number, such as --num_gpus 4" >&2; exit 2; fi
            gpus=$2; shift ;;
        --num_gpus=* | --num-gpus=*) gpus=${1#*=} ;;
        --) rest+=("$@"); break ;;
        *) rest+=("$1") ;;
    esac
    shift
done
if [ "$gpus" = gpu ] || [ "$gpus" = auto ]; then
    gpus=$("$python" -c 'import os; from hpcrun.devices.devices import visible_gpus as gpus; print(gpus(os.environ))')
    if [ "$gpus" = 0 ]; then
        echo "hpcrun: no GPU is visible: 1 rank on the CPU; --num_gpus N starts N ranks"
        gpus=1
    fi
fi
answer=$("$python" -m hpcrun submit --prepare --json --nodes 1 --gpus "$gpus" "${rest[@]}")
run=$("$python" -c 'import json, sys; answer = json.loads(sys.argv[1]); print("" if "result" in answer else answer["run"])' "$answer")
if [ -z "$run" ]; then echo "hpcrun: this run is finished already; for a new one choose another --name"; exit 0; fi
# --standalone: torchrun finds a free port. Its restarts are off: without a scheduler, a person
# decides on a restart, with the same command.
exec "$python" -m torch.distributed.run --standalone --nproc-per-node="$gpus" --max-restarts=0 \
    -m hpcrun.worker "$run"
