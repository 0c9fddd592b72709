"""The schema of the configuration: every key, its default, and a description of one line.

The sections are immutable. An unknown key is an error, because an ignored typing error can cost a night of
GPU time. Only `model` and `data` accept further keys, which belong to the task.

The kind of the value at each key is in the schema too, because the reader needs it: `time: 1:30:00`,
`NCCL_VERSION: 2.10` and `account: 0123` are text in a config, which a YAML reader without the schema would
convert to numbers.
"""

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from hpcrun.config.fields import (
    Count,
    EnvName,
    FromZero,
    GpuCount,
    Image,
    Interfaces,
    Memory,
    Mount,
    NodeCount,
    NotNegative,
    Positive,
    RunName,
    SbatchOptions,
    Section,
    Seed,
    ShellText,
    SrunOptions,
    SubmitOption,
    TaskName,
    TimeLimit,
    Word,
    node_limits,
    time_seconds,
)
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
    """Resources and options of the job, in Slurm's terms: see sbatch(1), srun(1) and slurm.conf(5)."""

    nodes: Annotated[NodeCount, SubmitOption("N|N-M")] = Field(
        default=1, description="Number of nodes; 2-4: as many as Slurm has at each start."
    )
    spares: Annotated[FromZero, SubmitOption("K")] = Field(
        default=0, description="Spare nodes of the job, which replace lost nodes within seconds."
    )
    gpus: Annotated[GpuCount, SubmitOption("N")] = Field(
        default=1,
        description="GPUs per node (4, a100:4), one rank each; on the CPU: ranks per node.",
    )
    tasks_per_node: Annotated[Count | None, SubmitOption("N")] = Field(
        default=None,
        description="Command: tasks per node, each with all GPUs of the node; null: one per GPU.",
    )
    launcher: Annotated[
        Literal["torchrun", "accelerate"] | None,
        SubmitOption("torchrun|accelerate|none"),
        WithJsonSchema({"enum": ["torchrun", "accelerate", "none", None]}),
    ] = Field(
        default=None,
        description="Starts the command's ranks; one task per node. none: one process with all GPUs.",
    )
    gpu_type: Word | None = Field(
        default=None, description="Type of the GPUs; gpus: a100:4 sets both. null: any."
    )
    gpu_request: Literal["auto", "gpus-per-node", "gres", "none"] = Field(
        default="auto",
        description="GPU request to Slurm; auto: per node, or none if no node has a GRES.",
    )
    cpu: Annotated[bool, SubmitOption()] = Field(
        default=False, description="Train on the CPU even if GPUs are present."
    )
    executor: Annotated[
        Literal["auto", "slurm", "local", "debug"], SubmitOption("auto|slurm|local|debug")
    ] = Field(
        default="auto",
        description="Executor; auto: Slurm if it answers, else the local cluster; debug: one rank, here.",
    )
    time: Annotated[TimeLimit | None, SubmitOption("LIMIT")] = Field(
        default=None,
        description="Time limit: HH:MM:SS, D-HH:MM:SS or minutes; null: the partition's.",
    )
    cpus_per_task: Annotated[Count | None, SubmitOption("N")] = Field(
        default=None, description="CPU cores per task; with a launcher: per rank."
    )
    node_share: bool = Field(
        default=True,
        description="Without cpus_per_task and mem, request CPUs and memory in proportion to the GPUs.",
    )
    mem: Annotated[Memory | None, SubmitOption("SIZE", sbatch="mem")] = Field(
        default=None, description="Memory per node, such as 64G."
    )
    partition: Annotated[Word | None, SubmitOption("NAME", sbatch="partition")] = Field(
        default=None, description="Slurm partition, or several separated by commas."
    )
    account: Annotated[Word | None, SubmitOption("NAME", sbatch="account")] = Field(
        default=None, description="Slurm account to charge."
    )
    qos: Annotated[Word | None, SubmitOption("NAME", sbatch="qos")] = Field(
        default=None, description="Slurm quality of service."
    )
    constraint: Annotated[Word | None, SubmitOption("FEATURES", sbatch="constraint")] = Field(
        default=None, description="Node features that Slurm must match."
    )
    reservation: Annotated[Word | None, SubmitOption("NAME", sbatch="reservation")] = Field(
        default=None, description="Slurm reservation to run in."
    )
    interface: Interfaces | None = Field(
        default=None, description="Network interfaces, as in NCCL_SOCKET_IFNAME."
    )
    exclusive: Annotated[bool, SubmitOption(sbatch="exclusive")] = Field(
        default=False, description="Do not share the nodes with other jobs."
    )
    exclude: Annotated[Word | None, SubmitOption("NODES", sbatch="exclude")] = Field(
        default=None, description="Nodes to avoid, as a Slurm host list."
    )
    exclude_after: Count | None = Field(
        default=2, description="Exclude nodes after this many failures; null: never."
    )
    exclude_hours: Positive = Field(
        default=24.0, description="Hours after which a node's failure is forgotten."
    )
    signal_lead: FromZero = Field(
        default=90,
        description="Seconds before the time limit at which the job gets its stop signal.",
    )
    warn_signal: Literal["USR2", "USR1", "TERM"] = Field(
        default="USR2",
        description="Stop signal for a script, sent before the time limit and by `hpcrun preempt`.",
    )
    zero_after_signal: Literal["unfinished", "finished"] = Field(
        default="unfinished", description="Meaning of a script's exit code 0 after a stop signal."
    )
    kill_wait: FromZero = Field(
        default=30, description="Seconds Slurm waits between SIGTERM and SIGKILL at the time limit."
    )
    grace: NotNegative = Field(
        default=30.0, description="Local cluster: seconds between SIGTERM and SIGKILL."
    )
    silent_after: Positive | None = Field(
        default=None,
        description="Seconds without output of any rank after which a script counts as a hang; null: never.",
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
        description="Shell lines run once per node before its ranks, such as staging of data.",
    )
    preflight: bool = Field(
        default=False,
        description="Check every node before the ranks start, and exclude nodes that fail.",
    )
    node_checks: list[Word] = Field(
        default=[], description="Names of node checks of other packages, for the preflight."
    )
    env: dict[EnvName, ShellText] = Field(
        default={}, description="Environment variables set for every rank."
    )
    sbatch_args: SbatchOptions = Field(
        default=[], description="Further options for sbatch, one per item."
    )
    srun_args: SrunOptions = Field(
        default=[], description="Further options for srun, one per item."
    )
    image: Image | None = Field(
        default=None,
        description="Container image of the ranks: a .sif or .sqsh file, or docker://NAME:TAG.",
    )
    mounts: list[Mount] = Field(
        default=[],
        description="Paths to mount in the image: /data, /data:/inside or /data:/inside:ro.",
    )
    container: list[ShellText] = Field(
        default=[],
        description="Prefix of each rank's command, for a container that image cannot start.",
    )
    python: ShellText | None = Field(
        default=None,
        description="Python of the ranks; null: the submitting interpreter, or python3 of the image.",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_launcher(cls, given: object) -> object:
        """Read ``launcher: none`` as one task per node."""
        if not isinstance(given, dict) or given.get("launcher") != "none":
            return given
        return given if given.get("tasks_per_node") is not None else {**given, "tasks_per_node": 1}

    @field_validator("launcher", mode="before")
    @classmethod
    def _known_launcher(cls, name: object, others: ValidationInfo) -> object:
        if name == "none":
            if others.data.get("tasks_per_node", 1) != 1:
                raise ValueError("none means one task per node; remove job.tasks_per_node")
            return None
        if name not in (None, "torchrun", "accelerate"):
            choices = {"expected": "'torchrun', 'accelerate' or 'none'"}
            raise PydanticKnownError("literal_error", choices)
        return name

    @property
    def tasks_on_node(self) -> int:
        """Number of tasks per node."""
        return 1 if self.launcher else self.tasks_per_node or self.gpus

    @property
    def cpus_of_task(self) -> int | None:
        """CPU cores per task, or None; a launcher's task has the cores of all its ranks."""
        if self.cpus_per_task is None or self.launcher is None:
            return self.cpus_per_task
        return self.cpus_per_task * self.gpus

    @property
    def min_nodes(self) -> int:
        """Smallest number of nodes with which the job starts."""
        return node_limits(self.nodes)[0]

    @property
    def max_nodes(self) -> int:
        """Largest number of nodes with which the job starts."""
        return node_limits(self.nodes)[1]

    @property
    def elastic(self) -> bool:
        """True if the number of nodes is a range, so that each start may have another number."""
        return self.min_nodes < self.max_nodes

    @property
    def world_size(self) -> int:
        """Largest number of tasks of the job. Each task is a rank, except with a launcher."""
        return self.max_nodes * self.tasks_on_node

    @property
    def time_seconds(self) -> int | None:
        """Time limit in seconds, or None for the partition's limit."""
        return None if self.time is None else time_seconds(self.time)


class Restarts(Section):
    """Maximum number of restarts after each cause (null: no limit), and reasons for further restarts."""

    crash: FromZero | None = Field(default=3, description="After a rank crashed.")
    node_failure: FromZero | None = Field(default=10, description="After a node failed.")
    preemption: FromZero | None = Field(default=None, description="After a preemption.")
    time_limit: FromZero | None = Field(default=None, description="After the time limit.")
    hang: FromZero | None = Field(default=3, description="After a rank made no progress.")
    no_progress: Count | None = Field(
        default=3,
        description="Consecutive crashes, hangs or time limits without a new commit, or without the report.",
    )
    same_step: Count | None = Field(
        default=2, description="Crashes at the same step, or equal ones at the same place."
    )
    in_place: bool = Field(
        default=True,
        description="Start again inside the allocation, without a requeue, while its nodes live.",
    )
    replace_slow: bool = Field(
        default=False, description="Restart at the next save without a node that has become slow."
    )
    strategies: list[Word] = Field(
        default=[],
        description="Names of strategies of other packages: how a run starts again, asked in this order.",
    )

    @property
    def budgets(self) -> dict[str, int | None]:
        """The maximum numbers of restarts, by key."""
        found: dict[str, int | None] = self.model_dump(
            exclude={"in_place", "replace_slow", "strategies"}
        )
        return found


class Checkpoint(Section):
    """Interval, retention and memory of asynchronous checkpoints.

    Source of ``auto``: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM
    17(9), 1974.
    """

    every: FromZero = Field(
        default=100, description="Steps between checkpoints; 0: only at stops and at the end."
    )
    minutes: Positive | None = Field(
        default=None, description="Minutes between checkpoints, instead of steps."
    )
    auto: bool = Field(
        default=False,
        description="Choose the interval from the cost of a save and the failure rate.",
    )
    keep: Count = Field(default=3, description="Newest valid checkpoints to keep.")
    keep_every: FromZero = Field(
        default=0,
        description="Also keep checkpoints at multiples of this number of steps; 0: none.",
    )
    keep_best: FromZero = Field(
        default=0, description="Also keep this many checkpoints with the lowest validation loss."
    )
    host_memory: Positive | None = Field(
        default=None,
        description="Host memory (GB) per rank for a snapshot; null: half of the free memory.",
    )
    memory_every: FromZero | None = Field(
        default=None,
        description="Steps between copies in memory, for restarts in the job; null: those of saves; 0: none.",
    )
    memory_copies: Literal[0, 1] = Field(
        default=0,
        description="Copies of a node's memory on another node, for the loss of a node.",
    )


class Keys(Section):
    """All keys of a config, without the functions that read one: see :class:`hpcrun.config.Config`."""

    name: Annotated[RunName | None, SubmitOption("NAME")] = Field(
        default=None, description="Name of the run and its directory; null: the config file's stem."
    )
    task: TaskName = Field(
        default="language-model", description="Built-in task, or your package.module:Class."
    )
    command: list[ShellText] = Field(
        default=[], description="Program that every rank runs instead of a task."
    )
    seed: Seed = Field(default=0, description="Seed of weights, data order and dropout.")
    # The call Job() would make a validator of the section at import; resolution needs only that of Config.
    job: Job = Field(default=Job.model_construct(), description="Resources and options of the job.")
    restarts: Restarts = Field(
        default=Restarts.model_construct(), description="Restarts allowed after each cause."
    )
    model: ModelOptions = Field(
        default=ModelOptions.model_construct(), description="The model: keys of the task."
    )
    data: DataOptions = Field(
        default=DataOptions.model_construct(),
        description="The data: workers, and keys of the task.",
    )
    train: Train = Field(default=Train.model_construct(), description="The training loop.")
    fsdp: FSDP = Field(
        default=FSDP.model_construct(), description="Sharding, with train.parallel=fsdp."
    )
    optim: Optim = Field(
        default=Optim.model_construct(), description="The optimizer and its schedule."
    )
    amp: AMPConfig = Field(default=AMPConfig.model_construct(), description="Mixed precision.")
    checkpoint: Checkpoint = Field(default=Checkpoint.model_construct(), description="Saving.")
    watch: Watch = Field(
        default=Watch.model_construct(),
        description="Where to log metrics in addition to metrics.jsonl.",
    )


def submit_options(model: type[Section] = Job) -> dict[str, tuple[SubmitOption, str]]:
    """Return the keys of ``model`` that are options of a submission, each with its description."""
    return {
        name: (mark, field.description or "")
        for name, field in model.model_fields.items()
        for mark in field.metadata
        if isinstance(mark, SubmitOption)
    }


Kind = Literal["section", "list", "mapping", "text", "other", "unknown"]


def kind_at(path: Sequence[str]) -> Kind:
    """Return the kind of value at a path of keys; `unknown` if the schema has no such key."""
    annotation: object = Keys
    for step in path:
        annotation = _below(annotation, step)
        if annotation is None:
            return "unknown"
    return _kind(annotation)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a model, each section before its keys, in the schema's order."""
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        yield key
        section = _section(_plain(field.annotation))
        if section is not None:
            yield from known_keys(section, key)


def _below(annotation: object, step: str) -> object:
    section = _section(annotation)
    if section is not None:
        field = section.model_fields.get(step)
        return None if field is None else _plain(field.annotation)
    kind = _kind(annotation)
    if kind == "list":
        return _plain(get_args(annotation)[0])
    if kind == "mapping":
        return _plain(get_args(annotation)[1])
    return None


def _section(annotation: object) -> type[BaseModel] | None:
    """Return ``annotation`` if it is a section, or a model of a task."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def _kind(annotation: object) -> Kind:
    origin = get_origin(annotation)
    if origin in (list, tuple):
        return "list"
    if origin is dict:
        return "mapping"
    if annotation is str or (origin is Literal and True not in get_args(annotation)):
        return "text"
    return "other" if _section(annotation) is None else "section"


def _plain(annotation: object) -> object:
    """Return an annotation without `Annotated`, and without the `None` of an optional value."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            kept = [part for part in get_args(annotation) if part is not type(None)]
            if len(kept) != 1:
                return annotation
            annotation = kept[0]
        else:
            return annotation
