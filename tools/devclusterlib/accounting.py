"""sacct's back: MariaDB and slurmdbd on the controller's host, the cluster entered before use.

slurmctld of an unknown cluster would register itself, but its first jobs could be lost on the
way; so the cluster and the job user's account are there before slurmctld starts.
"""

from __future__ import annotations

from .layout import Layout
from .slurmconf import DATABASE_PASSWORD
from .spec import ClusterSpec

ACCOUNT = "default"


def database_sql() -> str:
    """What mariadbd runs at each start: the user that slurmdbd connects as."""
    who = "'slurm'@'127.0.0.1'"
    return (
        f"CREATE USER IF NOT EXISTS {who} IDENTIFIED BY '{DATABASE_PASSWORD}';\n"
        f"GRANT ALL ON *.* TO {who};\n"
    )


def install_db_argv(layout: Layout) -> list[str]:
    """Make an empty database directory."""
    return [
        "mariadb-install-db",
        "--no-defaults",
        "--user=root",
        f"--datadir={layout.root}/db",
        "--auth-root-authentication-method=socket",
        "--skip-test-db",
        "--skip-name-resolve",
    ]


def list_command() -> list[str]:
    """The clusters that slurmdbd knows, one name a line."""
    return ["sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=cluster"]


def entry_commands(spec: ClusterSpec) -> list[list[str]]:
    """The `sacctmgr` commands that make the cluster, one account, and the job user in it."""
    immediate = ["sacctmgr", "--immediate", "add"]
    return [
        [*immediate, "cluster", spec.name],
        [*immediate, "account", ACCOUNT, f"Cluster={spec.name}"],
        [*immediate, "user", spec.user, f"Account={ACCOUNT}", f"Cluster={spec.name}"],
    ]
