"""The plan of a sweep: its elements, their names, and which of them the submission starts.

The expressions are a small part of Python's: names of keys, constants, comparisons, ``in``, ``and``, ``or``,
``not``, and + - * /. Nothing else is evaluated: a file of a sweep runs no code.
"""

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcrun.api.submission.choose_config import (
    SubmitRequest,
    require_packages,
    say_idle,
    warn_of,
)
from hpcrun.api.submission.continuing import compare
from hpcrun.api.submission.plan import finished_result
from hpcrun.api.sweeps.configs import Element, element_configs
from hpcrun.api.sweeps.handle import Condition, Row, SweepRequest, canonical, refusal, text_of
from hpcrun.config import Config, Job
from hpcrun.errors import UserError
from hpcrun.job.command import check_command
from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.sweep_file import SweepFile, SweepRun, read_sweep
from hpcrun.slurm.launch import jobs, submission
from hpcrun.slurm.launch.array import element_name
from hpcrun.slurm.launch.batch_script import wanted_cluster
from hpcrun.slurm.launch.slurm_jobs import ExecutorName
from hpcrun.slurm.launch.stopping import unfinished_runs

Action = Literal["new", "again", "running", "finished"]


@dataclass(frozen=True)
class Planned:
    """An element with its run directory.

    ``action``: ``new`` has no run directory yet, ``again`` has failed or stopped; both are submitted.
    ``word``: the state of an existing run.
    """

    run: RunDirectory
    element: Element
    action: Action
    word: str

    @property
    def number(self) -> int:
        """The number of the element."""
        return int(self.run.path.name)

    @property
    def submitted(self) -> bool:
        """True if the submission starts the element."""
        return self.action in ("new", "again")


@dataclass(frozen=True)
class SweepPlan:
    """A checked sweep before its submission: nothing is written yet.

    ``at_once``: elements that may run at the same time; None: no limit. ``snapshot``: keep a copy of the
    code. ``pack``: elements that share a node and its GPUs.
    """

    folder: Path
    executor: ExecutorName
    elements: Sequence[Element]
    at_once: int | None = None
    snapshot: bool = True
    pack: int = 1

    @property
    def tasks_at_once(self) -> int | None:
        """The tasks of an array that may run at the same time."""
        return None if self.at_once is None else self.at_once // self.pack

    @property
    def config(self) -> Config:
        """The config of the first element; the ``job`` section of others may differ."""
        return self.elements[0].config

    def waits_for(self, named: Sequence[str], runs: Path) -> list[RunDirectory]:
        """Return the runs ``named`` that have not finished, for which the sweep must wait.

        Args:
            named: names or paths of runs.
            runs: the folder of the runs.

        Raises:
            UserError: a run is not there, or will never finish.
        """
        found = [directory.find(name, runs) for name in named]
        return unfinished_runs(found, self.executor, wanted_cluster(self.config.job))

    def decided(self) -> tuple[SweepFile, list[Planned]]:
        """Return the sweep with its new elements, and the action for each element of this plan.

        An element that exists in the folder keeps its name; new elements get the next numbers.

        Raises:
            RunError: ``sweep.json`` is damaged, or the folder is not a sweep folder.
        """
        before = read_sweep(self.folder) or SweepFile(self.folder, self.folder.name, {}, [])
        known = {canonical(run.values): run.name for run in before.runs}
        number = max((int(run.name) for run in before.runs), default=-1)
        named: list[tuple[str, Element]] = []
        runs = [*before.runs]
        for element in self.elements:
            name = known.get(canonical(element.values))
            if name is None:
                number += 1
                name = element_name(number)
                runs.append(SweepRun(name, element.values))
            named.append((name, element))
        axes = _axes(before, self.elements)
        sweep = SweepFile(self.folder, before.name, axes, runs, before.submissions)
        return sweep, self._planned(named)

    def _planned(self, named: Sequence[tuple[str, Element]]) -> list[Planned]:
        runs = [RunDirectory(self.folder / name) for name, _ in named]
        there = [run for run in runs if run.exists()]
        states = dict(zip(there, jobs.states(there), strict=True)) if there else {}
        planned = []
        for run, (_, element) in zip(runs, named, strict=True):
            if run not in states:
                planned.append(Planned(run, element, "new", "new"))
                continue
            now = states[run]
            action: Action = "running" if now.live else "again"
            if not now.live and finished_result(run) is not None:
                action = "finished"
            if action != "again":
                # An element of another config must not count as an element of this sweep.
                compare(run, element.config)
            planned.append(Planned(run, element, action, now.word))
        return planned


