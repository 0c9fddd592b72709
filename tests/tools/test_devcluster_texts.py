"""The pure parts of the dev cluster: its files, its command lines, its parsers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..on_slurm import cluster as _slurm_cluster

# The helper of the Slurm tests puts tools/ on the path.
assert _slurm_cluster.TOOLS.is_dir()

from devclusterlib import (  # noqa: E402
    cluster,
    faults,
    layout,
    options,
    processes,
    requirements,
    sharedfs,
    users,
)
from devclusterlib.errors import CommandFailed, Refusal  # noqa: E402
from devclusterlib.spec import ClusterSpec, Partition, parse_partition  # noqa: E402

PLACE = layout.Layout("lab", Path("/tmp/devcluster-lab"))


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


def test_a_partition_is_written_in_slurms_own_keys():
    assert parse_partition("debug:MaxTime=30,PriorityTier=5") == Partition(
        "debug", (("MaxTime", "30"), ("PriorityTier", "5"))
    )
    with pytest.raises(Refusal):
        parse_partition("debug:MaxTime")
    with pytest.raises(Refusal):
        parse_partition("a b")


def test_names_of_one_cluster_are_no_prefix_of_anothers():
    other = layout.Layout("lab-2", Path("/tmp/devcluster-lab-2"))
    assert not other.netns("ctl").startswith(PLACE.netns(""))


def test_a_root_too_long_for_a_socket_is_refused():
    with pytest.raises(Refusal, match="too long"):
        layout.Layout("lab", Path("/tmp/" + "x" * 100))


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
