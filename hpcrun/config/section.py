"""Base classes of the config's sections."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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


_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


@contextmanager
def without_plugins() -> Iterator[None]:
    """Build validators without pydantic's plugins inside the block.

    The search for plugins reads the metadata of every installed package, which is slow on a shared file
    system. Source: ``pydantic.plugin``.
    """
    before = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = before
