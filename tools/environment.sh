# Sourced by quickstart.sh and test.sh: makes the virtual environment and installs the package into it.
# Arguments: the extras to install, e.g. "dev".

# Finds a Python. Prefers one that other users can run: the Slurm tests submit as a normal user, who has no
# access to an interpreter in another user's home.
hpcrun_find_python() {
    local candidate found=
    for candidate in "${PYTHON:-}" python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10; do
        [ -n "$candidate" ] && candidate=$(command -v "$candidate") || continue
        "$candidate" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))" 2>/dev/null || continue
        found=${found:-$candidate}
        if [ "$(id -u)" != 0 ] || (cd / && setpriv --reuid=65534 --regid=65534 --clear-groups \
            "$candidate" -c "" 2>/dev/null); then
            found=$candidate
            break
        fi
    done
    [ -n "$found" ] && echo "$found" && return
    echo "no Python >= 3.10 with venv was found; on Debian: apt-get install python3-venv" >&2
    return 1
}

hpcrun_environment() {
    local extras=$1 venv=${HPCRUN_VENV:-.venv} stamp wanted
    venv=$(realpath -m "$venv")
    # A change of one of the two files, or another checkout with the same environment, installs again.
    wanted="$extras $(cat pyproject.toml constraints.txt | cksum) $PWD"
    stamp="$venv/.hpcrun-installed"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        local python
        python=$(hpcrun_find_python)
        echo "setting up $venv with $python (once)"
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        # Errors only: without -qq, pip warns of root and of future changes in packages of others.
        "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
            --constraint constraints.txt --editable ".${extras:+[$extras]}"
        echo "$wanted" >"$stamp"
    fi
    export PATH="$venv/bin:$PATH"
}
