"""A cluster that is (or was) up: its spec, its layout, and queries to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import hosts, installations, registry, users
from .commands import run
from .errors import CommandFailed, Refusal
from .layout import Layout, default_root
from .spec import ClusterSpec


@dataclass(frozen=True)
class Cluster:
    """A cluster that is (or was) up: its layout on disk and its spec."""

    layout: Layout
    spec: ClusterSpec

    def argv(
        self,
        host: str,
        command: Sequence[str],
        *,
        user: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Return a command line that runs ``command`` on ``host`` as ``user`` (default: the job user).

        The environment is that of a fresh login plus ``env``; ``cwd`` defaults to the shared directory.
        """
        if host not in self.spec.host_names:
            raise Refusal(
                f"cluster {self.spec.name} has no host {host}",
                f"it has {', '.join(self.spec.host_names)}",
            )
        account = users.require(user or self.spec.user)
        path = installations.search_path(self.spec.slurm)
        environment = account.environment(path, str(self.layout.slurm_conf))
        inner = hosts.as_user_argv(
            command,
            uid=account.uid,
            gid=account.gid,
            cwd=cwd or str(self.layout.shared),
            env=environment | dict(env or {}),
        )
        return hosts.enter_argv(hosts.holder_of(self.layout, host), inner)

    def admin(self, command: Sequence[str]) -> str:
        """Return the output of a Slurm command that root runs on the controller's host."""
        return run(self.argv("ctl", command, user="root", cwd="/"))


def load(name: str, root: Path | None = None) -> Cluster:
    """Return the recorded cluster ``name``; raises `Refusal` if there is none."""
    layout = locate(name, root)
    spec = stored_spec(layout)
    if spec is None:
        raise Refusal(f"there is no cluster {name}", f"run `devcluster up --name {name}`")
    return Cluster(layout, spec)


def locate(name: str, root: Path | None) -> Layout:
    """Return the layout of ``name``: the registered one, else below ``root``, else at the default place."""
    entry = registry.find(name)
    if entry is not None:
        if root is not None and root.absolute() != entry.root:
            raise Refusal(
                f"cluster {name} lies in {entry.root}", "leave --root out, or take another --name"
            )
        return Layout(name, entry.root)
    return Layout(name, root.absolute() if root is not None else default_root(name))


def stored_spec(layout: Layout) -> ClusterSpec | None:
    """Return the spec in the cluster's directory; None if it is missing or was torn by a kill."""
    try:
        return ClusterSpec.from_json(layout.marker.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def node_states(cluster: Cluster) -> dict[str, str]:
    """Return the state of every node; empty while slurmctld does not answer."""
    try:
        return parse_node_states(cluster.admin(node_states_command()))
    except CommandFailed:
        return {}


def node_states_command() -> list[str]:
    """Return the command that prints a line per node: its name and full state, with Slurm's suffix signs."""
    return ["sinfo", "--noheader", "--Node", "--format=%N %T"]


def parse_node_states(text: str) -> dict[str, str]:
    """Return the state of every node; the output lists a node once per partition."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if line.strip())


def registered(state: str) -> bool:
    """Return True for a state with a slurmd that answers; ``*`` and ``#`` mark a slurmd that does not."""
    return state[-1] not in "*#~" and not state.startswith(("unknown", "future"))
