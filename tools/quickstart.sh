#!/usr/bin/env bash
# From a fresh clone to a trained model: makes a virtual environment, installs hpcrun, runs the main job.
# After an interruption, run it again to resume. Arguments go to `hpcrun submit`.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
hpcrun_environment ""
printf 'for hpcrun status, preempt and so on from another terminal: . %q\n' "$(dirname "$(command -v python)")/activate"
echo "+ python -m hpcrun.submit --nodes 2 --gpus 4 $*"
exec python -m hpcrun.submit --nodes 2 --gpus 4 "$@"
