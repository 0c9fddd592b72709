#!/usr/bin/env bash
# Trains a config with torchrun on several hosts that share a folder, without a scheduler. Run the same
# command on every host, from the same folder; only --node_rank differs. The hosts may start in any order.
#
#   tools/train_multinode.sh --num_nodes 2 --node_rank 0 --num_gpus 4 --master_addr host0 \
#       --config configs/gpt.yaml [train.lr=3e-4 …]
#
# The same commands continue the run. --help has the options. $PYTHON: the interpreter.
set -euo pipefail
exec "${PYTHON:-python3}" "$(dirname "$(readlink -f "$0")")/train_multinode.py" "$@"
