#!/usr/bin/env bash
# From a fresh clone to a trained model: a virtual environment, the dependencies, then the main job.
# Interrupt it, run it again: it goes on where it stopped. Arguments go to the submission.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
hpcrun_environment ""
echo "for hpcrun status, preempt and so on from another terminal: . ${HPCRUN_VENV:-.venv}/bin/activate"
echo "+ python -m hpcrun.submit --nodes 2 --gpus 4 $*"
exec python -m hpcrun.submit --nodes 2 --gpus 4 "$@"
