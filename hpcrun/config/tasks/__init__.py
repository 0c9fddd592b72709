"""Names of the built-in tasks; imports no torch.

Submitting checks a task's own options before any process starts, and must not import torch for that: a task
is a path until a worker builds it, and its options are sections of the config.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrun.config.fields import Section

BUILTIN: dict[str, str] = {
    "language-model": "hpcrun.tasks.language_model:LanguageModel",
}
"""Short name -> ``module:Class`` of every built-in task."""


def options_for(task: str) -> tuple[type[Section], type[Section]] | None:
    """Return the models of a task's own ``model`` and ``data`` keys, or None for a user's task.

    ``task`` is a short name, or the ``module:Class`` path of a built-in task. Imports no torch.
    """
    if not any(task in names for names in BUILTIN.items()):
        return None
    from hpcrun.config.tasks.language_model import LanguageModelData, LanguageModelShape

    return LanguageModelShape, LanguageModelData
