"""Advice as a table, as shell exports, as YAML for ``job.env`` and as JSON data."""

import json
from collections.abc import Sequence
from typing import Any

from hpcrun.network.nccl.advice.advise import Advice
from hpcrun.slurm.environment import export_lines

NOTHING = "nothing to set: NCCL's own choices fit this node"


def as_shell(lines: Sequence[Advice]) -> str:
    """Return one quoted ``export`` per setting, with its reason in a comment; remarks are comments too."""
    text = []
    for line in lines:
        record = line.as_record()
        text.append(f"# {_one_line(record['reason'])} [{record['source']}]")
        if line.name is not None and line.value is not None:
            text += export_lines({line.name: line.value})
    return "\n".join(text or [f"# {NOTHING}"]) + "\n"


def as_yaml(lines: Sequence[Advice]) -> str:
    """Return the settings as a config's ``job: env:``, the reasons as comments."""
    settings = [line for line in lines if line.name is not None]
    text = [f"# {_one_line(line.reason)}" for line in lines if line.name is None]
    text += ["job:", "  env:" if settings else "  env: {}"]
    for line in settings:
        # Every JSON string is a valid YAML string.
        text += [f"    # {_one_line(line.reason)}", f"    {line.name}: {json.dumps(line.value)}"]
    return "\n".join(text) + "\n"


def as_table(lines: Sequence[Advice]) -> str:
    """Return a block for each setting or remark: the setting, the reason, the source."""
    if not lines:
        return NOTHING + "\n"
    text = []
    for line in lines:
        record = line.as_record()
        text.append(f"{line.name}={line.value}" if line.name is not None else "look at this node")
        text += [f"    why     {record['reason']}", f"    source  {record['source']}"]
    return "\n".join(text) + "\n"


def as_data(lines: Sequence[Advice]) -> dict[str, Any]:
    """Return the settings and the remarks as plain data."""
    records = [line.as_record() for line in lines]
    return {
        "set": [record for record in records if record["name"] is not None],
        "remarks": [record for record in records if record["name"] is None],
    }


def _one_line(reason: str | None) -> str:
    """Return ``reason`` on one line: a line break in recorded facts would end a comment."""
    return " ".join((reason or "").split())
