"""A real sshd on a login host, and a laptop next to it, each with a separate home.

Both are processes with their own mount namespace, in which /etc/passwd names another home: ssh and sshd take
the home from there.
"""

import contextlib
import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.support.jobs import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parents[2]
HOST = "login.site"
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("ssh", "ssh-keygen", "sshd", "rsync", "git", "unshare", "nsenter", "setpriv", "ip")
# The whole folder: a mount on a file in it ends when another program replaces the file (useradd does).
_HOLDER = """set -e
cp -a /etc "$1"
cp "$2" "$1/passwd"
cp "$3" "$1/shadow"
mount --bind "$1" /etc
ip link set lo up
echo ready
exec sleep infinity >/dev/null
"""


def why_not() -> str | None:
    """Return the reason why this machine cannot run the sshd; None if it can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_SYSTEM) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


class Site:
    """A laptop and a login host with the user ``user``.

    Attributes:
        here: the home on the laptop.
        there: the home on the login host. Its login shell has the command hpcrun.
    """

    def __init__(
        self,
        user: str,
        login: Sequence[str] = ("unshare", "--net"),
        laptop: Sequence[str] | None = None,
        address: str = "127.0.0.1",
        variables: Mapping[str, str] | None = None,
        package: Path = ROOT,
    ) -> None:
        """Start the hosts and the sshd.

        Args:
            login: the command that enters the network of the login host.
            laptop: that of the laptop; None: the network of the login host.
            address: the address of the login host.
            variables: the variables of a login shell there.
            package: the folder with hpcrun on both hosts.
        """
        # A short path: that of a socket has at most 108 bytes.
        self.base = Path(tempfile.mkdtemp(prefix="hpcrun-ssh-"))
        self.base.chmod(0o755)
        self.user, self._package = pwd.getpwnam(user), package
        self.here, self.there = (self._made(name) for name in ("here", "there"))
        self._processes: list[subprocess.Popen[str]] = []
        self._login = self._host(self.there, login)
        same = ("nsenter", "--net", "--target", str(self._login))
        self._laptop = self._host(self.here, laptop or same)
        self._configure(address, variables or {})
        self.start()

    def _made(self, name: str) -> Path:
        folder = self.base / name
        folder.mkdir(mode=0o700)
        os.chown(folder, self.user.pw_uid, self.user.pw_gid)
        return folder

    def _write(self, path: Path, text: str, mode: int = 0o600) -> None:
        path.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
        path.write_text(text)
        path.chmod(mode)
        for one in (path, path.parent):
            os.chown(one, self.user.pw_uid, self.user.pw_gid)

    def _host(self, home: Path, inside: Sequence[str]) -> int:
        """Start the process that keeps the namespaces of a host; return its number."""
        passwd, shadow = (self.base / f"{home.name}.{name}" for name in ("passwd", "shadow"))
        lines = [one.split(":") for one in Path("/etc/passwd").read_text().splitlines()]
        for line in lines:
            if line[0] == self.user.pw_name:
                line[5:] = [str(home), "/bin/bash"]
        passwd.write_text("".join(":".join(line) + "\n" for line in lines))
        # A password that begins with ! locks the account.
        shadow.write_text("".join(f"{line[0]}:*:19000:0:99999:7:::\n" for line in lines))
        shadow.chmod(0o600)
        holder = subprocess.Popen(
            [
                *(*inside, "unshare", "--mount", "--propagation", "private", "--"),
                *("sh", "-c", _HOLDER, "holder", self.base / f"{home.name}.etc", passwd, shadow),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        return holder.pid

    def _configure(self, address: str, variables: Mapping[str, str]) -> None:
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f"]
        for key in (self.base / "host", self.here / ".ssh" / "id_ed25519"):
            key.parent.mkdir(mode=0o700, exist_ok=True)
            subprocess.run([*keygen, key], check=True)
        self._write(
            self.here / ".ssh" / "config",
            f"Host {HOST}\n  HostName {address}\n  Port 2222\n  User {self.user.pw_name}\n"
            f"  IdentityFile {self.here}/.ssh/id_ed25519\n  StrictHostKeyChecking no\n"
            f"  UserKnownHostsFile {self.here}/.ssh/known_hosts\n",
        )
        for path in (self.here / ".ssh").iterdir():
            os.chown(path, self.user.pw_uid, self.user.pw_gid)
        public = (self.here / ".ssh" / "id_ed25519.pub").read_text()
        self._write(self.there / ".ssh" / "authorized_keys", public)
        exports = {"PYTHONPATH": str(self._package), "OMP_NUM_THREADS": "1", **variables}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in exports.items()]
        self._write(self.there / ".bash_profile", "".join(lines) + 'PATH="$HOME/bin:$PATH"\n')
        program = f'#!/bin/sh\nexec {sys.executable} -m hpcrun "$@"\n'
        self._write(self.there / "bin" / "hpcrun", program, 0o755)
        (self.base / "sshd_config").write_text(
            f"Port 2222\nHostKey {self.base}/host\nPidFile none\nUsePAM no\nStrictModes no\n"
            f"PasswordAuthentication no\nAuthorizedKeysFile {self.there}/.ssh/authorized_keys\n"
        )

    def start(self) -> None:
        """Start the sshd and wait until it answers."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        enter = ["nsenter", "--net", "--mount", "--target", str(self._login), "--"]
        self._sshd = subprocess.Popen(
            [*enter, "/usr/sbin/sshd", "-D", "-e", "-f", self.base / "sshd_config"],
            stderr=(self.base / "sshd.log").open("a"),
            text=True,
        )
        wait_for(lambda: self.run("ssh", HOST, "true").returncode == 0, why="an answer of the sshd")

    def stop(self) -> None:
        """Stop the sshd and its connections: each program there loses its terminal or its input."""
        for process in psutil.Process(self._sshd.pid).children(recursive=True):
            # A program there may end in between.
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "sshd":
                    process.kill()
        self._sshd.kill()
        self._sshd.wait()

    def command(self, *words: str, cwd: Path | None = None) -> list[str]:
        """Return the command line that runs ``words`` on the laptop, in its home."""
        become = ["setpriv", f"--reuid={self.user.pw_uid}", f"--regid={self.user.pw_gid}"]
        variables = {
            **{"HOME": self.here, "XDG_RUNTIME_DIR": self.here, "PYTHONPATH": self._package},
            **{"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "TERM": "xterm-256color"},
        }
        given = [f"{name}={value}" for name, value in variables.items()]
        return [
            *("nsenter", "--net", "--mount", "--target", str(self._laptop), "--"),
            *(*become, "--init-groups", "--", "env", "-i", f"--chdir={cwd or self.here}", *given),
            *words,
        ]

    def run(
        self, *words: str, cwd: Path | None = None, timeout: float = PATIENCE
    ) -> "subprocess.CompletedProcess[str]":
        """Run a program on the laptop."""
        return subprocess.run(
            self.command(*words, cwd=cwd),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip

    def words(self, *words: str) -> list[str]:
        """Return the words of a call of hpcrun for the login host."""
        return [sys.executable, "-m", "hpcrun", "--host", HOST, *words]

    def hpcrun(
        self, *words: str, cwd: Path | None = None, code: int = 0
    ) -> "subprocess.CompletedProcess[str]":
        """Run hpcrun on the laptop for the login host; it must end with ``code``."""
        done = self.run(*self.words(*words), cwd=cwd)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done

    def close(self) -> None:
        """End all processes and remove the homes."""
        self.stop()
        for holder in self._processes:
            holder.kill()
            holder.wait()
        shutil.rmtree(self.base, ignore_errors=True)
