"""A warning about NCCL's variables before a job waits in the queue with them."""

import os
from collections.abc import Mapping

from hpcrun.network.nccl.settings import PARTLY_KNOWN, concerns_nccl, settings_of
from hpcrun.printing import say_aside


def warn_of(env: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> None:
    """Print one line for each error in ``job.env`` and in the submitting shell, and count the warnings.

    A shell's variables reach the job through sbatch; ``job.env`` replaces variables of the same name.
    """
    settings = [setting for setting in settings_of(environ, "shell") if _ours(setting.name)]
    settings += [setting for setting in settings_of(env, "job.env") if _ours(setting.name)]
    if not settings:
        return
    from hpcrun.network.nccl.lint.lint import lint

    findings = [finding for finding in lint(settings) if finding.level != "note"]
    for finding in findings:
        if finding.level == "error":
            shown = finding.setting
            say_aside(f"hpcrun: {shown.where}: {shown.name}={shown.value}: {finding.message}")
    warnings = [finding.setting.name for finding in findings if finding.level == "warning"]
    if warnings:
        names = ", ".join(dict.fromkeys(warnings))
        say_aside(f"hpcrun: look at {names}: `hpcrun nccl lint` says why")


def _ours(name: str) -> bool:
    return concerns_nccl(name) or name.startswith(PARTLY_KNOWN)
