"""What a user can ask for: every key, its default and its one-line meaning.

The sections are immutable, and an unknown key is an error, because a misspelt key that is ignored
costs a night of GPU time. Only `model` and `data` take further keys: they belong to the task.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpcrun.config.fields import (
    Count,
    EnvName,
    FromZero,
    GpuCount,
    Memory,
    NotNegative,
    Option,
    Positive,
    RunName,
    SbatchOption,
    Seed,
    ShellText,
    TaskName,
    TimeLimit,
    Word,
    time_seconds,
)
from hpcrun.config.section import Section
from hpcrun.config.training import (
    FSDP,
    AMPConfig,
    DataOptions,
    ModelOptions,
    Optim,
    Train,
    Watch,
)


class Job(Section):
    """What the job needs of the cluster, in Slurm's words."""

    nodes: Count = Field(default=1, description="Number of nodes.")
    gpus: GpuCount = Field(
        default=1, description="GPUs per node (4, a100:4), one rank each; ranks per node on CPU."
    )
    tasks_per_node: Count | None = Field(
        default=None,
        description="Tasks per node that run a command, each with all GPUs of its node; null: one a GPU.",
    )
    launcher: Literal["torchrun", "accelerate"] | None = Field(
        default=None, description="Program that starts the command's ranks, as one task per node."
    )
    gpu_type: Word | None = Field(
        default=None, description="Type of the GPUs; gpus: a100:4 sets both. null: any."
    )
    gpu_request: Literal["auto", "gpus-per-node", "gres", "gpus-per-task", "none"] = Field(
        default="auto",
        description="How Slurm is asked for GPUs; auto: by node, or not where no node has a GRES.",
    )
    cpu: bool = Field(default=False, description="Train on the CPU even where there are GPUs.")
    executor: Literal["auto", "slurm", "local", "debug"] = Field(
        default="auto",
        description="Where to run; auto: Slurm where it answers, else the local cluster.",
    )
    time: TimeLimit | None = Field(
        default=None,
        description="Time limit: HH:MM:SS, D-HH:MM:SS or minutes; null: the partition's.",
    )
    cpus_per_task: Count | None = Field(
        default=None, description="CPU cores for each task; of a launcher: each rank."
    )
    node_share: bool = Field(
        default=True,
        description="Without cpus_per_task and mem, ask for the GPUs' share of a node's CPUs and memory.",
    )
    mem: Memory | None = Field(default=None, description="Memory per node, such as 64G.")
    cluster: Word | None = Field(
        default=None, description="Slurm cluster, as sbatch's --clusters; null: this host's."
    )
    partition: Word | None = Field(
        default=None, description="Slurm partition, or several with commas."
    )
    account: Word | None = Field(default=None, description="Slurm account to charge.")
    qos: Word | None = Field(default=None, description="Slurm quality of service.")
    constraint: Word | None = Field(
        default=None, description="Node features that Slurm must match."
    )
    reservation: Word | None = Field(default=None, description="Slurm reservation to run in.")
    interface: Word | None = Field(
        default=None,
        description="Network interfaces as NCCL_SOCKET_IFNAME has them; auto: the nodes find one.",
    )
    exclusive: bool = Field(default=False, description="Share the nodes with no other job.")
    exclude: Word | None = Field(default=None, description="Nodes to avoid, as a Slurm host list.")
    exclude_after: Count | None = Field(
        default=2, description="Leave out nodes that failed this often; null: none."
    )
    exclude_hours: Positive = Field(
        default=24.0, description="Hours for which a node's failure is remembered."
    )
    signal_lead: FromZero = Field(
        default=90, description="Seconds before the time limit at which the job is told to stop."
    )
    warn_signal: Literal["USR2", "USR1", "TERM"] = Field(
        default="USR2",
        description="Signal that tells a script to stop, ahead of the time limit and at `hpcrun preempt`.",
    )
    kill_wait: FromZero = Field(
        default=30, description="Seconds Slurm waits between SIGTERM and SIGKILL at the time limit."
    )
    grace: NotNegative = Field(
        default=30.0, description="Local cluster: seconds between SIGTERM and SIGKILL."
    )
    requeue_delay: NotNegative = Field(
        default=1.0, description="Local cluster: seconds before a requeued job starts again."
    )
    setup: list[ShellText] = Field(
        default=[],
        description="Shell lines run on each start before training, such as module load.",
    )
    node_setup: list[ShellText] = Field(
        default=[],
        description="Shell lines run once on every node before its ranks, such as staging of data.",
    )
    preflight: bool = Field(
        default=False,
        description="Check every node before the ranks of each start, and leave out those that fail.",
    )
    env: dict[EnvName, ShellText] = Field(
        default={}, description="Environment variables set for every rank."
    )
    sbatch_args: list[SbatchOption] = Field(
        default=[], description="Further options for sbatch, one an item."
    )
    srun_args: list[Option] = Field(
        default=[], description="Further options for srun, one an item."
    )
    container: list[ShellText] = Field(
        default=[],
        description="Words before each rank's command, such as apptainer exec --nv image.sif.",
    )
    same_code: bool = Field(
        default=False,
        description="Refuse to continue with code other than that of the last saved step.",
    )
    python: ShellText | None = Field(
        default=None,
        description="Python interpreter of the ranks, in the container; null: the one that submits.",
    )

    @property
    def tasks_on_node(self) -> int:
        """Number of tasks that the job starts on each node."""
        return 1 if self.launcher else self.tasks_per_node or self.gpus

    @property
    def cpus_of_task(self) -> int | None:
        """CPU cores that each task asks for, or None; a launcher's task has those of all its ranks."""
        if self.cpus_per_task is None or self.launcher is None:
            return self.cpus_per_task
        return self.cpus_per_task * self.gpus

    @property
    def world_size(self) -> int:
        """Number of tasks of the job. Each is a rank, unless it starts several ranks."""
        return self.nodes * self.tasks_on_node

    @property
    def time_seconds(self) -> int | None:
        """The time limit in seconds, or None for the partition's own."""
        return None if self.time is None else time_seconds(self.time)


