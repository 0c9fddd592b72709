"""The tests' handle on a real Slurm: run a command, wait for a state, inject a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"
if str(TOOLS) not in sys.path:
    sys.path.insert(0, str(TOOLS))

from devclusterlib import cluster as devcluster  # noqa: E402  (found through the path above)
from devclusterlib import faults, hosts, installations, requirements, startup, users  # noqa: E402
from devclusterlib.errors import Refusal  # noqa: E402
from devclusterlib.spec import ClusterSpec  # noqa: E402
from devclusterlib.spec import Partition as Partition  # noqa: E402  (tests name some)

from tests.support.start_server import prepared  # noqa: E402

VERSION = os.environ.get("HPCRUN_TEST_SLURM", "")
"""Version of Slurm on which the tests run, as `24.11`; the system's own where it is empty."""
POLL_S = 0.1
# Seconds for each wait: a start on a busy machine takes minutes.
PATIENCE = 300.0
# Final states. A requeued job passes through some of them too,
# so waiting for one of them is safe only if no requeue follows.
FINAL_STATES = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
        *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    }
)
# Settled states; after PREEMPTED and NODE_FAIL a requeue may still follow.
AFTER_A_RESTART = frozenset({"RUNNING", "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"})


def why_not(spec: ClusterSpec | None = None) -> str | None:
    """Return the reason why this machine cannot run a cluster, or None if it can.

    A ``spec`` without a version of Slurm means the version of the tests.
    """
    wanted = spec or ClusterSpec()
    try:
        requirements.require(replace(wanted, slurm=wanted.slurm or VERSION))
    except Refusal as refusal:
        return str(refusal)
    return None


def excused(version: str, features: Collection[str] = ()) -> bool:
    """Return True if ``missing`` is listed as unavailable and is not installed.

    HPCRUN_SLURM_UNAVAILABLE lists versions of Slurm and features (`accounting`, `gluster`) that
    could not be downloaded.
    """
    listed = os.environ.get("HPCRUN_SLURM_UNAVAILABLE", "").split()
    lacking = not set(features).isdisjoint(listed)
    return lacking or (version in listed and not installations.installed(version))


