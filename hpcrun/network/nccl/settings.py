"""An environment variable with its value and the place of the setting."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "RCCL_", "OFI_NCCL_")
"""The prefixes of libraries that the rules know completely."""
PARTLY_KNOWN = ("GLOO_", "FI_", "TORCH_DISTRIBUTED_")
"""The prefixes of libraries that read further variables."""
_OF_GOOGLE = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_SHIMNET_")


@dataclass(frozen=True)
class Setting:
    """One variable. ``value`` is None if only the shell of the job knows it."""

    name: str
    value: str | None
    where: str


def settings_of(environ: Mapping[str, str], where: str) -> list[Setting]:
    """Return a setting for each variable of ``environ``, in the order of the names."""
    return [Setting(name, environ[name], where) for name in sorted(environ)]


def effective(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the last setting of each name: the setting that the job sees."""
    return {setting.name: setting for setting in settings}


def concerns_nccl(name: str) -> bool:
    """Return True for a name of NCCL, RCCL or PyTorch's NCCL process group, but not of Google's plugins."""
    return name.startswith(PREFIXES) and not name.startswith(_OF_GOOGLE)
