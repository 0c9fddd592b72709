"""Separate program, because it imports torch: reads a request on standard input, writes the result.

Everything that a task prints goes to standard error, so that standard output has the result only.
"""

import json
import os
import sys
import time
import warnings
from dataclasses import asdict
from typing import Any

from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.estimate.result import REFUSED, needed
from hpcrun.exit_codes import INTERRUPTED
from hpcrun.printing import say_aside


def main() -> int:
    """Answer the request on standard input and return the exit code."""
    answers = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    code = 0
    try:
        config = Config.model_validate(request["config"])
        answer = estimate(config, request["memory"], request["gpu"])
    except UserError as error:
        answer, code = {"refused": str(error)}, REFUSED
    # A task may call sys.exit().
    except (Exception, SystemExit) as error:
        if os.environ.get("HPCRUN_TRACEBACK"):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        reported = f"task: {request['config']['task']}: the fake run raised {reason}"
        answer, code = {"refused": f"{reported} (HPCRUN_TRACEBACK=1 shows the traceback)"}, REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    with os.fdopen(answers, "w") as stream:
        json.dump(answer, stream)
    return code


def estimate(config: Config, memory: int, gpu: str) -> dict[str, Any]:
    """Return the memory of a rank under ``config``, and advice if it does not fit ``memory`` bytes."""
    from hpcrun.checkpoint.state.generators import seed_all
    from hpcrun.estimate.fake_run import trace
    from hpcrun.train.health.out_of_memory import advice
    from hpcrun.train.parallel.choose import with_fsdp
    from hpcrun.train.task import load_task

    begun = time.monotonic()
    seed_all(config.seed)
    ranks = config.job.min_nodes * config.job.tasks_on_node
    # The user's task, as in the ranks.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    task = load_task(config)
    _tell(f"a step of {'one rank' if ranks == 1 else f'one of {ranks} ranks'} on fake tensors")
    found = trace(task, config, memory, _tell, gpu=gpu)
    resolved = with_fsdp(config, shard=found.shard, reshard_after_forward=found.reshards)
    fits: bool | None = needed(found.peak) <= memory
    if fits and not found.with_data:
        fits = None
    return {
        **asdict(found),
        "needed": needed(found.peak),
        "fits": fits,
        "advice": list(advice(resolved, found.parallel, ranks)) if fits is False else [],
        "seconds": round(time.monotonic() - begun, 1),
    }


def _tell(line: str) -> None:
    say_aside(f"hpcrun: estimate: {line}")


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    # Skip the interpreter shutdown, in which a fake process group may hang.
    os._exit(code)
