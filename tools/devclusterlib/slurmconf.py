"""The text of Slurm's configuration files: pure functions of a spec, so that tests can read the text.

Where Slurm's default would make a test wait for minutes, this module uses a short value;
``--realistic`` keeps Slurm's default.
"""

from __future__ import annotations

from . import installations
from .layout import Layout
from .spec import ClusterSpec, Partition

SLURMCTLD_PORT = 6817
SLURMD_PORT = 6818
SLURMDBD_PORT = 6819
DATABASE_PORT = 3306
DATABASE_PASSWORD = "devcluster"

# A requeued job may not start before its old credential has expired, and a node counts as down
# after SlurmdTimeout: with Slurm's defaults that is two and five minutes.
QUICK_SETTINGS = {
    "SlurmdTimeout": "5",
    "MessageTimeout": "5",
    "KillWait": "5",
    "SchedulerParameters": "sched_interval=1,bf_interval=1",
}
QUICK_CREDENTIAL_S = 5


def default_partitions(grace_s: int) -> tuple[Partition, ...]:
    """Return ``batch``, with jobs that may be preempted and requeued, and ``urgent``, which preempts them."""
    return (
        Partition(
            "batch",
            (("PriorityTier", "1"), ("PreemptMode", "REQUEUE"), ("GraceTime", str(grace_s))),
        ),
        Partition("urgent", (("PriorityTier", "100"), ("PreemptMode", "OFF"))),
    )


