"""Base classes of the config's sections: immutable pydantic models."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section of the config: immutable, without unknown keys.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskSection(Section):
    """A section of the config with further keys, which the task defines and checks."""

    model_config = ConfigDict(extra="allow")

    @property
    def own(self) -> dict[str, Any]:
        """Values of the keys that belong to the task, without those of the section itself."""
        return dict(self.model_extra or {})
