#!/usr/bin/env bash
# Sets up everything that the tests need and runs them: style, types, import rules, then pytest.
# A real Slurm is brought up where this user may (root on Debian); elsewhere its tests say why they skip.
# Arguments go to pytest; long tests are left out unless asked for: tools/test.sh -m slow
# These need more packages (GlusterFS, MooseFS, slurmdbd and MariaDB, iperf3, e2fsprogs, wandb), installed then.
# Without arguments the lifecycle tests also run on the newest Slurm, before all tests run on the system's.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/environment.sh
. tools/slow_packages.sh
hpcrun_environment "dev"
ready=
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    tools/devcluster install
    # Other versions of Slurm, for the tests that name one. Exit code 3: no packages to be had.
    for version in 24.11 26.05; do
        code=0
        tools/devcluster install --slurm "$version" || code=$?
        case $code in
        0) ready="$ready $version " ;;
        3)
            HPCRUN_SLURM_UNAVAILABLE="${HPCRUN_SLURM_UNAVAILABLE:-} $version"
            echo "NOTICE: Slurm $version IS NOT TESTED: its packages cannot be fetched" >&2
            ;;
        *) exit "$code" ;;
        esac
    done
    export HPCRUN_SLURM_UNAVAILABLE="${HPCRUN_SLURM_UNAVAILABLE:-}"
    if asks_for_slow "$@"; then install_for_slow_tests; fi
fi
ruff check .
ruff format --check .
mypy
mypy --strict tools/devclusterlib
lint-imports
# Three at a time even on two cores: much of a test on a real Slurm is waiting. A file stays on one
# worker, and each worker has a cluster of its own. Of two -m, or -n, pytest takes the last. What
# skips says why (-rs). A run of everything ends after this limit, whatever hangs.
limit="timeout --foreground --signal=INT --kill-after=60 2400"
tests() {
    $limit python -m pytest -n "${HPCRUN_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder -rs \
        --durations=25 --durations-min=5 "$@"
}
if [ $# -gt 0 ]; then
    limit=
    tests -m "not slow" "$@"
    exit
fi
# A test that fails runs again after all other tests: a machine that other programs keep busy
# must not stop a change. Such a test is a defect all the same, and the last lines name it. Where many
# fail, the change is at fault, and no test runs again.
unsteady=
again() {
    local what=$1 code=$2 list
    shift 2
    [ "$code" = 1 ] || return "$code"
    list=$(python - <<'PY'
import json, pathlib
found = pathlib.Path(".pytest_cache/v/cache/lastfailed")
print("\n".join(json.loads(found.read_text())) if found.exists() else "")
PY
    )
    if [ -z "$list" ] || [ "$(wc -l <<<"$list")" -gt 5 ]; then return "$code"; fi
    printf '\n==== Once more, by themselves (%s):\n%s\n' "$what" "$list"
    $limit python -m pytest -n 1 --lf --lfnf=none -rs "$@" || return
    unsteady="$unsteady$list"$'\n'
}
newest=26.05
failed=0
rm -f .pytest_cache/v/cache/lastfailed
if [[ "$ready" = *" $newest "* ]]; then
    printf '\n==== Lifecycle tests on Slurm %s\n' "$newest"
    lifecycle=(-m "lifecycle and not slow" tests/slurm)
    export HPCRUN_TEST_SLURM=$newest
    tests "${lifecycle[@]}" || again "Slurm $newest" $? "${lifecycle[@]}" || failed=$?
    unset HPCRUN_TEST_SLURM
    rm -f .pytest_cache/v/cache/lastfailed
else
    echo "NOTICE: THE LIFECYCLE TESTS ON SLURM $newest ARE LEFT OUT: it could not be installed" >&2
fi
printf '\n==== Every test, on the Slurm of this system\n'
tests -m "not slow" || again "the Slurm of this system" $? -m "not slow" || exit
[ -z "$unsteady" ] || printf 'UNSTEADY: failed among the others, passed alone; mend each:\n%s' "$unsteady" >&2
[ "$failed" = 0 ] || echo "FAILED: the lifecycle tests on Slurm $newest, see above" >&2
exit "$failed"
