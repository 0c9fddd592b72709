"""The dev cluster on a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..on_slurm import cluster as slurm_cluster
from ..on_slurm.conftest import unavailable

TOOL = slurm_cluster.TOOLS / "devcluster"
REFUSED = 2

pytestmark = pytest.mark.slurm


def tool(*arguments: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run the tool with Debian's interpreter, as before any installation."""
    version = [f"--slurm={slurm_cluster.VERSION}"] if arguments[0] == "up" else []
    command = ["/usr/bin/python3", str(TOOL), *arguments, *version]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="module")
def lab() -> Iterator[slurm_cluster.SlurmCluster]:
    """Three nodes for this module only, because its tests break them."""
    if (reason := slurm_cluster.why_not()) is not None:
        unavailable(reason)
    name = f"lab-{os.getpid()}"
    try:
        yield slurm_cluster.start(name, nodes=3)
    finally:
        slurm_cluster.stop(name)


@pytest.fixture
def whole(lab: slurm_cluster.SlurmCluster) -> Iterator[slurm_cluster.SlurmCluster]:
    """The cluster; faults are removed after the test."""
    yield lab
    lab.heal()


@pytest.fixture
def spare_name() -> Iterator[str]:
    """Return the name of a cluster that the test makes; the cluster is always removed."""
    if (reason := slurm_cluster.why_not()) is not None:
        unavailable(reason)
    name = f"spare-{os.getpid()}"
    yield name
    tool("down", "--name", name)


def traces(name: str) -> list[str]:
    """Return everything that a cluster called ``name`` would leave on the machine."""
    needle = f"devcluster-{name}"
    found = [str(path) for path in Path("/run/netns").glob(f"devcluster.{name}.*")]
    found += [str(path) for path in Path("/run/devcluster").glob(f"{name}.json")]
    found += [str(path) for path in (Path("/tmp") / needle,) if path.exists()]
    found += [
        line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line
    ]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if needle in words and "pytest" not in words.split("\0")[0]:
            found.append(words.replace("\0", " "))
    return found


def test_up_twice_changes_nothing(lab):
    before = lab.processes("ctl")
    done = tool("up", "--name", lab.name, "--nodes=3")
    assert done.returncode == 0, done.stderr
    assert "was up already" in done.stdout
    assert lab.processes("ctl") == before


def test_up_with_other_options_is_refused_in_one_line(lab):
    done = tool("up", "--name", lab.name, "--nodes=2")
    assert done.returncode == REFUSED
    assert done.stderr.count("\n") == 1
    assert "nodes 3 -> 2" in done.stderr


def test_up_prints_the_next_commands(lab):
    done = tool("up", "--name", lab.name, "--nodes=3")
    _, commands = done.stdout.split("next:\n")
    assert len(commands.splitlines()) == 3
    first = commands.splitlines()[0].split()[1:]
    assert sorted(tool(*first).stdout.split()) == lab.nodes


def test_each_host_finds_itself_its_peers_and_localhost(lab):
    code = (
        "import socket, os\n"
        "own = socket.getaddrinfo(socket.gethostname(), 0)[0][4][0]\n"
        "peers = [socket.gethostbyname(f'node{i}') for i in (1, 2, 3)]\n"
        "print(socket.gethostname(), own, socket.gethostbyname('localhost'), *peers,\n"
        "      *sorted(os.listdir('/sys/class/net')))\n"
    )
    said = lab.run(["srun", "-N3", "python3", "-c", code]).stdout
    peers = [lab.handle.layout.address(node) for node in lab.nodes]
    expected = [
        " ".join([node, address, "127.0.0.1", *peers, "eth0", "lo"])
        for node, address in zip(lab.nodes, peers, strict=True)
    ]
    assert sorted(said.splitlines()) == expected


def test_hosts_reach_each_other_but_not_the_machine(lab):
    script = "import socket; socket.create_connection((%r, 6818), 2)"
    lab.run(["python3", "-c", script % "node3"], host="node1")
    routes = lab.run(["ip", "route"], host="node1").stdout
    assert "default" not in routes


