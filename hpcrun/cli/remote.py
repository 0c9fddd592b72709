"""Commands on another host: ``hpcrun --host HOST COMMAND`` runs the hpcrun of that host over ssh.

The other host keeps all state. A submission first copies the code there, with rsync.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hpcrun import __version__
from hpcrun.api.places import runs_folder
from hpcrun.cli.ssh import (
    NOT_CONNECTED,
    Host,
    command_script,
    config_command,
    parse_config,
    prepare_script,
    rsync_command,
    shared_options,
    ssh_command,
)
from hpcrun.errors import UserError
from hpcrun.exit_codes import INTERRUPTED
from hpcrun.folders import HOSTS, settings_folder
from hpcrun.printing import say_aside
from hpcrun.run.record import SENT_COMMIT, git_commit, user_name
from hpcrun.run.snapshot import code_files, is_private

CLIENT = "HPCRUN_CLIENT"
"""The variable with the version of the hpcrun that calls another one over ssh."""
# They read code or configs.
_SENDING = ("submit", "resume", "estimate", "config")
# 128 + SIGINT, as shells have it.


def host_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the host of ``--host HOST COMMAND …`` and the words after it.

    Raises:
        UserError: the host or the command is missing.
    """
    first, *rest = arguments
    _, equals, name = first.partition("=")
    if not equals:
        name, rest = (rest or [""])[0], rest[1:]
    if not name or name.startswith("-"):
        raise UserError("--host: name a host before the command: hpcrun --host HOST status")
    if ":" in name:
        raise UserError(f"--host {name}: may not have a colon; write the port into ~/.ssh/config")
    if not rest:
        raise UserError(f"--host {name}: write a command after it, such as `status`")
    if rest[0].partition("=")[0] == "--host":
        raise UserError(
            f"--host {name}: is given twice; give one host, and write a jump host into ~/.ssh/config"
        )
    return name, rest


def run_there(name: str, words: Sequence[str], commands: Sequence[str]) -> int:
    """Run hpcrun with the arguments ``words`` on the host ``name``; return its exit code.

    Args:
        commands: the commands of hpcrun; other words, such as --help, need no folder there.

    Raises:
        UserError: a program is missing here, the config of the host is wrong, or the code cannot be sent.
    """
    host = _host(name)
    options = shared_options(_ssh_config(host), _socket_folder())
    here = Path.cwd()
    variables = {CLIENT: __version__}
    if words[0] not in commands:
        script = command_script(host, ".", words, variables)
    elif words[0] not in _SENDING:
        top = _top(here)
        script = command_script(host, _place(host, top, here), words, variables)
    else:
        source, places, why_not = code_files(here, runs_folder() / "run")
        if source is None and why_not:
            raise UserError(f"the code cannot be sent to {name}: {why_not}")
        if source is None:
            say_aside(f"hpcrun: {here} is in no git work tree; no file of it is sent to {name}")
        else:
            _send(host, options, source, places)
            if (commit := git_commit(here)) is not None:
                variables[SENT_COMMIT] = f"{commit['commit']}{'+' * commit['dirty']}"
        top = source or here
        target = None if source is None else _place(host, top, top)
        folder = _place(host, top, here)
        script = command_script(host, folder, words, variables, sent_to=target, make=True)
    return _call(host, options, script)


def _host(name: str) -> Host:
    """Return the host ``name`` with its keys in hosts.yaml; raises ConfigError or UserError."""
    path = settings_folder() / HOSTS
    if not path.exists():
        return Host(name)
    from hpcrun.config import file_layer

    layer = file_layer(path)
    found = layer.values.get(name) or {}
    if not isinstance(found, dict) or found.keys() - {"folder", "setup"}:
        raise UserError(f"{layer.where[name]}: {name}: takes the keys folder and setup")
    setup = found.get("setup") or []
    lines = setup if isinstance(setup, list) else [setup]
    folder = str(found.get("folder") or "hpcrun").removeprefix("~/").rstrip("/") or "/"
    if folder.startswith("~") or "$" in folder:
        raise UserError(
            f"{layer.where[name]}: {name}: folder: should be a path, in the home folder if it is relative, "
            f"not {folder}"
        )
    if any("\n" in str(text) for text in (folder, *lines)):
        raise UserError(f"{layer.where[name]}: {name}: write each shell line as an item of a list")
    return Host(name, folder, [str(line) for line in lines])


