#!/usr/bin/env bash
# Installs the requirements of the tests and runs them: style, types, import rules, then pytest.
# Starts a real Slurm and an sshd as root on Debian; elsewhere the Slurm tests skip with a reason.
# Arguments go to pytest. Slow tests run on request only: tools/test.sh -m slow
# This installs further packages (GlusterFS, slurmdbd and MariaDB, iperf3, e2fsprogs, wandb).
# Without arguments, the lifecycle tests run on the newest Slurm, beside all other tests on the system's Slurm.
# In a folder that other users cannot read, or with a blank in its path, the tests run in a copy.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/readable_copy.sh
if [ -z "${HPCRUN_TEST_IN_COPY:-}" ] && reason=$(needs_copy); then
    run_in_copy "$reason" "$@"
    exit
fi
# The normal user of the tests reads the files that root writes.
umask 022
. tools/environment.sh
. tools/slow_packages.sh
# Debian's packages and Python's packages are installed at the same time.
unavailable=$(mktemp)
packages() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    tools/devcluster install
    # Other versions of Slurm, for the tests that name one. Exit code 3: the packages cannot be downloaded.
    local options code
    for options in "--slurm 24.11" "--slurm 26.05" --apptainer; do
        code=0
        # shellcheck disable=SC2086
        tools/devcluster install $options || code=$?
        case $code in
        0) ;;
        3)
            echo "NOTICE: NOT TESTED, because its packages cannot be fetched: $options" >&2
            echo "${options##*[- ]}" >>"$unavailable"
            ;;
        *) return "$code" ;;
        esac
    done
    # For the tests of --host and of the report's page. With RUNLEVEL=1 Debian starts no service.
    if ! [ -x /usr/sbin/sshd ] || ! command -v rsync >/dev/null || ! command -v chromedriver >/dev/null; then
        RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends \
            openssh-server rsync chromium chromium-driver
    fi
}
packages &
packages=$!
hpcrun_environment "dev,integrations"
# Types take minutes, and the tests do not need them.
style=$(mktemp)
bash tools/style.sh >"$style" 2>&1 &
checks=$!
require_style() {
    local code=0
    wait "$checks" || code=$?
    cat "$style"
    rm "$style"
    return "$code"
}
wait "$packages"
HPCRUN_SLURM_UNAVAILABLE=$(xargs <<<"${HPCRUN_SLURM_UNAVAILABLE:-} $(cat "$unavailable")")
export HPCRUN_SLURM_UNAVAILABLE
rm "$unavailable"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && asks_for_slow "$@"; then
    install_for_slow_tests
fi
# More workers than cores: tests on a real Slurm mostly wait. A file stays on one worker, and each worker has
# its own cluster. pytest uses the last of several -m or -n options. -rs prints the reasons of skipped tests.
# The limit ends a full run that hangs, not a slow one: in 20 minutes each test ends by its own timeout.
limit="python tools/progress_limit.py 1200"
tests() {
    $limit python -m pytest -n "${HPCRUN_TEST_WORKERS:-4}" --dist loadfile --no-loadscope-reorder -rs \
        --durations=25 --durations-min=5 "$@"
}
if [ $# -gt 0 ]; then
    require_style
    limit=
    tests -m "not slow" "$@"
    exit
fi
newest=26.05
rest="not slow"
failed=0
lifecycle=
if [[ "$HPCRUN_SLURM_UNAVAILABLE " != *" $newest "* ]]; then
    # Beside the other tests, which use the processor while these tests wait.
    rest="not slow and not lifecycle"
    output=$(mktemp)
    HPCRUN_TEST_SLURM=$newest tests -n 2 -p no:cacheprovider -m "lifecycle and not slow" tests/on_slurm \
        >"$output" 2>&1 &
    lifecycle=$!
    trap 'kill "$lifecycle" 2>/dev/null || true; rm -f "$output"' EXIT
else
    echo "NOTICE: the lifecycle tests run on the system's Slurm: Slurm $newest could not be installed" >&2
fi
printf '\n==== Tests on the Slurm of this system\n'
tests -m "$rest" || failed=$?
if [ -n "$lifecycle" ]; then
    code=0
    wait "$lifecycle" || code=$?
    printf '\n==== Lifecycle tests on Slurm %s\n' "$newest"
    cat "$output"
    [ "$code" = 0 ] || echo "FAILED: the lifecycle tests on Slurm $newest, see above" >&2
    [ "$failed" != 0 ] || failed=$code
fi
require_style || failed=$?
exit "$failed"