def test_two_jobs_on_a_node_get_different_gpus(lab):
    script = "#!/bin/sh\nsrun sh -c 'echo $CUDA_VISIBLE_DEVICES > gpus-$SLURM_JOB_ID; sleep 3'\n"
    jobs = [lab.sbatch("-wnode1", "--gpus-per-node=2", script=script) for _ in range(2)]
    for job in jobs:
        assert lab.wait_state(job) == "COMPLETED"
    assert {(lab.shared / f"gpus-{job}").read_text() for job in jobs} == {"0,1\n", "2,3\n"}


@pytest.mark.parametrize("lossy", [False, True])
def test_a_cut_or_lossy_link_drops_packets_until_restored(whole, lossy):
    reach = [sys.executable, "-c", "import socket; socket.create_connection(('node2', 6818), 1)"]
    whole.run(reach, host="node1")
    if lossy:
        whole.lossy_link("node2", 20)
        whole.lossy_link("node2", 99)
    else:
        whole.cut_link("node2")
    assert "timed out" in whole.run(reach, host="node1", check=False).stderr
    whole.restore_link("node2")
    whole.run(reach, host="node1")


SERVER = (
    "import socket\n"
    "s = socket.create_server(('', 5000)); print('ready', flush=True)\n"
    "while True:\n"
    "    c, _ = s.accept()\n"
    "    while c.recv(65536): pass\n"
    "    c.close()\n"
)
CLIENT = (
    "import socket, time\n"
    "t = time.monotonic(); c = socket.create_connection(('node2', 5000))\n"
    "c.sendall(bytes(2_000_000)); c.shutdown(1); c.recv(1)\n"
    "print(2e6 * 8 / (time.monotonic() - t) / 1e6)\n"
)


def test_a_slow_link_has_about_the_requested_rate(whole):
    server = whole.popen(["python3", "-c", SERVER], host="node2")
    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n"
    rates: list[float] = []

    def reaches(rate: float) -> bool:
        """Return True if the link reached ``rate`` in this try; a busy machine may send less."""
        rates.append(float(whole.run(["python3", "-c", CLIENT], host="node1").stdout))
        return rates[-1] > rate

    whole.wait_until(lambda: reaches(200), explain=lambda: str(rates))
    whole.slow_link("node2", "20mbit")
    rates.clear()
    whole.wait_until(lambda: reaches(10), explain=lambda: str(rates))
    server.kill()
    assert max(rates) < 30


def test_up_restarts_killed_daemons(whole):
    whole.kill_node("node3")
    done = tool("up", "--name", whole.name, "--nodes=3")
    assert "started again: slurmd-node3" in done.stdout
    assert whole.run(["srun", "-wnode3", "hostname"]).stdout == "node3\n"


def test_a_shell_outside_reaches_slurm_through_env(lab):
    script = f'eval "$({TOOL} env --name {lab.name})"; squeue --noheader; sinfo -h -o %D -p batch'
    done = subprocess.run(
        ["sh", "-c", script], cwd=lab.shared, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1] == "3"


def test_exec_passes_user_directory_environment_and_exit_code(lab):
    words = ["exec", "node1", "--name", lab.name, "--user=root", "--cwd=/usr", "--env=A=b c", "--"]
    done = tool(*words, "sh", "-c", 'echo "$(id -un) $PWD $A $(hostname)"; exit 7')
    assert done.stdout == "root /usr b c node1\n"
    assert done.returncode == 7


def test_status_shows_a_dead_node(whole):
    whole.kill_node("node1")
    assert "not running: slurmd-node1" in tool("status", "--name", whole.name).stdout


def test_two_clusters_run_at_the_same_time(lab, spare_name):
    done = tool("up", "--name", spare_name, "--nodes=1", "--gpus=1", "--user=dcspare")
    assert done.returncode == 0, done.stderr
    assert f"jobs run as dcspare, shared directory /tmp/devcluster-{spare_name}" in done.stdout
    here = lab.run(["srun", "-N3", "hostname"]).stdout
    there = tool("exec", "login", "--name", spare_name, "--", "srun", "-N1", "id", "-un")
    assert (sorted(here.split()), there.stdout) == (lab.nodes, "dcspare\n")
    assert tool("down", "--name", spare_name).returncode == 0
    assert traces(spare_name) == []
    assert subprocess.run(["id", "dcspare"], capture_output=True, check=False).returncode != 0
    assert lab.run(["srun", "-N3", "hostname"]).returncode == 0