def settings(spec: ClusterSpec, layout: Layout) -> dict[str, str]:
    """Return the cluster-wide lines of slurm.conf; the user's ``--set`` lines come last and override."""
    auth = f"socket={layout.munge_socket}"
    lines = {
        "ClusterName": spec.name,
        "SlurmctldHost": f"ctl({layout.address('ctl')})",
        "SlurmctldPort": str(SLURMCTLD_PORT),
        "SlurmdPort": str(SLURMD_PORT),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "CredType": "cred/munge",
        "AuthInfo": auth if spec.realistic else f"{auth},cred_expire={QUICK_CREDENTIAL_S}",
        "StateSaveLocation": str(layout.root / "state"),
        "SlurmdSpoolDir": f"{layout.root}/spool/%n",
        "SlurmctldPidFile": str(layout.run / "slurmctld.pid"),
        "SlurmdPidFile": f"{layout.run}/slurmd-%n.pid",
        "SlurmctldLogFile": str(layout.daemon_log("slurmctld")),
        "SlurmdLogFile": f"{layout.log}/slurmd-%n.log",
        "SlurmdParameters": "config_overrides",
        "MpiDefault": "none",
        "SwitchType": "switch/none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "ReturnToService": "2",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": str(max(1, spec.memory_mb // spec.cpus // 2)),
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "PriorityType": "priority/basic",
        "GresTypes": "gpu",
    }
    if spec.accounting:
        lines |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": layout.address("ctl"),
            "AccountingStoragePort": str(SLURMDBD_PORT),
            # The client of slurmdbd does not read AuthInfo; munge's socket goes in here.
            "AccountingStoragePass": str(layout.munge_socket),
            "AccountingStorageTRES": "gres/gpu",
            "JobAcctGatherType": "jobacct_gather/linux",
        }
    if spec.preempt_user_signal:
        # The manual's PreemptParameters=send_user_signal is fatal in 22.05.
        lines["SlurmctldParameters"] = "preempt_send_user_signal"
    if not spec.realistic:
        lines |= QUICK_SETTINGS
    lines |= plugins(spec)
    return lines | dict(spec.settings)


def plugins(spec: ClusterSpec) -> dict[str, str]:
    """Return the plugin path of another version; its programs would load the system's plugins by default."""
    return {"PluginDir": str(installations.plugin_dir(spec.slurm))} if spec.slurm else {}


def node_line(spec: ClusterSpec, layout: Layout, node: str) -> str:
    """Return the line of a node, which declares more CPUs and memory than the machine has."""
    gpus = spec.gpus_of(node)
    kind = spec.gpu_type_of(node)
    gres = f" Gres=gpu:{f'{kind}:' if kind else ''}{gpus}" if gpus else ""
    return (
        f"NodeName={node} NodeAddr={layout.address(node)} CPUs={spec.cpus} Boards=1 "
        f"SocketsPerBoard=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1 "
        f"RealMemory={spec.memory_mb}{gres} State=UNKNOWN"
    )


def partition_line(partition: Partition, *, default: str) -> str:
    """Return the line of a partition over all nodes, unless its own settings say otherwise."""
    options = {"Nodes": "ALL", "State": "UP", "MaxTime": "INFINITE", "Default": default}
    options |= dict(partition.options)
    words = " ".join(f"{key}={value}" for key, value in options.items())
    return f"PartitionName={partition.name} {words}"


def partitions(spec: ClusterSpec) -> tuple[Partition, ...]:
    """Return the partitions of the cluster; the first is the default partition."""
    return spec.partitions or default_partitions(spec.grace_s)


def slurm_conf(spec: ClusterSpec, layout: Layout) -> str:
    """Return the complete slurm.conf."""
    lines = [f"{key}={value}" for key, value in settings(spec, layout).items()]
    lines += [node_line(spec, layout, node) for node in spec.node_names]
    lines += [
        partition_line(partition, default="NO" if index else "YES")
        for index, partition in enumerate(partitions(spec))
    ]
    return "\n".join(lines) + "\n"


def gres_conf(spec: ClusterSpec, layout: Layout) -> str:
    """Return GPUs by device file; the flag makes Slurm set CUDA_VISIBLE_DEVICES without NVML."""
    lines = ["AutoDetect=off"]
    for node in spec.node_names:
        count = spec.gpus_of(node)
        if count:
            span = "0" if count == 1 else f"[0-{count - 1}]"
            kind = f" Type={spec.gpu_type_of(node)}" if spec.gpu_types else ""
            lines.append(
                f"NodeName={node} Name=gpu{kind} File={layout.devices}/nvidia{span} "
                "Flags=nvidia_gpu_env"
            )
    return "\n".join(lines) + "\n"


def cgroup_conf() -> str:
    """Return the cgroup configuration: Slurm makes no cgroups here, but slurmd loads a plugin anyway.

    The plugin for v1 changes nothing unless a job uses it, so it also starts where the kernel has v2
    or no cgroups. The plugin that Slurm would select by default then ends slurmd.
    """
    return "CgroupPlugin=cgroup/v1\n"


def slurmdbd_conf(spec: ClusterSpec, layout: Layout) -> str:
    """Return the configuration of slurmdbd on the controller's host; its database is on the loopback."""
    lines = {
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={layout.munge_socket}",
        "DbdHost": "ctl",
        "DbdAddr": layout.address("ctl"),
        "DbdPort": str(SLURMDBD_PORT),
        "SlurmUser": "root",
        "PidFile": str(layout.run / "slurmdbd.pid"),
        "LogFile": str(layout.daemon_log("slurmdbd")),
        "StorageType": "accounting_storage/mysql",
        # 127.0.0.1, not localhost: the client library uses the system's socket for localhost.
        "StorageHost": "127.0.0.1",
        "StoragePort": str(DATABASE_PORT),
        "StorageUser": "slurm",
        "StoragePass": DATABASE_PASSWORD,
        "StorageLoc": "slurm_acct_db",
    }
    lines |= plugins(spec)
    return "".join(f"{key}={value}\n" for key, value in lines.items())


def hosts_file(spec: ClusterSpec, layout: Layout) -> str:
    """Return one /etc/hosts for all hosts: a host's name must resolve to its address, which gloo binds to."""
    lines = ["127.0.0.1 localhost"]
    lines += [f"{layout.address(host)} {host}" for host in spec.host_names]
    return "\n".join(lines) + "\n"
