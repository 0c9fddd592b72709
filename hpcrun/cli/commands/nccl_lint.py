"""`hpcrun nccl lint`: read the settings from an environment, script or config, and print what is wrong."""

import argparse
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcrun.cli.arguments import find_run_instead, runs_dir
from hpcrun.cli.output import print_json
from hpcrun.config.layers import file_layer
from hpcrun.errors import UserError
from hpcrun.network.nccl.lint import (
    NcclFinding,
    by_severity,
    export_findings,
    lint,
    settings_of_script,
)
from hpcrun.network.nccl.rules import Setting, installed_nccl, is_version, rules, settings_of
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory

_CONFIGS = (".yaml", ".yml", ".json")
_MOST_BYTES = 1 << 20


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; return 1 if a finding is an error."""
    version: str | None = arguments.nccl
    if version is not None and not is_version(version):
        raise UserError(f"--nccl {version}: should be a version such as 2.27.5")
    version = version or installed_nccl()
    settings, of_exports, name = _settings(arguments)
    findings = by_severity(of_exports + lint(settings, version))
    if not (arguments.notes or arguments.json):
        findings = [finding for finding in findings if finding.level != "note"]
    errors = sum(finding.level == "error" for finding in findings)
    if arguments.json:
        known = [one.as_record() for one in findings]
        print_json({"checked": name, "nccl": version or rules().newest, "findings": known})
    else:
        _print(findings, name, version)
    return int(errors > 0)


def _settings(arguments: argparse.Namespace) -> tuple[list[Setting], list[NcclFinding], str]:
    """Return the settings, the findings about ``--export`` lists, and the name of the checked source."""
    target: str | None = arguments.target
    if target is None:
        return settings_of(os.environ, "environment"), [], "the environment"
    path = Path(target)
    if path.is_file() and path.suffix.lower() in _CONFIGS:
        layer = file_layer(path)
        return *_of_job(layer.values.get("job"), layer.where, str(path)), str(path)
    if path.is_file():
        text = _read(path)
        return settings_of_script(text, target), export_findings(text, target), target
    directory = find_run_instead(target, runs_dir(arguments), "no such file")
    return *_of_run(directory), directory.name


def _read(path: Path) -> str:
    if path.stat().st_size > _MOST_BYTES:
        raise UserError(f"{path}: is larger than 1 MiB; name a script or a config")
    return path.read_text(encoding="utf-8", errors="replace")


def _of_run(directory: RunDirectory) -> tuple[list[Setting], list[NcclFinding]]:
    layer = file_layer(directory.config)
    return _of_job(layer.values.get("job"), layer.where, directory.config.name)


def _of_job(
    job: Any, where: Mapping[str, str], name: str
) -> tuple[list[Setting], list[NcclFinding]]:
    """Return the settings of a config's ``job:`` section: first the lines of ``setup``, then ``env``."""
    if not isinstance(job, Mapping):
        return [], []
    setup = _texts(job.get("setup"))
    script = "\n".join(setup)
    settings = settings_of_script(script, "job.setup")
    exports = export_findings(" ".join(_texts(job.get("srun_args"))), "job.srun_args")
    exports += export_findings(" ".join(_texts(job.get("sbatch_args"))), "job.sbatch_args")
    env = job.get("env")
    for key, value in env.items() if isinstance(env, Mapping) else ():
        settings.append(Setting(str(key), str(value), where.get(f"job.env.{key}", name)))
    return settings, exports


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values] if isinstance(values, list) else []


def _print(findings: Iterable[NcclFinding], name: str, version: str | None) -> None:
    findings = list(findings)
    for finding in findings:
        shown = finding.setting
        value = "" if shown.value is None else f"={shown.value}"
        say(f"{shown.where}: {finding.level}: {shown.name}{value}: {finding.message}")
    if findings:
        say("", "sources:")
        for address in sorted({rules().sources[finding.source] for finding in findings}):
            say(f"  {address}")
    counts = [
        f"{number} {level}{'s' if number != 1 else ''}"
        for level in ("error", "warning", "note")
        if (number := sum(finding.level == level for finding in findings))
    ]
    known = version or f"{rules().newest}, the newest known"
    say_aside(f"hpcrun: {name}: {', '.join(counts) or 'nothing is wrong'} (NCCL {known})")
