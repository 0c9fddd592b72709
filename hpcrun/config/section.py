"""Base classes of the config's sections."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class TaskSection(BaseModel):
    """A section of the config with further keys, which the task defines and checks."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    @property
    def own(self) -> dict[str, Any]:
        """Values of the keys that belong to the task, without those of the section itself."""
        return dict(self.model_extra or {})