def _ssh_config(host: Host) -> dict[str, str]:
    _require_program("ssh")
    done = subprocess.run(config_command(host), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"--host {host.name}: {' '.join(done.stderr.split())}")
    return parse_config(done.stdout)


def _require_program(program: str) -> None:
    if shutil.which(program) is None:
        raise UserError(f"--host: {program} is not installed on this machine; install {program}")


def _socket_folder() -> Path:
    """Return a folder that only this user may enter."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # The folder is gone after `su`, and ssh without a socket ends.
    with contextlib.suppress(OSError):
        status = os.stat(runtime)  # noqa: PTH116  (no folder if the variable is empty)
        # ssh talks to any program that has made the socket.
        if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
            return Path(runtime)
    folder = Path.home() / ".ssh"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _top(here: Path) -> Path:
    """Return the top of the work tree around ``here``, or ``here``."""
    return next((one for one in (here, *here.parents) if (one / ".git").exists()), here)


def _place(host: Host, top: Path, here: Path) -> str:
    """Return the folder there that is the copy of ``here``, in the copy of ``top``."""
    return str(Path(host.folder, top.name or "root", here.relative_to(top)))


def _send(host: Host, options: Sequence[str], source: Path, places: set[Path]) -> None:
    """Make the copy of ``source`` there equal to its files ``places``.

    Raises:
        UserError: the copy failed; the host refused it, or the connection was cut.
    """
    _require_program("rsync")
    kept = {place for place in places if is_private(place) or _leads_away(source / place)}
    if kept:
        shown = ", ".join(sorted(map(str, kept)))
        say_aside(f"hpcrun: not sent (passwords, keys, links to other folders): {shown}")
    names = sorted(map(os.fsencode, places - kept))
    listed = b"".join(name + b"\0" for name in names)
    target = _place(host, source, source)
    script = prepare_script(host, target, f"{user_name()}:{source}")
    prepare = ssh_command(host, options, script, terminal=False)
    for command in (prepare, rsync_command(host, options, target)):
        done = subprocess.run(
            command,
            input=listed,
            cwd=source,
            stdout=sys.stderr,
            stderr=subprocess.PIPE,
            check=False,
        )
        if done.returncode != 0:
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            first = (lines or [f"{command[0]} ended with exit code {done.returncode}"])[0]
            if first.startswith("hpcrun: "):
                raise UserError(first.removeprefix("hpcrun: "))
            raise UserError(f"{host.name}: the code was not sent, nothing was submitted: {first}")


def _leads_away(path: Path) -> bool:
    """Return True for a link to a folder that rsync would not keep as a link."""
    return (
        path.is_symlink()
        and path.is_dir()
        and (path.readlink().is_absolute() or ".." in str(path.readlink()))
    )


def _call(host: Host, options: Sequence[str], script: str) -> int:
    """Run ``script`` there with this terminal, if there is one, and return its exit code."""
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    # Without a terminal there, the other hpcrun learns from the end of its input that this one has ended.
    own = None if terminal else subprocess.PIPE
    with subprocess.Popen(
        ssh_command(host, options, script, terminal=terminal), stdin=own
    ) as child:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            if child.stdin is not None:
                child.stdin.close()
            child.wait()
            return INTERRUPTED
    if code == NOT_CONNECTED:
        say_aside(
            f"hpcrun: no connection to {host.name}, or it was cut; the runs there continue, and the same "
            "submission again starts no second job"
        )
    return code if code >= 0 else 128 - code


def serve(client: str) -> None:
    """Prepare this process, which the hpcrun ``client`` (a version) on another host has started over ssh."""
    if client != __version__:
        say_aside(
            f"hpcrun: {socket.gethostname()} has hpcrun {__version__}, and your machine {client}; the "
            "options are those of the former"
        )
    if sys.stdin.isatty():
        return
    # No program that this one starts may read from the connection.
    connection = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    threading.Thread(target=_end_with, args=[connection], daemon=True).start()


def _end_with(connection: int) -> None:
    """Wait for the end of the connection; then end this process as the end of its terminal would."""
    while os.read(connection, 1024):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
