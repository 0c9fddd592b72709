"""Findings: statements about settings, as text and as JSON."""

from dataclasses import dataclass

from hpcrun.network.nccl.rules import Level, rules
from hpcrun.network.nccl.settings import Setting

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
