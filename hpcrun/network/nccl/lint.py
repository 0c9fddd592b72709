"""Lint of the environment of a job: each setting separately, and the settings together."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hpcrun.network.nccl.rules import (
    PARTLY_KNOWN,
    Combination,
    Level,
    Setting,
    Variable,
    concerns_nccl,
    effective,
    is_of_network,
    rules,
    version_key,
)
from hpcrun.network.nccl.values import (
    is_harmless,
    is_old_distance,
    number,
    padded,
    prefix_trap,
    shared_file,
    wrong_value,
)

ORDER: dict[Level, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class NcclFinding:
    """A statement about one setting. ``source``: key of the source in ``rules().sources``."""

    level: Level
    setting: Setting
    message: str
    source: str

    def as_record(self) -> dict[str, str | None]:
        """Return the finding as one flat JSON object, the source as an address."""
        return {
            "level": self.level,
            "name": self.setting.name,
            "value": self.setting.value,
            "where": self.setting.where,
            "message": self.message,
            "source": rules().sources[self.source],
        }


def by_severity(findings: list[NcclFinding]) -> list[NcclFinding]:
    """Return the findings without repetitions, errors first, then in the order of the names."""
    unique = {(one.setting.name, one.setting.where, one.message): one for one in findings}
    return sorted(unique.values(), key=lambda one: (ORDER[one.level], one.setting.name))


def lint(settings: Iterable[Setting], nccl: str | None = None) -> list[NcclFinding]:
    """Return the findings about ``settings``, errors first.

    Args:
        settings: in their order of execution. The last setting of a name counts, and each that is set for
            one command.
        nccl: the version of NCCL of the job; None means the newest that the rules know.
    """
    version = nccl or rules().newest
    listed = list(settings)
    last = effective(listed)
    lasting = effective(one for one in listed if not one.of_command)
    findings: list[NcclFinding] = []
    for setting in [*lasting.values(), *(one for one in listed if one.of_command)]:
        variable = rules().variables.get(setting.name)
        if variable is None:
            findings += _unknown(setting)
        else:
            findings += _known(setting, _applying(variable, version, last), version)
    return by_severity(findings + combined_findings(last, version) + _compared(last))


def _applying(variable: Variable, version: str, others: Iterable[str]) -> Variable:
    """Return ``variable`` with the remarks for this version, and its kind among the ``others``."""
    prefix, key = variable.system_with, version_key(version)
    remarks = tuple(one for one in variable.remarks if key >= version_key(one.since))
    kind = "system" if prefix and any(name.startswith(prefix) for name in others) else variable.kind
    return replace(variable, remarks=remarks, kind=kind)


def _unknown(setting: Setting) -> list[NcclFinding]:
    """Return the finding for a name that no library reads: an error if a similar name exists, else a warning.

    A network plugin may read further names. libfabric and gloo do: only a name with a letter too many or too
    few is reported for them.
    """
    if setting.name != setting.name.upper() and is_of_network(setting.name):
        words = f"no library reads this name: the case counts; write {setting.name.upper()}"
        return [NcclFinding("error", setting, words, "env")]
    if setting.name.startswith(PARTLY_KNOWN):
        near = difflib.get_close_matches(setting.name, rules().variables, n=1, cutoff=0.94)
        message = f"not a known variable; did you mean {''.join(near)}?"
        long = [name for name in near if len(name) != len(setting.name)]
        return [NcclFinding("warning", setting, message, "env") for _ in long]
    if not concerns_nccl(setting.name):
        return []
    near = difflib.get_close_matches(setting.name, rules().variables, n=1, cutoff=0.86)
    if near and rules().variables[near[0]].kind != "removed":
        message = f"no library reads this name; did you mean {near[0]}?"
        return [NcclFinding("error", setting, message, "env")]
    return [NcclFinding("warning", setting, "neither NCCL nor PyTorch reads this name", "env")]


def _known(setting: Setting, variable: Variable, version: str) -> list[NcclFinding]:
    unread = _not_read(setting, variable, version)
    if unread:
        return [unread]
    findings = [_renamed(setting, variable, version), _in_production(setting, variable)]
    if setting.value is not None:
        findings += _about_value(setting, variable, setting.value)
    return [finding for finding in findings if finding]


def _not_read(setting: Setting, variable: Variable, version: str) -> NcclFinding | None:
    """Return the finding that the job's version of the library does not read the variable, or None."""
    if variable.library == "unread":
        return _finding("error", setting, variable, "no library reads this name")
    if variable.library != "nccl":
        return None
    if variable.until and version_key(version) >= version_key(variable.until):
        return _finding("error", setting, variable, f"removed in NCCL {variable.until}")
    if variable.since and version_key(version) < version_key(variable.since):
        message = f"NCCL {version} does not read this name; NCCL {variable.since} does"
        return _finding("warning", setting, variable, message)
    return None


def _renamed(setting: Setting, variable: Variable, version: str) -> NcclFinding | None:
    if variable.deprecated is None:
        return None
    old = variable.library != "nccl" or version_key(version) >= version_key(variable.deprecated)
    if not old:
        return None
    of = "PyTorch" if variable.library == "torch" else "NCCL"
    message = f"an old spelling since {of} {variable.deprecated}"
    if variable.kind != "renamed" and variable.instead is None:
        message = f"deprecated since {of} {variable.deprecated}"
    return _finding("warning", setting, variable, message)


