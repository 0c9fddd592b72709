"""Checks of several settings together."""

from collections.abc import Mapping

from hpcrun.network.nccl.lint.findings import NcclFinding
from hpcrun.network.nccl.rules import Combination, rules
from hpcrun.network.nccl.settings import Setting
from hpcrun.network.nccl.values import number
from hpcrun.network.nccl.versions import version_key


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


def _about(rule: Combination, settings: Mapping[str, Setting]) -> list[str]:
    if not rule.about.endswith("*"):
        return [rule.about] if rule.about in settings else []
    prefix = rule.about.removesuffix("*")
    named = set(rule.when)
    return [name for name in settings if name.startswith(prefix) and name not in named]


def _holds(rule: Combination, settings: Mapping[str, Setting]) -> bool:
    for name, condition in rule.when.items():
        if not _meets(settings.get(name), condition):
            return False
    return _relates(rule.relation, settings) if rule.relation else True


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


def _relates(relation: Mapping[str, object], settings: Mapping[str, Setting]) -> bool:
    names = relation.get("product") or relation.get("greater")
    assert isinstance(names, list)
    values = [number(settings[name].value or "") if name in settings else None for name in names]
    first, second = values
    if first is None or second is None:
        return False
    if "product" in relation:
        above = relation["above"]
        assert isinstance(above, int)
        return first * second > above
    return first > second