class Restarts(Section):
    """How often the job may start again after each cause; null: any number of times."""

    crash: FromZero | None = Field(default=3, description="After a rank crashed.")
    node_failure: FromZero | None = Field(default=10, description="After a node failed.")
    preemption: FromZero | None = Field(default=None, description="After a preemption.")
    time_limit: FromZero | None = Field(default=None, description="After the time limit.")
    hang: FromZero | None = Field(default=3, description="After a rank made no progress.")
    no_progress: Count | None = Field(
        default=3,
        description="Crashes, hangs and time limits in a row without a new commit, or without the report.",
    )
    same_step: Count | None = Field(default=2, description="Crashes at one and the same step.")


class Checkpoint(Section):
    """When the state is saved, and how much of it is kept."""

    every: FromZero = Field(
        default=100, description="Steps between checkpoints; 0: only at stops and at the end."
    )
    minutes: Positive | None = Field(
        default=None, description="Minutes between checkpoints, instead of steps."
    )
    auto: bool = Field(
        default=False,
        description="Choose the time between checkpoints from what saves cost and how often it fails.",
    )
    keep: Count = Field(default=3, description="Newest valid checkpoints to keep.")
    keep_every: FromZero = Field(
        default=0, description="Also keep those at multiples of so many steps; 0: none."
    )
    keep_best: FromZero = Field(
        default=0, description="Also keep so many with the lowest validation loss."
    )
    host_memory: Positive | None = Field(
        default=None,
        description="Gigabytes of host memory a rank may take for a snapshot; null: half of what is free.",
    )
    stage_dir: ShellText | None = Field(
        default=None, description="Fast folder of the node that saves go to first, and drain from."
    )


class Config(Section):
    """Everything a run is asked to do."""

    name: RunName | None = Field(
        default=None, description="Name of the run and its directory; null: the config file's stem."
    )
    task: TaskName = Field(
        default="language-model", description="Built-in task, or package.module:Class of your own."
    )
    command: list[ShellText] = Field(
        default=[], description="A program that every rank runs instead of a task."
    )
    seed: Seed = Field(default=0, description="Seed of weights, order and dropout.")
    job: Job = Field(default=Job(), description="What the job needs of the cluster.")
    restarts: Restarts = Field(default=Restarts(), description="Restarts allowed after each cause.")
    model: ModelOptions = Field(
        default=ModelOptions(), description="The model: the task's own keys."
    )
    data: DataOptions = Field(
        default=DataOptions(), description="The data: workers, the task's own keys."
    )
    train: Train = Field(default=Train(), description="The training loop.")
    fsdp: FSDP = Field(default=FSDP(), description="Sharding, with train.parallel=fsdp.")
    optim: Optim = Field(default=Optim(), description="The optimiser and its schedule.")
    amp: AMPConfig = Field(default=AMPConfig(), description="Mixed precision.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="Saving.")
    watch: Watch = Field(default=Watch(), description="What is told beside metrics.jsonl.")

    @property
    def warn_signal(self) -> str:
        """The name of the signal that tells the ranks to stop, as USR2; a task always takes USR2."""
        return self.job.warn_signal if self.command else "USR2"