def _in_production(setting: Setting, variable: Variable) -> NcclFinding | None:
    """Return the finding that a debugging variable is set; at its default value it has no effect."""
    if setting.value == "":
        return None
    if variable.default is not None and setting.value == variable.default:
        return _finding("note", setting, variable, "is the default; the line has no effect")
    if variable.kind != "debugging" or variable.deprecated:
        return None
    message = "for debugging and tuning; remove it from production, or measure that it helps"
    return _finding("warning", setting, variable, message)


def _about_value(setting: Setting, variable: Variable, value: str) -> list[NcclFinding]:
    findings = []
    wrong = wrong_value(variable, value)
    if wrong:
        level: Level = "warning" if is_harmless(variable, value) else "error"
        findings.append(_finding(level, setting, variable, wrong))
    elif padded(value) and variable.choices and variable.library == "nccl":
        message = "has a blank at its begin or end, with which NCCL before 2.30 does not read it"
        findings.append(_finding("warning", setting, variable, message))
    if is_old_distance(variable, value):
        message = "a number means another distance in another version; write PIX, PXB, PHB or SYS"
        findings.append(_finding("warning", setting, variable, message))
    if trap := prefix_trap(variable, value):
        # Hosts with ten RDMA devices of one name are common, hosts with ten interfaces are not.
        level = "warning" if variable.type == "devices" else "note"
        findings.append(_finding(level, setting, variable, trap))
    if shared := shared_file(variable, value):
        findings.append(_finding("warning", setting, variable, shared))
    if value and not wrong:
        findings += _remarks(setting, variable, value)
    return findings


def _remarks(setting: Setting, variable: Variable, value: str) -> list[NcclFinding]:
    return [
        NcclFinding(remark.level, setting, remark.advice, remark.source)
        for remark in variable.remarks
        if "*" in remark.values or value.upper() in map(str.upper, remark.values)
    ]


def _finding(level: Level, setting: Setting, variable: Variable, message: str) -> NcclFinding:
    parts = [message]
    if variable.kind in ("removed", "renamed") or variable.deprecated:
        parts += [f"use {variable.instead}"] if variable.instead else []
        parts += [variable.advice] if variable.advice else []
    return NcclFinding(level, setting, "; ".join(parts), variable.source)


def combined_findings(settings: Mapping[str, Setting], version: str) -> list[NcclFinding]:
    """Return a finding for each combination that occurs in ``settings``, with this version of NCCL."""
    findings: list[NcclFinding] = []
    for rule in rules().combinations:
        if version_key(version) >= version_key(rule.since) and _holds(rule, settings):
            findings += [
                NcclFinding(rule.level, settings[name], rule.advice, rule.source)
                for name in _about(rule, settings)
            ]
    return findings


_MOST_SOCKETS = 64
_CHANNELS = ("CTAS", "NCHANNELS", "NRINGS")


def _compared(settings: Mapping[str, Setting]) -> list[NcclFinding]:
    """Return the findings about numbers that contradict each other."""

    def value(name: str) -> int | None:
        setting = settings.get(name)
        return None if setting is None or setting.value is None else number(setting.value)

    findings = []
    for name, setting in settings.items():
        if "_MIN_" not in name or name not in rules().variables:
            continue
        others = [name.replace("_MIN_", "_MAX_")]
        if name.removeprefix("NCCL_MIN_") in _CHANNELS:
            others = [f"NCCL_MAX_{kind}" for kind in _CHANNELS]
        low = value(name)
        for other in others:
            high = value(other)
            if low is not None and high is not None and low > high:
                message = f"is above {other}={high}; the least value has to be the lower one"
                findings.append(
                    NcclFinding("error", setting, message, rules().variables[name].source)
                )
    sockets, threads = value("NCCL_NSOCKS_PERTHREAD"), value("NCCL_SOCKET_NTHREADS")
    if sockets and threads and min(threads, 16) * sockets > _MOST_SOCKETS:
        message = (
            f"{threads} threads with {sockets} sockets each are more than {_MOST_SOCKETS} sockets: NCCL "
            f"lowers the number to {_MOST_SOCKETS // min(threads, 16)} each"
        )
        setting = settings["NCCL_NSOCKS_PERTHREAD"]
        findings.append(NcclFinding("warning", setting, message, "env"))
    return findings


def _about(rule: Combination, settings: Mapping[str, Setting]) -> list[str]:
    if not rule.about.endswith("*"):
        return [rule.about] if rule.about in settings else []
    prefix = rule.about.removesuffix("*")
    # Which network is used is no setting of that network.
    named = {*rule.when, "NCCL_IB_DISABLE"}
    return [name for name in settings if name.startswith(prefix) and name not in named]


def _holds(rule: Combination, settings: Mapping[str, Setting]) -> bool:
    return all(_meets(settings.get(name), condition) for name, condition in rule.when.items())


def _meets(setting: Setting | None, condition: str) -> bool:
    """Return True if a setting meets a condition; an unknown value meets only ``set``."""
    if condition == "unset":
        return setting is None
    if condition == "!=1" and setting is None:
        return True
    if setting is None or setting.value == "":
        return False
    if condition == "set":
        return True
    return setting.value is not None and _matches(setting.value, condition)


def _matches(value: str, condition: str) -> bool:
    if condition.startswith("!="):
        return value.lower() != condition[2:].lower()
    if condition.startswith("="):
        return value.lower() == condition[1:].lower()
    if condition.startswith("has:"):
        excluded = value.startswith("^") or ":^" in value
        words = value.lower().replace(";", ",").replace(":", ",").replace(" ", ",").split(",")
        return not excluded and condition[4:].lower() in words
    found = number(value)
    if found is None:
        return False
    limit = int(condition[1:])
    return found > limit if condition[0] == ">" else found < limit