def plan_sweep(
    request: SubmitRequest,
    sweep: SweepRequest,
    *,
    at_once: int | None = None,
    snapshot: bool = True,
    pack: int = 1,
) -> SweepPlan:
    """Return the plan for ``sweep`` over the config of ``request``.

    Args:
        at_once: elements that may run at the same time.
        snapshot: keep a copy of the code, one for all elements.
        pack: elements that share a node and its GPUs.

    Raises:
        UserError: an axis, a value or the config is wrong, or a single run has the name of the sweep.
    """
    elements = element_configs(request, sweep, expand(sweep))
    config = elements[0].config
    assert config.name is not None
    warn_of(config.job.env)
    folder = request.runs / config.name
    if RunDirectory(folder).exists():
        raise RunError(f"{folder}: is a single run; choose another --name for the sweep")
    check_command(config, Path.cwd())
    executor = submission.choose_executor(config)
    if executor == "debug":
        raise UserError(
            "--executor debug runs one rank in this process; run one element of the sweep with it, or use "
            "--executor local"
        )
    require_packages(config)
    if pack > 1:
        require_packable([element.config for element in elements], pack, at_once)
    say_idle(request, executor)
    return SweepPlan(folder, executor, elements, at_once, snapshot, pack)


def _axes(before: SweepFile, elements: Sequence[Element]) -> dict[str, list[Any]]:
    """Return each key with all its values, in the order in which the sweep got them."""
    axes = {key: list(values) for key, values in before.axes.items()}
    seen = {(key, canonical({"": value})) for key, values in axes.items() for value in values}
    for element in elements:
        for key, value in element.values.items():
            mark = (key, canonical({"": value}))
            if mark not in seen:
                seen.add(mark)
                axes.setdefault(key, []).append(value)
    return axes


MOST = 100_000
"""More elements than any cluster takes as one sweep."""


def expand(request: SweepRequest) -> list[Row]:
    """Return the rows of all elements; the keys of the last block change fastest.

    Raises:
        ConfigError: a key is in two blocks, two rows are equal, a condition is wrong, or no row is left.
    """
    _refuse_two_places(request)
    count = math.prod(len(block.rows) for block in request.blocks)
    if count > MOST:
        raise refusal("--sweep", "", f"{count} runs are more than {MOST}; use fewer values")
    rows = [
        _joined(parts) for parts in itertools.product(*(block.rows for block in request.blocks))
    ]
    for condition in request.conditions:
        expression = parsed(condition)
        rows = [row for row in rows if holds(condition, expression, row)]
    if not rows:
        raise refusal("--sweep", "", "no run is left; loosen the conditions under `where`")
    _refuse_equal(request, rows)
    return rows


def _refuse_two_places(request: SweepRequest) -> None:
    places: dict[str, str] = {}
    for block in request.blocks:
        for key in block.keys:
            if key in places:
                raise refusal(
                    block.place, key, f"{places[key]} has this key too; keep one of the two"
                )
            places[key] = block.place


def _joined(parts: tuple[Row, ...]) -> Row:
    return {key: value for part in parts for key, value in part.items()}


def _refuse_equal(request: SweepRequest, rows: list[Row]) -> None:
    seen: set[str] = set()
    for row in rows:
        found = canonical({key: given.value for key, given in row.items()})
        if found in seen:
            told = " ".join(f"{key}={text_of(given.value)}" for key, given in row.items())
            first = next(iter(row))
            raise refusal(request.place_of(first), told, "is given twice; remove one of the two")
        seen.add(found)


_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SHORT = 60


def parsed(condition: Condition) -> ast.expr:
    """Return the expression of ``condition``.

    Raises:
        ConfigError: the text is not an expression.
    """
    try:
        return ast.parse(condition.text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise refusal(
            condition.place,
            "where",
            f"{condition.text[:_SHORT]!r} is not an expression; write one such as train.lr < 1e-3",
        ) from None


def holds(condition: Condition, expression: ast.expr, row: Row) -> bool:
    """Return True if ``row`` meets the condition.

    Raises:
        ConfigError: the expression names a key that the sweep lacks, or contains an operation that is not
        allowed.
    """
    values = {key: given.value for key, given in row.items()}
    try:
        return bool(_value(expression, values))
    except _BadExpression as error:
        text = f"{condition.text[:_SHORT]!r}: {error}"
    except (TypeError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        text = f"{condition.text[:_SHORT]!r} cannot be computed: {error}"
    raise refusal(condition.place, "where", text)


class _BadExpression(Exception):
    """An expression that is not allowed; the text names its part."""


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute):
        return _key(node, values)
    if isinstance(node, ast.BoolOp):
        # As in Python, the second part is not evaluated if the first decides.
        both = all if isinstance(node.op, ast.And) else any
        return both(_value(part, values) for part in node.values)
    if isinstance(node, ast.UnaryOp):
        return _unary(node, values)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _computed(node, values)
    if isinstance(node, ast.Compare):
        return _compared(node, values)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part, values) for part in node.elts]
    raise _BadExpression(f"{ast.unparse(node)!r} is not allowed; use keys, values and comparisons")


