"""Start the estimate in a separate process, and read its answer. Imports no torch."""

import json
import os
import subprocess
import sys
from typing import Any

from hpcrun.config import Config
from hpcrun.errors import UserError

REFUSED = 2
"""Exit code of the process after it refused a config or a task."""


class EstimateRefused(UserError):
    """A config or a task that cannot be estimated: one line for each reason."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("; ".join(lines))
        self._lines = lines

    @property
    def lines(self) -> list[str]:
        """One line for each problem."""
        return self._lines


def estimate(config: Config, memory: int) -> dict[str, Any]:
    """Return the memory of a rank under ``config`` on GPUs of ``memory`` bytes.

    Raises:
        UserError: the config or its task cannot be estimated.
    """
    request = json.dumps({"config": config.model_dump(mode="json"), "memory": memory})
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun.estimate"],
        input=request,
        stdout=subprocess.PIPE,
        text=True,
        # Hide the GPUs of this machine.
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""},
        check=False,
    )
    if done.returncode not in (0, REFUSED):
        raise UserError(
            f"estimate: the fake run ended with exit code {done.returncode}; the lines above have the reason"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    if done.returncode == REFUSED:
        raise EstimateRefused(answer["refused"])
    return answer
