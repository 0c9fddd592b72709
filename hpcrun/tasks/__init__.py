"""Names of the built-in tasks; imports no torch.

Submitting checks a task's own options before any process starts, and must not import torch for that: a task
is a path until a worker builds it, and its options are sections of the config.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpcrun.config.section import Section

BUILTIN: dict[str, str] = {
    "language-model": "hpcrun.tasks.language_model:LanguageModel",
    "token-model": "hpcrun.tasks.token_model:TokenModel",
    "classifier": "hpcrun.tasks.classifier:Classifier",
    "autoencoder": "hpcrun.tasks.autoencoder:Autoencoder",
}
"""Short name -> ``module:Class`` of every built-in task."""

OPTIONS: dict[str, str] = {
    "language-model": "hpcrun.tasks.options.language_model:LANGUAGE_MODEL",
    "token-model": "hpcrun.tasks.options.token_model:TOKEN_MODEL",
    "classifier": "hpcrun.tasks.options.digits:CLASSIFIER",
    "autoencoder": "hpcrun.tasks.options.digits:AUTOENCODER",
}
"""Short name -> ``module:NAME`` of its pair of option models, for ``model`` and for ``data``."""


def options_for(task: str) -> tuple[type[Section], type[Section]] | None:
    """Return the models of a task's own ``model`` and ``data`` keys, or None for a user's task.

    ``task`` is a short name, or the ``module:Class`` path of a built-in task. Imports no torch.
    """
    for short, path in BUILTIN.items():
        if task in (short, path):
            module, _, name = OPTIONS[short].partition(":")
            model, data = getattr(importlib.import_module(module), name)
            return model, data
    return None