@pytest.mark.parametrize(
    "moment", ["namespace", "holder-node1", "munged", "slurmctld", "slurmd-node1"]
)
def test_down_removes_the_parts_of_a_killed_up(spare_name, moment):
    command = ["/usr/bin/python3", str(TOOL), "up", "--name", spare_name, "--nodes=2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = Path(f"/tmp/devcluster-{spare_name}")
    sign = (
        Path(f"/run/netns/devcluster.{spare_name}.switch")
        if moment == "namespace"
        else root / "run" / f"{moment}.process"
    )
    deadline = time.monotonic() + 300
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sign.exists()
    assert not (root / "run" / "ready").exists()
    assert tool("down", "--name", spare_name).returncode == 0
    assert traces(spare_name) == []


def test_the_next_down_finishes_a_killed_down(spare_name):
    done = tool("up", "--name", spare_name, "--nodes=1", "--user=dcspare")
    assert done.returncode == 0, done.stderr
    command = ["/usr/bin/python3", str(TOOL), "down", "--name", spare_name]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    root = Path(f"/tmp/devcluster-{spare_name}")
    deadline = time.monotonic() + 300
    while (root / "cluster.json").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert tool("down", "--name", spare_name).returncode == 0
    assert traces(spare_name) == []
    assert subprocess.run(["id", "dcspare"], capture_output=True, check=False).returncode != 0


def test_up_rebuilds_a_cluster_that_was_killed_half_way(spare_name):
    command = ["/usr/bin/python3", str(TOOL), "up", "--name", spare_name, "--nodes=1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    sign = Path(f"/tmp/devcluster-{spare_name}/run/munged.process")
    deadline = time.monotonic() + 300
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = tool("up", "--name", spare_name, "--nodes=1")
    assert done.returncode == 0, done.stderr
    there = tool("exec", "login", "--name", spare_name, "--", "srun", "hostname")
    assert there.stdout == "node1\n"


def test_the_cluster_of_a_dead_owner_is_removed(spare_name):
    with subprocess.Popen(["sleep", "600"]) as owner:
        try:
            done = tool("up", "--name", spare_name, "--nodes=1", f"--owner-pid={owner.pid}")
            assert done.returncode == 0, done.stderr
            tool("down", "--abandoned")
            assert traces(spare_name) != []
        finally:
            owner.kill()
    assert spare_name in tool("down", "--abandoned").stdout
    assert traces(spare_name) == []


def test_a_directory_with_other_content_is_refused_and_kept(spare_name, tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    done = tool("up", "--name", spare_name, "--root", str(tmp_path))
    assert done.returncode == REFUSED
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "thesis.tex").read_text() == "years"
    assert traces(spare_name) == []


def test_a_daemon_that_refuses_its_configuration_is_quoted(spare_name):
    done = tool("up", "--name", spare_name, "--nodes=1", "--set", "PreemptType=preempt/nonsense")
    assert done.returncode == REFUSED
    assert done.stderr.count("\n") == 1
    assert "nonsense" in done.stderr
    assert traces(spare_name) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--name", "No Good"], "not usable"),
        (["exec", "login", "--name", "nowhere", "--", "true"], "there is no cluster nowhere"),
        (["exec", "login", "--name", "nowhere"], "there is no command"),
        (["kill-node", "--name", "nowhere", "node1"], "there is no cluster nowhere"),
    ],
)
def test_a_refusal_is_one_line_with_a_remedy(arguments, words):
    if os.geteuid() != 0 and arguments[0] != "up":
        pytest.skip("without root, the tool refuses these before it reads them")
    done = tool(*arguments)
    assert done.returncode == REFUSED
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "; " in done.stderr


def test_an_ordinary_user_is_refused_with_a_remedy():
    become = ["setpriv", "--reuid=65534", "--clear-groups", "--"] if os.geteuid() == 0 else []
    command = [*become, "/usr/bin/python3", str(TOOL), "up"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == REFUSED
    assert "sudo" in done.stderr
    assert done.stderr.count("\n") == 1
