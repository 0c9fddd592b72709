"""Accounting for sacct: MariaDB and slurmdbd on the controller's host, with the cluster registered first.

slurmctld would register an unknown cluster itself, but could lose its first jobs on the
way. So the cluster and the job user's account are entered before slurmctld starts.
"""

from __future__ import annotations

from .layout import Layout
from .slurmconf import DATABASE_PASSWORD
from .spec import ClusterSpec

ACCOUNT = "default"


def database_sql() -> str:
    """Return the SQL that mariadbd runs at each start: it creates the user that slurmdbd connects as."""
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
    """Return the `sacctmgr` command that lists the clusters of slurmdbd, one name per line."""
    return ["sacctmgr", "--noheader", "--parsable2", "list", "cluster", "format=cluster"]


def entry_commands(spec: ClusterSpec) -> list[list[str]]:
    """Return the `sacctmgr` commands that add the cluster, one account, and the job user in it."""
    immediate = ["sacctmgr", "--immediate", "add"]
    return [
        [*immediate, "cluster", spec.name],
        [*immediate, "account", ACCOUNT, f"Cluster={spec.name}"],
        [*immediate, "user", spec.user, f"Account={ACCOUNT}", f"Cluster={spec.name}"],
    ]
