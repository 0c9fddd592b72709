# Sourced by quickstart.sh and test.sh: makes the virtual environment and installs the package into it.
# Arguments: the extras to install, e.g. "dev".

# Finds a Python that other users can run: the Slurm tests submit as a normal user, who has no
# access to an interpreter in another user's home.
hpcrun_find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10; do
        [ -n "$candidate" ] && candidate=$(command -v "$candidate") || continue
        "$candidate" - <<'PY' 2>/dev/null && { echo "$candidate"; return 0; }
import os, sys, venv, ensurepip
home = os.path.expanduser("~root") + os.sep
closed = os.getuid() == 0 and os.path.realpath(sys.executable).startswith(home)
sys.exit(0 if sys.version_info >= (3, 10) and not closed else 1)
PY
    done
    echo "no Python >= 3.10 with venv was found; on Debian: apt-get install python3-venv" >&2
    return 1
}

hpcrun_environment() {
    local extras=$1 venv=${HPCRUN_VENV:-.venv} stamp wanted
    # A change of one of the two files rebuilds the environment.
    wanted="$extras $(cat pyproject.toml constraints.txt | cksum)"
    stamp="$venv/.hpcrun-installed"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        local python
        python=$(hpcrun_find_python)
        echo "setting up $venv with $python (once)"
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
            --constraint constraints.txt --editable ".${extras:+[$extras]}"
        echo "$wanted" >"$stamp"
    fi
    export PATH="$PWD/$venv/bin:$PATH"
}
