"""What every part of the config is made of: immutable, and no key that it does not know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the config: immutable, and no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class TaskSection(BaseModel):
    """A part of the config whose further keys belong to the task, which checks them itself."""

    model_config = ConfigDict(frozen=True, extra="allow", defer_build=True)

    @property
    def own(self) -> dict[str, Any]:
        """The keys that belong to the task, without those of the section itself."""
        return dict(self.model_extra or {})
