"""The ordinary user of the jobs: created if missing, removed by the last `down` if the tool created it."""

from __future__ import annotations

import pwd
from dataclasses import dataclass

from .commands import run
from .errors import Refusal

# The account's comment field: a later `down` recognizes an account of this tool.
OURS = "made by devcluster"


@dataclass(frozen=True)
class Account:
    """The facts to start a process as a user."""

    name: str
    uid: int
    gid: int
    home: str
    comment: str

    def environment(self, path: str, slurm_conf: str) -> dict[str, str]:
        """Return the variables of a fresh login, and the place of Slurm's configuration."""
        return {
            "HOME": self.home,
            "USER": self.name,
            "LOGNAME": self.name,
            "SHELL": "/bin/bash",
            "PATH": path,
            "LANG": "C.UTF-8",
            "SLURM_CONF": slurm_conf,
        }


def find(name: str) -> Account | None:
    """Return the account ``name``, or None."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_gecos)


def require(name: str) -> Account:
    """Return the account ``name``; raises `Refusal` if there is none."""
    account = find(name)
    if account is None:
        raise Refusal(f"there is no user {name}", "give an existing one with --user")
    return account


def useradd_argv(name: str) -> list[str]:
    """Return the command that makes an ordinary user with a home directory."""
    return ["useradd", "--create-home", "--shell", "/bin/bash", "--comment", OURS, name]


def userdel_argv(name: str) -> list[str]:
    """Return the command that removes the user with the home directory."""
    return ["userdel", "--remove", name]


def ensure(name: str) -> Account:
    """Return the account ``name``, created if it is missing."""
    if find(name) is None:
        run(useradd_argv(name))
    return require(name)


def remove_if_ours(name: str, others: list[str]) -> None:
    """Remove the user, unless the user existed before, or is one of the ``others`` in use."""
    account = find(name)
    if account is None or account.comment != OURS:
        return
    if name not in others:
        run(userdel_argv(name))
