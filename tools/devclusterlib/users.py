"""The ordinary user whose jobs run: made when missing, removed when ours and no longer needed."""

from __future__ import annotations

import pwd
from dataclasses import dataclass

from .commands import run
from .errors import Refusal

# Stands in the account's comment field, so that also a later `down` knows whose it is.
OURS = "made by devcluster"


@dataclass(frozen=True)
class Account:
    """What is needed to start a process as a user."""

    name: str
    uid: int
    gid: int
    home: str
    comment: str

    def environment(self, path: str, slurm_conf: str) -> dict[str, str]:
        """What a fresh login would set, and where Slurm's configuration is."""
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
    """The account ``name``, or None."""
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(name, entry.pw_uid, entry.pw_gid, entry.pw_dir, entry.pw_gecos)


def require(name: str) -> Account:
    """The account ``name``, or a refusal."""
    account = find(name)
    if account is None:
        raise Refusal(f"there is no user {name}", "give an existing one with --user")
    return account


def useradd_argv(name: str) -> list[str]:
    """Make an ordinary user with a home of its own."""
    return ["useradd", "--create-home", "--shell", "/bin/bash", "--comment", OURS, name]


def userdel_argv(name: str) -> list[str]:
    """Remove the user with its home."""
    return ["userdel", "--remove", name]


def ensure(name: str) -> Account:
    """The account ``name``, made now if it is missing."""
    if find(name) is None:
        run(useradd_argv(name))
    return require(name)


def remove_if_ours(name: str, others: list[str]) -> None:
    """Remove the user, unless it was there before us or stands among the ``others`` needed."""
    account = find(name)
    if account is None or account.comment != OURS:
        return
    if name not in others:
        run(userdel_argv(name))
