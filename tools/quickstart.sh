#!/usr/bin/env bash
# From a fresh clone to a trained model: makes a virtual environment, installs hpcrun, runs the main job.
# After an interruption, run it again to resume. Arguments go to `hpcrun submit`.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
hpcrun_environment ""
echo "for hpcrun status, preempt and so on from another terminal: . ${HPCRUN_VENV:-.venv}/bin/activate"
echo "+ python -m hpcrun.submit --nodes 2 --gpus 4 $*"
exec python -m hpcrun.submit --nodes 2 --gpus 4 "$@"
