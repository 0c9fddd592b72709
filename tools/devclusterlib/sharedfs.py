"""The file system that all hosts share, mounted at one path on each."""

from __future__ import annotations

from .errors import Refusal
from .layout import Layout
from .spec import ClusterSpec
from .users import Account


def mount(layout: Layout, spec: ClusterSpec, account: Account) -> None:
    """Mount the shared directory on every host; ``local`` needs nothing, all hosts see the disk."""
    if spec.shared_fs != "local":
        raise Refusal(f"--shared-fs {spec.shared_fs}", "take local")