def _unary(node: ast.UnaryOp, values: Mapping[str, Any]) -> Any:
    value = _value(node.operand, values)
    return not value if isinstance(node.op, ast.Not) else -value


def _computed(node: ast.BinOp, values: Mapping[str, Any]) -> Any:
    left, right = _value(node.left, values), _value(node.right, values)
    # 'a' * 10**9 would fill the memory.
    if not all(isinstance(side, int | float) for side in (left, right)):
        raise _BadExpression("only numbers can be added or multiplied")
    return _ARITHMETIC[type(node.op)](left, right)


def _compared(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _value(node.left, values)
    for kind, part in zip(node.ops, node.comparators, strict=True):
        if type(kind) not in _COMPARE:
            raise _BadExpression(f"{ast.unparse(node)!r} is not allowed; compare with == or !=")
        right = _value(part, values)
        if not _COMPARE[type(kind)](left, right):
            return False
        left = right
    return True


def _key(node: ast.Name | ast.Attribute, values: Mapping[str, Any]) -> Any:
    key = ast.unparse(node)
    if key not in values:
        raise _BadExpression(f"{key} is not a key of the sweep; its keys: {', '.join(values)}")
    return values[key]


def require_packable(configs: Sequence[Config], pack: int, at_once: int | None) -> None:
    """Return if ``pack`` runs with these configs can share one node.

    Args:
        at_once: the most runs at the same time; None: no limit.

    Raises:
        UserError: a run has several tasks or nodes, or commands to run before its ranks.
    """
    if at_once is not None and at_once < pack:
        raise UserError(f"--max-parallel {at_once}: is less than --pack {pack}; raise it")
    for job in {config.job.model_dump_json(): config.job for config in configs}.values():
        if (why := _unpackable(job)) is not None:
            raise UserError(f"--pack {pack}: {why}")


def shared_job(job: Job, pack: int, alone: Job | None = None) -> Job:
    """Return the request of the job that ``pack`` runs with the request ``job`` share.

    Args:
        alone: the request of a single run, if ``job`` is already the request of a shared job.
    """
    tasks = (alone or job).tasks_per_node if pack == 1 else pack
    return job.model_copy(update={"tasks_per_node": tasks})


def groups(numbers: Sequence[int], pack: int, at_once: int | None) -> list[tuple[list[int], int]]:
    """Return the elements with these numbers in groups, each with the number of runs that share a job.

    All jobs of an array have the same request, so the elements that do not fill a job get a separate array.
    With a limit (``at_once``) that array would wait for the end of the first, so there is only one group.
    """
    ordered = sorted(numbers)
    filling = len(ordered) - len(ordered) % pack
    if filling == 0:
        return [(ordered, len(ordered))]
    if filling == len(ordered) or at_once is not None:
        return [(ordered, pack)]
    return [(ordered[:filling], pack), (ordered[filling:], len(ordered) - filling)]


def _unpackable(job: Job) -> str | None:
    """Return the reason why runs with this request cannot share a job; None: they can."""
    if job.nodes != 1:
        return f"a packed run has one node, and job.nodes is {job.nodes}; use --nodes 1, or omit --pack"
    if job.launcher is not None:
        return f"a packed run has one task, and {job.launcher} starts several; omit one of the two"
    if job.tasks_on_node != 1:
        return (
            f"a packed run has one task, and the config requests {job.tasks_on_node}; use --gpus 1, or "
            "--tasks-per-node 1"
        )
    if job.gpu_request == "gpus-per-task":
        return "job.gpu_request=gpus-per-task gives no GPU to share; use gpus-per-node or gres"
    for key in ("preflight", "node_setup"):
        if getattr(job, key):
            return (
                f"job.{key} is for a whole job, and these runs share one; use job.setup, or omit it"
            )
    return None
