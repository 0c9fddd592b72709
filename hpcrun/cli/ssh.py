"""The command lines of ssh and rsync, and the shell lines that run on the other host.

ssh is the system's, with its config. Unless that config shares connections already (ControlPath), all calls
of ten minutes share one connection, so that a password or a second factor is asked for once.

Sources: ssh(1), ssh_config(5), rsync(1).
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# ssh(1): the exit code of ssh itself, if the connection failed.
NOT_CONNECTED = 255
# unix(7): sun_path has 108 bytes. ssh appends 17 characters while it makes the socket; %C has 40.
_LONGEST_SOCKET = 107 - 17 - 40
_LIST = ".git/hpcrun-files"
_OWNER = ".git/hpcrun-source"


@dataclass(frozen=True)
class Host:
    """Another host with hpcrun.

    Attributes:
        name: the host as ssh and rsync take it: a name of ssh_config, or ``user@name``.
        folder: the folder of the copies of work trees, in the home folder if it is relative.
        setup: shell lines that make the command ``hpcrun`` available.
    """

    name: str
    folder: str = "hpcrun"
    setup: Sequence[str] = ()


def config_command(host: Host) -> list[str]:
    """Return the command that prints ssh's config for ``host``, and connects to no host."""
    return ["ssh", "-G", "--", host.name]


def parse_config(text: str) -> dict[str, str]:
    """Read the output of `config_command`: each option in lower case, and its value."""
    return dict(line.partition(" ")[::2] for line in text.splitlines())


def shared_options(config: Mapping[str, str], folder: Path) -> list[str]:
    """Return the options that the user's ``config`` leaves open.

    Args:
        folder: the place of the socket of a shared connection; only its owner may enter it.
    """
    # Messages of ssh about itself, such as the end of the connection, are no output of the command.
    options = ["-o", "LogLevel=ERROR"]
    if config.get("serveraliveinterval", "0") == "0":
        # A broken network ends the command after a minute.
        options += ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"]
    socket = folder / "hpcrun-%C"
    fits = len(os.fsencode(socket)) - len("%C") <= _LONGEST_SOCKET
    if config.get("controlpath", "none") == "none" and fits:
        options += ["-o", "ControlMaster=auto", "-o", f"ControlPath={socket}"]
        options += ["-o", "ControlPersist=10m"]
    return options


def ssh_command(host: Host, options: Sequence[str], script: str, *, terminal: bool) -> list[str]:
    """Return the command that runs the bash lines of ``script`` in a login shell of ``host``."""
    login = shlex.join(["exec", "bash", "-lc", script])
    if not terminal:
        # A profile that reads its input would take that of the script, or wait forever.
        login = shlex.join(["exec", "bash", "-lc", f"exec <&3 3<&-; {script}"])
        login = shlex.join(["exec", "bash", "--norc", "-c", f"{login} 3<&0 </dev/null"])
    # The user's shell there may be any other: it only has to start bash.
    return ["ssh", *options, "-t" if terminal else "-T", "--", host.name, login]


def rsync_command(host: Host, options: Sequence[str], target: str) -> list[str]:
    """Return the command that copies the files of its input, separated by NUL, from here to ``target``."""
    return [
        *(
            "rsync",
            "--links",
            "--copy-unsafe-links",
            "--perms",
            "--times",
            "--checksum",
            "--compress",
        ),
        # Names with spaces stay one word in the shell of the other host.
        *("--protect-args", "--from0", "--files-from=-", "-e", shlex.join(["ssh", *options])),
        *("./", f"{host.name}:{target}/"),
    ]


def prepare_script(host: Host, target: str, source: str) -> str:
    """Return the shell lines before a copy of ``source`` to ``target``; their input is the list of files.

    The folder becomes a git work tree, and its index has exactly the sent files, so that hpcrun there lists
    and copies them as it does here. Files of the last copy that are gone here are removed there.
    ``source``: user and folder.
    """
    place, owner = shlex.quote(target), shlex.quote(source)
    replace = (
        f"to replace its files, make {target}/.git an empty folder there; or set another folder for "
        f"{host.name} in hosts.yaml"
    )
    taken = f"{host.name}:{target} is the copy of another folder, not of {source}; {replace}"
    made_there = f"{host.name}:{target} has files that hpcrun did not send; {replace}"
    return " && ".join(
        [
            f"cd && mkdir -p -- {place} && cd -- {place}",
            _require(
                "git", f"{host.name} has no git, which lists the sent code; install git there"
            ),
            f'if [ -e .git/HEAD ] && [ "$(cat {_OWNER} 2>/dev/null)" != {owner} ]; then {_refuse(taken)}; fi',
            "{ [ -e .git ] && known=1 || known=; } && mkdir -p .git",
            f"cat > {_LIST}",
            # A folder with data only is usual before the first copy.
            "{ [ $known ] || while IFS= read -r -d '' file; do "
            f'[ ! -e "$file" ] || {{ rm {_LIST}; rmdir .git; {_refuse(made_there)}; }}; done < {_LIST}; }}',
            # The owner comes first: a cut connection must leave no repository without it.
            f"printf %s {owner} > {_OWNER}",
            "git init -q .",
            # Only the index counts.
            "mkdir -p .git/info && echo '*' > .git/info/exclude",
            "export LC_ALL=C",
            f"git ls-files -z | sort -z | comm -z -23 - {_LIST} | xargs -0r rm -f --",
        ]
    )


def command_script(
    host: Host,
    folder: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    *,
    sent_to: str | None = None,
    make: bool = False,
) -> str:
    """Return the shell lines that run hpcrun with the arguments ``words`` in ``folder``.

    Args:
        variables: its environment, in addition.
        sent_to: the copy that :func:`prepare_script` began; git learns its files.
        make: make the folder if it is missing, instead of a refusal.
    """
    place = shlex.quote(folder)
    missing = f"{host.name} has no folder {folder}; `hpcrun --host {host.name} submit` makes it"
    lines = ["cd"]
    if sent_to is not None:
        index = f"git -C {shlex.quote(sent_to)}"
        listed = f"{shlex.quote(sent_to)}/{_LIST}"
        unlisted = (
            f"{host.name}: git did not list the sent code, nothing was submitted; after a crash, remove "
            f"{sent_to}/.git/index.lock there"
        )
        lines.append(
            f"{{ {{ {index} read-tree --empty && "
            f"{index} update-index -z --add --info-only --stdin < {listed}; }} || {_refuse(unlisted)}; }}"
        )
    if make:
        lines.append(f"mkdir -p -- {place}")
    lines.append(f"{{ cd -- {place} 2>/dev/null || {_refuse(missing)}; }}")
    for line in host.setup:
        # eval: the line may end with a comment or a semicolon.
        failed = _refuse(f"{host.name}: setup of hosts.yaml failed: {line}")
        lines.append(f"{{ eval {shlex.quote(line)} || {failed}; }}")
    lines.append(
        _require(
            "hpcrun",
            f"{host.name} has no command hpcrun; install it there, or write the shell lines that provide it "
            "(setup in hosts.yaml)",
        )
    )
    assigned = [f"{name}={value}" for name, value in variables.items()]
    lines.append(shlex.join(["exec", "env", *assigned, "hpcrun", *words]))
    return " && ".join(lines)


def _require(program: str, text: str) -> str:
    return f"{{ command -v {program} >/dev/null || {_refuse(text)}; }}"


def _refuse(text: str) -> str:
    return f"{{ printf '%s\\n' {shlex.quote(f'hpcrun: {text}')} >&2; exit 2; }}"
