#!/usr/bin/env bash
# Checks words, spelling, style, types and import rules, in the environment of tools/test.sh.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
hpcrun_environment "dev,integrations"
python tools/prose.py
codespell hpcrun docs tests tools configs sbatch README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md
ruff check .
ruff format --check .
mypy
mypy --strict tools/devclusterlib
lint-imports
