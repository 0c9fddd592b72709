"""Submission of a sweep or a search from Python."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hpcrun.api.functions import function_call
from hpcrun.api.submission.choose_config import SubmitRequest
from hpcrun.api.submission.submitting import submit
from hpcrun.api.sweeps.handle import Sweep
from hpcrun.api.sweeps.handover import submit_sweep
from hpcrun.api.sweeps.plan import plan_sweep
from hpcrun.api.sweeps.request import sweep_request
from hpcrun.api.sweeps.study import plan_study, run_study
from hpcrun.errors import UserError
from hpcrun.printing import say_aside


def submit_several(
    request: SubmitRequest,
    sweep: Mapping[str, Iterable[object]] | None,
    sweep_file: str | os.PathLike[str] | None,
) -> Sweep:
    """Submit the runs of a sweep, or run a search to its end; the arguments are those of `hpcrun.submit`.

    Raises:
        UserError: as `hpcrun.submit`.
    """
    wish = sweep_request(sweep, sweep_file)
    if wish.search is not None:
        study, _ = plan_study(request, wish.search)
        run_study(study, lambda line: say_aside(f"hpcrun: {line}"))
        return Sweep(study.folder)
    plan = plan_sweep(request, wish)
    submit_sweep(plan)
    return Sweep(plan.folder)


def map_array(
    function: Callable[..., object], *iterables: Iterable[object], **options: object
) -> Sweep:
    """Submit a run for each call of ``function``, as ``map(function, *iterables)`` makes them.

    On Slurm the runs are a job array. The sweep yields a run for each call, in the order of the calls:
    ``[run.result() for run in map_array(train, [1, 2, 3], gpus=1)]``. The same call again submits what is
    missing or failed.

    Args:
        function: a function that cloudpickle can pickle.
        iterables: the values of each positional argument, all with the same length.
        options: as for :func:`submit`, with ``max_parallel`` and ``only_new``.

    Raises:
        UserError: the iterables are empty or differ in length; or as :func:`submit`.
    """
    try:
        calls = [*zip(*iterables, strict=True)]
    except ValueError as error:
        raise UserError(
            "map_array: the iterables differ in length; give one value per call"
        ) from error
    if not calls:
        raise UserError("map_array: there are no calls; give at least one value")
    call = function_call(function, calls, "{index}")
    if unused := {"task", "command"} & options.keys():
        raise UserError(f"{min(unused)}=: is not for a function; omit it")
    options.setdefault("name", f"{call.name}-{call.digest[:6]}")
    every: Any = {**options, "command": call, "sweep": {"index": range(len(calls))}}
    found: Sweep = submit(**every)
    return found
