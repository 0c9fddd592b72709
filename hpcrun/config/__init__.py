"""The configuration: schema, YAML/JSON files, overrides, and messages that name the remedy.

Imports no torch, so that every command that does not train answers immediately.
"""

from hpcrun.config.compare import (
    all_differences,
    changed_ways,
    changes_since,
    decay_begins,
    differing,
    lengths_left,
    parallelism,
    recorded,
    training_differences,
)
from hpcrun.config.config import (
    Config,
    flag_layer,
    idle_lines,
    load_resolved,
    locate,
    override_layer,
    resolve,
    with_task_options,
)
from hpcrun.config.fields import check_name
from hpcrun.config.problems import ConfigError, Problem
from hpcrun.config.reader import Layer, file_layer
from hpcrun.config.schema import Checkpoint, Job, Restarts, submit_options
from hpcrun.config.training import (
    FSDP,
    AMPConfig,
    ModelOptions,
    Train,
    Watch,
)
from hpcrun.config.writer import (
    has_secrets,
    hidden_values,
    json_schema,
    masked,
    masked_values,
    masked_words,
    script_yaml,
    to_yaml,
)

__all__ = [
    "FSDP",
    "AMPConfig",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Job",
    "Layer",
    "ModelOptions",
    "Problem",
    "Restarts",
    "Train",
    "Watch",
    "all_differences",
    "changed_ways",
    "changes_since",
    "check_name",
    "decay_begins",
    "differing",
    "file_layer",
    "flag_layer",
    "has_secrets",
    "hidden_values",
    "idle_lines",
    "json_schema",
    "lengths_left",
    "load_resolved",
    "locate",
    "masked",
    "masked_values",
    "masked_words",
    "override_layer",
    "parallelism",
    "recorded",
    "resolve",
    "script_yaml",
    "submit_options",
    "to_yaml",
    "training_differences",
    "with_task_options",
]
