# Sourced by test.sh: installs the packages that only the slow tests need.

# Succeeds if the pytest arguments ask for slow tests. As in pytest, the last -m counts.
asks_for_slow() {
    local expression='not slow' next=
    for argument in "$@"; do
        if [ -n "$next" ]; then
            expression=$argument next=
        else
            case $argument in
            -m) next=1 ;;
            -m?*) expression=${argument#-m} ;;
            esac
        fi
    done
    [[ "${expression//not slow/}" =~ (^|[^a-z_])slow($|[^a-z_]) ]]
}

# want WHAT PROGRAM COMMAND...: runs COMMAND if PROGRAM is missing. If COMMAND fails, a notice names WHAT,
# and the tests that need WHAT skip.
want() {
    local what=$1 program=$2
    shift 2
    if command -v "$program" >/dev/null || "$@" && hash -r && command -v "$program" >/dev/null; then
        return 0
    fi
    export HPCRUN_SLURM_UNAVAILABLE="${HPCRUN_SLURM_UNAVAILABLE:-} $what"
    echo "NOTICE: THE TESTS WITH $what ARE SKIPPED: $program could not be installed" >&2
}

install_for_slow_tests() {
    local apt=(env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends)
    PATH="$PATH:/usr/sbin:/sbin"
    want accounting slurmdbd tools/devcluster install --accounting
    want gluster glusterfsd tools/devcluster install --shared-fs gluster
    want ext4 mkfs.ext4 "${apt[@]}" e2fsprogs
    want iperf3 iperf3 "${apt[@]}" iperf3
    want wandb wandb python -m pip install --quiet --disable-pip-version-check -c constraints.txt wandb
}
