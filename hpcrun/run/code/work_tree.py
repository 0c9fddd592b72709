"""The git work tree around a folder: its top, and the files that git shows.

If git gives no answer, its error is reported: an empty list would look like missing code.
"""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpcrun.run.directory import RunError

# Seconds: git asks a cold network file system for every file.
_PATIENCE = 300.0
_NOT_TRUSTED = "dubious ownership"
PRIVATE = (
    *("*.env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".pgpass", ".pypirc", ".npmrc"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk"),
    *("*.p12", "*.pfx", "*.jks", "*.kdbx", ".htpasswd", "credentials", "credentials.json"),
)
"""Names of files with passwords and keys, as docs/sites.md lists them: no content is copied to a run."""


def work_tree(folder: Path, *, patience: float = _PATIENCE) -> tuple[Path | None, str]:
    """Return the top folder of the work tree around ``folder``; ``patience``: seconds for git's answer.

    Returns:
        The folder, or None with the reason (empty: there is no work tree).

    Raises:
        RunError: git cannot read the work tree.
    """
    if shutil.which("git") is None:
        inside = any((parent / ".git").exists() for parent in (folder, *folder.parents))
        return None, "git is not on PATH" if inside else ""
    if not folder.is_dir():
        # Nothing can be copied, and the command itself gives the best error.
        return None, f"{folder} is gone"
    done = _git(folder, "rev-parse", "--show-toplevel", patience=patience)
    if done.returncode == 0:
        return Path(os.fsdecode(done.stdout.removesuffix(b"\n"))), ""
    words = _words(done)
    if "not a git repository (or any" in words or "must be run in a work tree" in words:
        return None, ""
    if _NOT_TRUSTED in words:
        return None, f"git says: {words}"
    raise _refusal(folder, words)


def shown_files(top: Path) -> Iterator[Path]:
    """Yield the files and links of the work tree: tracked files, and new files that are not ignored.

    The files of submodules and of other nested repositories are included.

    Raises:
        RunError: git cannot list the files.
    """
    done = _git(top, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if done.returncode != 0:
        raise _refusal(top, _words(done))
    # In a merge, a file is listed once for each side.
    for name in dict.fromkeys(filter(None, done.stdout.split(b"\0"))):
        path = top / os.fsdecode(name)
        # os.path does not raise: this user may not have access to the folder.
        if os.path.islink(path) or os.path.isfile(path):  # noqa: PTH113, PTH114
            yield path
        elif path != top and os.path.lexists(path / ".git"):
            yield from shown_files(path)


def _git(
    folder: Path, *arguments: str, patience: float = _PATIENCE
) -> subprocess.CompletedProcess[bytes]:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=patience,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except OSError as error:
        raise _refusal(folder, f"{error.filename}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        words = f"`git {arguments[0]}` has not answered for {patience:.0f} s"
        raise _refusal(folder, words) from error
    if done.returncode in (-signal.SIGINT, -signal.SIGTERM):
        # Ctrl-C in a terminal also reaches git.
        raise KeyboardInterrupt("nothing was submitted")
    return done


def _words(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").splitlines()
    first = next((line for line in lines if line.startswith(("fatal: ", "error: "))), "")
    words = first.partition(": ")[2] or f"git ended with code {done.returncode}"
    if _NOT_TRUSTED in words:
        named = words.partition("'")[2].partition("'")[0]
        trust = f"git config --global --add safe.directory {shlex.quote(named)}"
        return f"{words}; if you trust its owner: `{trust}`"
    return words


def _refusal(folder: Path, words: str) -> RunError:
    return RunError(
        f"{folder}: git cannot list the code for the snapshot: {words}; correct this, or use the working "
        "tree with --no-snapshot"
    )
