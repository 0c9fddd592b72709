"""Memory for a snapshot: limited by the machine and by the job's control group."""

import pytest

from hpcrun.devices.host_memory import available_memory, total_memory

GB = 10**9


def machine(root, groups, files):
    """Write the files of /proc and /sys of a machine with 500 GB below ``root``."""
    files = {"proc/meminfo": "MemTotal: 1 kB\nMemAvailable: 500000000 kB\n"} | files
    if groups:
        files["proc/self/cgroup"] = groups
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return root


def version_2(group, limit, used, stat=""):
    place = f"sys/fs/cgroup/{group}"
    return {
        f"{place}/memory.max": limit,
        f"{place}/memory.current": used,
        f"{place}/memory.stat": stat,
    }


JOB = "system.slice/slurmstepd.scope/job_7"


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        ("", {}, 512 * GB),
        # Slurm sets the limit on the job, above the group of the process.
        (
            f"0::/{JOB}/step_0/user/task_0\n",
            version_2(JOB, 32 * GB, 12 * GB)
            | version_2(f"{JOB}/step_0", "max", 9 * GB)
            | version_2(f"{JOB}/step_0/user/task_0", "max", 9 * GB),
            20 * GB,
        ),
        # Page cache counts as used, and is reclaimed first.
        (
            f"0::/{JOB}\n",
            version_2(JOB, 32 * GB, 30 * GB, f"anon 5\ninactive_file {18 * GB}\nfile 9\n"),
            20 * GB,
        ),
        # A container sees its group as the root, even if /proc shows its path from outside.
        ("0::/../elsewhere\n", version_2("", 8 * GB, 3 * GB), 5 * GB),
        (
            "9:name=systemd:/\n4:cpu,memory:/slurm/uid_0/job_7/step_0\n0::/\n",
            {
                "sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.limit_in_bytes": 16 * GB,
                "sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.usage_in_bytes": 17 * GB,
                "sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.stat": (
                    f"inactive_file 7\ntotal_inactive_file {2 * GB}\n"
                ),
            },
            1 * GB,
        ),
        (f"0::/{JOB}\n", version_2(JOB, 8 * GB, 9 * GB), 0),
        ("nonsense\n", {}, 512 * GB),
    ],
)
def test_the_limit_of_any_parent_group_counts(tmp_path, groups, files, free):
    assert available_memory(machine(tmp_path, groups, files)) == free


def test_total_memory_is_the_group_s_limit(tmp_path):
    groups = f"0::/{JOB}/step_0\n"
    files = {"proc/meminfo": "MemTotal: 500000000 kB\nMemAvailable: 1 kB\n"}
    assert total_memory(machine(tmp_path / "free", "", files)) == 512 * GB
    limited = machine(tmp_path / "job", groups, files | version_2(JOB, 32 * GB, 31 * GB))
    assert total_memory(limited) == 32 * GB
