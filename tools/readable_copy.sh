# Sourced by test.sh and .ci/run: copies a checkout to a place where the tests can run.
# The tests submit as a normal user, who must read the checkout and its virtual environment, and they write the
# checkout's path into shell scripts.

# Prints why the tests cannot run in the current folder; fails if they can.
needs_copy() {
    local LC_ALL=C hidden
    if [[ $PWD == *[!A-Za-z0-9_./+-]* ]]; then
        echo "the path $PWD has a blank or another special character"
        return
    fi
    # Only root starts processes of other users.
    local other=(setpriv --reuid=65534 --regid=65534 --clear-groups)
    [ "$(id -u)" = 0 ] && "${other[@]}" true 2>/dev/null || return 1
    # The names are those of .gitignore without the environment.
    hidden=$(cd / && "${other[@]}" find "$OLDPWD" -ignore_readdir_race \( -name .git -o -name __pycache__ \
        -o -name '.*_cache' -o -name .hypothesis -o -name runs -o -name build -o -name dist -o -name site \) -prune \
        -o ! -readable -print -quit 2>&1) || true
    [ -n "$hidden" ] || return 1
    echo "other users cannot read $PWD"
}

# copy_checkout FOLDER: makes FOLDER a copy of the current folder, without virtual environments and the files
# that git ignores. Keeps the environment and the caches of an earlier copy there.
copy_checkout() {
    find "$1" -mindepth 1 -maxdepth 1 ! -name .venv ! -name '.*_cache' -exec rm -rf {} +
    tar --create --mode=a+rX,go-w --exclude-tag-all=pyvenv.cfg \
        --exclude-from=<(sed -e 's#^/#./#' -e 's#/$##' .gitignore) . |
        tar --extract --directory="$1" --no-same-owner
}

# run_in_copy REASON ARGUMENTS: runs test.sh with ARGUMENTS in a copy that every user can read.
# The place depends on the path of the checkout, so that the next run finds the virtual environment there.
# HPCRUN_TEST_COPY names another place.
run_in_copy() (
    umask 022
    base=/var/cache
    [ -w "$base" ] || base=/var/tmp
    copy=${HPCRUN_TEST_COPY:-$base/hpcrun-tests-$(id -u)-$(cksum <<<"$PWD" | cut -d ' ' -f 1)}
    mkdir -p "$copy"
    if [ -L "$copy" ] || ! [ -O "$copy" ]; then
        echo "$copy belongs to another user: remove it, or set HPCRUN_TEST_COPY to a new folder" >&2
        exit 2
    fi
    chmod 755 "$copy"
    # A virtual environment of this folder has the same fault.
    case ${HPCRUN_VENV:-} in
    "$PWD"/* | [!/]*) unset HPCRUN_VENV ;;
    esac
    echo "$1: the tests run in a copy, $copy"
    shift
    exec 9<"$copy"
    flock --nonblock 9 || { echo "waiting for another run in $copy" && flock 9; }
    copy_checkout "$copy"
    HPCRUN_TEST_IN_COPY=1 bash "$copy/tools/test.sh" "$@" 9<&-
)
