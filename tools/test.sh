#!/usr/bin/env bash
# Sets up everything that the tests need and runs them: style, types, import rules, then pytest.
# A real Slurm is brought up where this user may (root on Debian); elsewhere its tests say why they skip.
# Arguments go to pytest; long tests are left out unless asked for: tools/test.sh -m slow
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
hpcrun_environment "dev"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    tools/devcluster install
fi
ruff check .
ruff format --check .
mypy
mypy --strict tools/devclusterlib
lint-imports
# Three at a time even on two cores: much of a test on a real Slurm is waiting. A file stays on one
# worker, and each worker has a cluster of its own. Of two -m, or -n, pytest takes the last. What
# skips says why (-rs).
exec python -m pytest -n "${HPCRUN_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder \
    -rs -m "not slow" "$@"
