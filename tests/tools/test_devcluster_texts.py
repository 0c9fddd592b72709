"""The pure parts of the dev cluster: its files, its command lines, its parsers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ..on_slurm import cluster as _slurm_cluster

# The helper of the Slurm tests puts tools/ on the path.
assert _slurm_cluster.TOOLS.is_dir()

from devclusterlib import (  # noqa: E402
    cluster,
    daemons,
    faults,
    hosts,
    layout,
    options,
    processes,
    requirements,
    sharedfs,
    slurmconf,
    startup,
    users,
    wrappers,
)
from devclusterlib.errors import CommandFailed, Refusal  # noqa: E402
from devclusterlib.spec import ClusterSpec, Partition, parse_gpus, parse_partition  # noqa: E402

PLACE = layout.Layout("lab", Path("/tmp/devcluster-lab"))


def lines_of(text: str, prefix: str) -> list[str]:
    """Return the lines of a configuration file that begin with ``prefix``."""
    return [line for line in text.splitlines() if line.startswith(prefix)]


def test_a_spec_survives_json_and_the_command_line():
    spec = ClusterSpec(
        name="lab",
        nodes=3,
        gpus=(4, 4, 2),
        accounting=True,
        grace_s=7,
        preempt_user_signal=True,
        partitions=(Partition("one", (("MaxTime", "5"), ("PriorityTier", "3"))), Partition("two")),
        settings=(("JobRequeue", "0"),),
    )
    assert ClusterSpec.from_json(spec.to_json()) == spec
    parsed = options.parse(["up", *options.arguments_of(spec)])
    assert options.spec_from(parsed) == spec


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "../x"},
        {"name": "Big"},
        {"nodes": 0},
        {"nodes": 1000},
        {"gpus": (1, 2)},
        {"gpus": (-1,)},
        {"cpus": 0},
        {"user": "root"},
        {"user": "a b"},
        {"shared_fs": "nfs"},
        {"grace_s": -1},
    ],
)
def test_an_impossible_spec_is_refused_with_a_remedy(wrong):
    with pytest.raises(Refusal) as caught:
        ClusterSpec(**wrong)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["four", "4,", "4;4"])
def test_gpus_that_are_no_numbers_are_refused(text):
    with pytest.raises(Refusal):
        parse_gpus(text)


def test_a_partition_is_written_in_slurms_own_keys():
    assert parse_partition("debug:MaxTime=30,PriorityTier=5") == Partition(
        "debug", (("MaxTime", "30"), ("PriorityTier", "5"))
    )
    with pytest.raises(Refusal):
        parse_partition("debug:MaxTime")
    with pytest.raises(Refusal):
        parse_partition("a b")


def test_batch_is_the_default_and_urgent_preempts_it():
    text = slurmconf.slurm_conf(ClusterSpec(grace_s=9), PLACE)
    batch, urgent = lines_of(text, "PartitionName=")
    assert "Default=YES" in batch
    assert "PreemptMode=REQUEUE" in batch
    assert "GraceTime=9" in batch
    assert "Default=NO" in urgent
    assert int(re.findall(r"PriorityTier=(\d+)", urgent)[0]) > int(
        re.findall(r"PriorityTier=(\d+)", batch)[0]
    )


def test_own_partitions_replace_the_default_ones():
    spec = ClusterSpec(partitions=(parse_partition("debug:MaxTime=30"), parse_partition("long")))
    first, second = lines_of(slurmconf.slurm_conf(spec, PLACE), "PartitionName=")
    assert first.startswith("PartitionName=debug ")
    assert "MaxTime=30" in first
    assert "Default=YES" in first
    assert "Default=NO" in second


def test_realistic_keeps_slurms_own_delays():
    quick = slurmconf.settings(ClusterSpec(), PLACE)
    real = slurmconf.settings(ClusterSpec(realistic=True), PLACE)
    assert "cred_expire" in quick["AuthInfo"]
    assert "cred_expire" not in real["AuthInfo"]
    assert not set(slurmconf.QUICK_SETTINGS) & set(real)


def test_a_set_line_overrides_the_default():
    spec = ClusterSpec(settings=(("KillWait", "77"), ("JobRequeue", "0")))
    text = slurmconf.slurm_conf(spec, PLACE)
    assert lines_of(text, "KillWait=") == ["KillWait=77"]
    assert lines_of(text, "JobRequeue=") == ["JobRequeue=0"]


def test_the_user_signal_has_the_form_of_22_05():
    text = slurmconf.slurm_conf(ClusterSpec(preempt_user_signal=True), PLACE)
    assert "SlurmctldParameters=preempt_send_user_signal" in text
    assert "PreemptParameters" not in text


def test_uneven_gpus_give_each_node_its_own_devices():
    spec = ClusterSpec(nodes=3, gpus=(4, 1, 0))
    node1, node2, node3 = lines_of(slurmconf.slurm_conf(spec, PLACE), "NodeName=")
    assert "Gres=gpu:4" in node1
    assert "Gres=gpu:1" in node2
    assert "Gres" not in node3
    first, second = lines_of(slurmconf.gres_conf(spec, PLACE), "NodeName=")
    assert "nvidia[0-3]" in first
    assert second.split()[2].endswith("/nvidia0")


def test_every_host_has_an_address_and_localhost_stays_local():
    spec = ClusterSpec(name="lab", nodes=2)
    rows = dict(reversed(line.split()) for line in slurmconf.hosts_file(spec, PLACE).splitlines())
    assert rows["localhost"] == "127.0.0.1"
    assert len({rows[host] for host in spec.host_names}) == 4
    assert all(rows[host].startswith(PLACE.subnet) for host in spec.host_names)


def test_names_of_one_cluster_are_no_prefix_of_anothers():
    other = layout.Layout("lab-2", Path("/tmp/devcluster-lab-2"))
    assert not other.netns("ctl").startswith(PLACE.netns(""))


def test_a_root_too_long_for_a_socket_is_refused():
    with pytest.raises(Refusal, match="too long"):
        layout.Layout("lab", Path("/tmp/" + "x" * 100))


def test_a_command_as_a_user_carries_only_the_given_environment():
    argv = hosts.as_user_argv(["id", "-un"], uid=7, gid=8, cwd="/d", env={"A": "b c"})
    assert argv == [
        *("setpriv", "--reuid=7", "--regid=8", "--init-groups", "--"),
        *("env", "-i", "--chdir=/d", "A=b c", "id", "-un"),
    ]


def test_words_after_the_dashes_are_passed_unchanged():
    parsed = options.parse(["exec", "login", "--user", "u", "--", "ls", "--name", "x", "--"])
    assert parsed.program == ["ls", "--name", "x", "--"]
    assert parsed.user == "u"


def test_daemons_start_in_the_order_of_their_dependencies():
    spec = ClusterSpec(nodes=2, accounting=True, shared_fs="gluster")
    groups = startup.in_turn(daemons.names(spec))
    assert groups == [
        ["glusterfsd"],
        ["mount-ctl", "mount-login", "mount-node1", "mount-node2"],
        ["munged"],
        ["mariadbd"],
        ["slurmdbd"],
        ["slurmctld"],
        ["slurmd-node1", "slurmd-node2"],
    ]
    assert daemons.host_of("slurmd-node2") == "node2"
    assert daemons.host_of("slurmctld") == "ctl"


def test_node_states_are_read_as_slurm_writes_them():
    recorded = "node1 idle\nnode1 idle\nnode2 down*\nnode3 mixed\n"
    states = cluster.parse_node_states(recorded)
    assert states == {"node1": "idle", "node2": "down*", "node3": "mixed"}
    assert [cluster.registered(state) for state in states.values()] == [True, False, True]
    assert not cluster.registered("unknown*")


def test_a_process_name_with_blanks_shifts_no_fields():
    recorded = (
        "4242 (a) b (c) S 1 4242 4242 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 987654 "
        "1000 10 18446744073709551615 1 1 0 0 0 0 0 4096 0 0 0 0 17 1 0 0 0 0 0"
    )
    assert processes.parse_stat(recorded) == ("S", 987654)


def test_a_new_process_with_the_same_pid_differs(tmp_path):
    import os

    mine = processes.read_process(os.getpid())
    assert mine is not None
    mine.save(tmp_path / "record")
    assert processes.ProcessId.load(tmp_path / "record") == mine
    assert mine.alive()
    assert not processes.ProcessId(mine.pid, mine.started - 1).alive()
    (tmp_path / "record").write_text('{"pid": 1')
    assert processes.ProcessId.load(tmp_path / "record") is None


def test_only_listening_ports_count():
    recorded = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        "   0: 0100007F:0CEA 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n"
        "   1: 02C4450A:1AA1 03C4450A:C350 01 00000000:00000000 00:00000000 00000000     0\n"
    )
    assert startup.listening_ports(recorded) == {3306}


@pytest.mark.parametrize(
    ("rate", "burst"), [("50mbit", 65536), ("1gbit", 1250000), ("800kbit", 65536)]
)
def test_the_bucket_of_a_limited_link_grows_with_its_rate(rate, burst):
    assert faults.burst_bytes(rate) == burst


@pytest.mark.parametrize("percent", [0, 100, -5])
def test_an_invalid_loss_percentage_is_refused(percent):
    lab = cluster.Cluster(PLACE, ClusterSpec(name="lab"))
    with pytest.raises(Refusal, match="cut-link"):
        faults.lossy_link(lab, "node1", percent)


def test_a_program_of_many_words_is_quoted_in_one_line():
    failed = CommandFailed(["nft", "-f", "-"], 1, "line 5: Error\n  mod 100\n  ^^^\n")
    assert str(failed).startswith("`nft -f -` failed with 1: line 5: Error mod 100 ^^^; ")


def test_a_rate_without_a_unit_is_refused():
    with pytest.raises(Refusal, match="50mbit"):
        faults.burst_bytes("50")


def test_loss_rules_can_be_applied_twice():
    rules = faults.loss_rules("node1", "eth0", 20)
    assert rules.index("table netdev loss_node1 {}") < rules.index("delete table netdev loss_node1")
    assert "numgen random mod 100 < 20 drop" in rules


def test_a_missing_package_is_named_with_its_installation(monkeypatch):
    monkeypatch.setattr(requirements, "running_as_root", lambda: True)
    have = {"slurmdbd"}
    monkeypatch.setattr(
        requirements.shutil,
        "which",
        lambda name, **_: name if name in have or name in requirements.BASE.programs else None,
    )
    with pytest.raises(Refusal) as caught:
        requirements.require(ClusterSpec(accounting=True))
    assert "mariadbd, mariadb-install-db" in caught.value.what
    assert caught.value.remedy == "run `tools/devcluster install --accounting`"


def test_a_user_who_is_not_root_is_refused(monkeypatch):
    monkeypatch.setattr(requirements, "running_as_root", lambda: False)
    with pytest.raises(Refusal, match="sudo"):
        requirements.require(ClusterSpec())


def test_a_user_that_was_there_before_is_never_removed(monkeypatch):
    removed = []
    monkeypatch.setattr(users, "run", removed.append)
    account = users.Account("u", 7, 7, "/home/u", "a person")
    monkeypatch.setattr(users, "find", lambda _: account)
    users.remove_if_ours("u", [])
    assert removed == []


def test_the_job_user_stays_while_another_cluster_needs_it(monkeypatch):
    removed = []
    monkeypatch.setattr(users, "run", removed.append)
    account = users.Account("hpcuser", 7, 7, "/home/hpcuser", users.OURS)
    monkeypatch.setattr(users, "find", lambda _: account)
    users.remove_if_ours("hpcuser", ["hpcuser"])
    assert removed == []
    users.remove_if_ours("hpcuser", [])
    assert removed == [users.userdel_argv("hpcuser")]


def test_a_shared_file_system_keeps_to_the_clusters_directory():
    for path, text in sharedfs.configuration(PLACE, "gluster").items():
        assert path.is_relative_to(PLACE.root)
        for word in re.findall(r"(?<=\s)/\S+", text):
            assert word == "/" or word.startswith(str(PLACE.root))


def test_a_wrapper_survives_blanks_in_paths():
    script = wrappers.script("lab", "sbatch")
    assert script.startswith("#!/bin/sh\n")
    assert '--cwd "$PWD" login -- sbatch "$@"' in script


def test_the_records_of_a_cluster_are_json():
    assert json.loads(ClusterSpec().to_json())["name"] == "dev"