class SlurmCluster:
    """A running dev cluster.

    Attributes
    ----------
    name : str
        The cluster's name.
    user : str
        The ordinary user of the jobs.
    shared : Path
        Directory that all hosts see and ``user`` owns; read it through ``seen`` on a cluster with
        a shared file system other than ``local``.
    nodes : list of str
        Compute nodes in Slurm's order.
    python : str
        Interpreter for jobs: the interpreter of the tests.
    path : str
        PATH of a fresh login, with this cluster's version of Slurm first.
    """

    def __init__(self, handle: devcluster.Cluster) -> None:
        self.handle = handle
        self.name = handle.spec.name
        self.user = handle.spec.user
        self.shared = handle.layout.shared
        self.nodes = handle.spec.node_names
        self.python = sys.executable
        self.path = installations.search_path(handle.spec.slurm)

    def run(
        self,
        cmd: Sequence[str],
        *,
        host: str = "login",
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
        check: bool = True,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``cmd`` on ``host`` and return its result.

        The environment is a fresh login's of ``user`` (default: the job user) plus ``env``; the
        directory defaults to ``shared``. With ``check``, a failure raises with both outputs.
        """
        done = subprocess.run(
            self._argv(cmd, host, user, cwd, env),
            input=stdin or "",
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode != 0:
            raise AssertionError(
                f"{' '.join(cmd)} on {host} ended with {done.returncode}\n"
                f"stdout: {done.stdout}\nstderr: {done.stderr}"
            )
        return done

    def popen(
        self,
        cmd: Sequence[str],
        *,
        host: str = "login",
        user: str | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``cmd`` on ``host`` with pipes; it ends with the cluster at the latest."""
        return subprocess.Popen(
            self._argv(cmd, host, user, cwd, env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _argv(
        self,
        cmd: Sequence[str],
        host: str,
        user: str | None,
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
    ) -> list[str]:
        where = None if cwd is None else os.fspath(cwd)
        return self.handle.argv(host, list(cmd), user=user, cwd=where, env=prepared(env or {}))

    def admin(self, *cmd: str) -> str:
        """Return the output of a Slurm command that root runs on the controller's host."""
        return self.handle.admin(cmd)

    def sbatch(self, *arguments: str, script: str | None = None, **options: object) -> str:
        """Submit a job as the job user and return its id.

        ``script`` is the text of a batch script; without it, ``arguments`` name a script or contain
        ``--wrap``. ``options`` are those of `run`.
        """
        cmd = ["sbatch", "--parsable", *arguments]
        done = self.run(cmd, stdin=script, **options)  # type: ignore[arg-type]
        return done.stdout.strip().partition(";")[0]

    def squeue(self, *arguments: str) -> list[dict[str, str]]:
        """Return the jobs of squeue: id, state, reason, partition, name, nodes, restart count."""
        fields = "JobID,State,Reason,Partition,Name,NodeList,RestartCnt"
        form = ",".join(f"{field}:|" for field in fields.split(","))
        text = self.admin("squeue", "--noheader", "--states=all", f"--Format={form}", *arguments)
        names = [field.lower() for field in fields.split(",")]
        return [
            dict(zip(names, (part.strip() for part in line.split("|")), strict=False))
            for line in text.splitlines()
        ]

    def scontrol_show_job(self, job_id: str) -> dict[str, str]:
        """Return every ``Key=Value`` of ``scontrol show job``, of the first record if there are several."""
        line = self.admin("scontrol", "--oneliner", "show", "job", job_id).splitlines()[0]
        return dict(word.partition("=")[::2] for word in line.split() if "=" in word)

    def state(self, job_id: str) -> str:
        """Return the job's state in Slurm's long form, such as ``RUNNING``."""
        return self.scontrol_show_job(job_id)["JobState"]

    def restarts(self, job_id: str) -> int:
        """Return the number of requeues of the job, for any cause."""
        return int(self.scontrol_show_job(job_id)["Restarts"])

    def wait_state(
        self, job_id: str, states: str | Collection[str] = FINAL_STATES, timeout: float = PATIENCE
    ) -> str:
        """Wait until the job is in one of ``states`` and return the state."""
        wanted = {states} if isinstance(states, str) else set(states)
        self.wait_until(
            lambda: self.state(job_id) in wanted,
            timeout,
            lambda: f"job {job_id} is {self.state(job_id)}, not {' or '.join(sorted(wanted))}",
        )
        return self.state(job_id)

    def wait_restarts(self, job_id: str, count: int, timeout: float = PATIENCE) -> None:
        """Wait until the job was requeued ``count`` times and runs again, or has finally ended.

        Slurm counts a restart while the old attempt is still COMPLETING, before PENDING.
        """

        def again() -> bool:
            job = self.scontrol_show_job(job_id)
            return int(job["Restarts"]) >= count and job["JobState"] in AFTER_A_RESTART

        self.wait_until(
            again,
            timeout,
            lambda: f"job {job_id} is {self.state(job_id)} after {self.restarts(job_id)} restarts",
        )

    @property
    def seen(self) -> Path:
        """Return ``shared`` as the test process reaches it, also if it is a mount of the hosts."""
        return self.handle.layout.seen_from(hosts.holder_of(self.handle.layout, "login"))

    @staticmethod
    def wait_until(
        condition: Callable[[], bool],
        timeout: float = PATIENCE,
        explain: Callable[[], str] = lambda: "the expected state did not come",
    ) -> None:
        """Return as soon as ``condition`` is true; fail with ``explain`` after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{explain()} after {timeout:.0f} s")
            time.sleep(POLL_S)

    def sacct(self, job_id: str) -> list[dict[str, str]]:
        """Return every record of the job, one per attempt; needs a cluster with accounting."""
        fields = ("JobID", "State", "ExitCode", "NodeList", "Start", "End")
        command = ["sacct", "-X", "-D", "-n", "-P", f"--format={','.join(fields)}", "-j", job_id]
        lines = self.admin(*command).splitlines()
        return [dict(zip(fields, line.split("|"), strict=True)) for line in lines]

    def cancel_all(self) -> None:
        """Cancel every job of the job user and wait until their processes have ended."""
        self.admin("scancel", f"--user={self.user}")
        self.wait_until(lambda: not self.admin("squeue", "--noheader").strip())

    def node_state(self, node: str) -> str:
        """Return the node's state in sinfo's words, ``idle`` or ``down*``."""
        return devcluster.node_states(self.handle)[node]

    def processes(self, host: str) -> list[int]:
        """Return the pids of all processes on ``host``, including daemons."""
        return faults.pids_on(self.handle, host)

    def kill_node(self, node: str) -> None:
        """Simulate power loss of a node: all its processes die together."""
        faults.lose_power(self.handle, node)

    def orphan_node(self, node: str) -> None:
        """Kill only slurmd and its step daemons; the job's processes survive as orphans."""
        faults.leave_orphans(self.handle, node)

    def revive_node(self, node: str) -> None:
        """Start the node's slurmd again and wait until Slurm has it back."""
        faults.revive(self.handle, node)

    def set_node_down(self, node: str) -> None:
        """Set the node down as an administrator; `resume_node` undoes it, `revive_node` does not."""
        self.admin("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def resume_node(self, node: str) -> None:
        """Resume the node as an administrator."""
        self.admin("scontrol", "update", f"nodename={node}", "state=resume")

    def cut_link(self, host: str) -> None:
        """Cut the host's link."""
        faults.cut_link(self.handle, host)

    def slow_link(self, host: str, rate: str = "50mbit") -> None:
        """Limit the host's bandwidth in both directions."""
        faults.slow_link(self.handle, host, rate)

    def lossy_link(self, host: str, percent: int = 20) -> None:
        """Drop a percentage of the host's packets in both directions."""
        faults.lossy_link(self.handle, host, percent)

    def restore_link(self, host: str) -> None:
        """Undo all link faults of the host."""
        faults.restore_link(self.handle, host)

    def stop_daemon(self, daemon: str) -> None:
        """Stop ``slurmctld``, ``slurmdbd``, ``mariadbd`` or ``munged`` as a service manager would."""
        faults.stop_daemon(self.handle, daemon)

    def start_daemon(self, daemon: str) -> None:
        """Start a daemon again and wait until it answers."""
        faults.start_daemon(self.handle, daemon)

    def heal(self) -> None:
        """Undo every fault, so that the next test has a healthy cluster."""
        for host in self.handle.spec.host_names:
            faults.restore_link(self.handle, host)
        startup.start_missing(self.handle)
        self.cancel_all()
        for node, state in devcluster.node_states(self.handle).items():
            if state.startswith(("down", "drain")):
                self.resume_node(node)
        self.wait_until(
            lambda: set(devcluster.node_states(self.handle).values()) == {"idle"},
            PATIENCE,
            lambda: json.dumps(devcluster.node_states(self.handle)),
        )


def start(name: str, **options: object) -> SlurmCluster:
    """Start a cluster that belongs to this process.

    ``options`` are fields of `ClusterSpec`; without ``slurm``, the cluster has the version of
    the tests. The tool runs as a separate program, so the daemons are
    not children of the test process.
    """
    from devclusterlib.options import arguments_of

    spec = ClusterSpec(name=name, **{"slurm": VERSION, **options})  # type: ignore[arg-type]
    command = [str(TOOLS / "devcluster"), "up", f"--owner-pid={os.getpid()}", *arguments_of(spec)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return SlurmCluster(devcluster.load(name))


def stop(name: str) -> None:
    """Take the cluster down."""
    subprocess.run(
        [str(TOOLS / "devcluster"), "down", f"--name={name}"], timeout=PATIENCE, check=True
    )


def remove_abandoned() -> None:
    """Remove the clusters of test runs that were killed."""
    command = [str(TOOLS / "devcluster"), "down", "--abandoned"]
    subprocess.run(command, timeout=PATIENCE, check=True, stdout=subprocess.DEVNULL)


def can_read(user: str, interpreter: str) -> bool:
    """Return True if ``user`` can start the interpreter and read this checkout."""
    account = users.find(user)
    if account is None:
        return False
    command = ["setpriv", f"--reuid={account.uid}", f"--regid={account.gid}", "--init-groups", "--"]
    reads = [*command, interpreter, "-c", "import sys; open(sys.argv[1])", __file__]
    return subprocess.run(reads, capture_output=True, check=False).returncode == 0
