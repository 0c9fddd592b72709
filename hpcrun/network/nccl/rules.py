"""The rules about variables, read from the data files of this package."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter

Level = Literal["error", "warning", "note"]

_FOLDER = Path(__file__).with_name("rules")
_LIBRARIES = ("nccl", "plugins", "libfabric", "torch", "rccl", "unread")


@dataclass(frozen=True)
class Remark:
    """A statement about particular values of a variable; ``*`` means every value.

    ``since``: the version of the library from which the statement is true.
    """

    values: tuple[str, ...]
    level: Level
    advice: str
    source: str
    since: str = "0"


@dataclass(frozen=True)
class Variable:
    """A variable that a library reads, used to read, or never read. The data file explains the fields."""

    name: str
    library: str
    kind: str
    source: str
    since: str | None = None
    until: str | None = None
    deprecated: str | None = None
    instead: str | None = None
    type: str | None = None
    choices: tuple[str, ...] = ()
    min: int | None = None
    max: int | None = None
    default: str | None = None
    form: str | None = None
    wrong: str | None = None
    harmless: bool = False
    advice: str | None = None
    system_with: str | None = None
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class Combination:
    """Settings that conflict, or have no effect without each other. ``since``: from this NCCL on."""

    about: str
    level: Level
    advice: str
    source: str
    when: Mapping[str, str] = field(default_factory=dict)
    since: str = "0"


@dataclass(frozen=True)
class Rules:
    """Everything in the data files. ``newest``: the version of NCCL that the rules were written for."""

    variables: Mapping[str, Variable]
    combinations: tuple[Combination, ...]
    sources: Mapping[str, str]
    newest: str


@functools.cache
def rules() -> Rules:
    """Return the rules of this package; the files are read once."""
    data = _read("variables.yaml")
    entries = [entry | {"library": name} for name in _LIBRARIES for entry in data[name]]
    variables = {one.name: one for one in TypeAdapter(list[Variable]).validate_python(entries)}
    combinations = TypeAdapter(tuple[Combination, ...]).validate_python(_read("combinations.yaml"))
    return Rules(variables, combinations, data["sources"], data["newest"]["nccl"])


def _read(name: str) -> Any:
    # The parser in C takes a tenth of the time, and some builds of PyYAML lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((_FOLDER / name).read_text(encoding="utf-8"), loader)


PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "RCCL_", "OFI_NCCL_")
"""The prefixes of libraries that the rules know completely."""
PARTLY_KNOWN = ("GLOO_", "FI_", "TORCH_DISTRIBUTED_")
"""The prefixes of libraries that read further variables."""
# Variables of network, tuner and profiler plug-ins: Google's, then NVIDIA's.
_OF_PLUGINS = (
    *("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_", "NCCL_SHIMNET_", "NCCL_TUNER_CONFIG_PATH"),
    *("NCCL_INSPECTOR_", "NCCL_PROFILE", "NCCL_RESHARD_", "NCCL_EP_", "NCCL_SHARP_", "NCCL_UCX_"),
)
# Variables of builds and scripts, which say where NCCL is.
_OF_BUILDS = re.compile(
    r"R?NCCL_(HOME|ROOT|ROOT_DIR|DIR|PATH|PREFIX|INSTALL\w*|INCLUDE\w*|LIB|LIBS|LIB_DIR|LIBRARY\w*|VERSION\w*"
    r"|SRC\w*|SOURCE\w*|BUILD\w*|TESTS?\w*|PKG\w*|PACKAGE\w*|TAG|BRANCH|COMMIT|ARGS|OPTIONS)"
)
_FURTHER = (*("UCX_", "SHARP_", "TP_SOCKET", "RDMAV_", "HSA_", "MLX5_", "IBV_"), "HCOLL_")


@dataclass(frozen=True)
class Setting:
    """One variable. ``value`` is None if only the shell of the job knows it.

    ``of_command``: set for one command, so that a later setting does not replace it.
    """

    name: str
    value: str | None
    where: str
    of_command: bool = False


def settings_of(environ: Mapping[str, str], where: str) -> list[Setting]:
    """Return a setting for each variable of ``environ``, in the order of the names."""
    return [Setting(name, environ[name], where) for name in sorted(environ)]


def effective(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Return the last setting of each name: the setting that the job sees."""
    return {setting.name: setting for setting in settings}


def concerns_nccl(name: str) -> bool:
    """Return True for a name of NCCL, RCCL or PyTorch's NCCL process group, but not of a plug-in or build."""
    own = name.startswith(PREFIXES) and not name.startswith(_OF_PLUGINS)
    return own and not _OF_BUILDS.fullmatch(name)


def is_of_network(name: str) -> bool:
    """Return True for a variable of NCCL, RCCL, PyTorch, gloo, libfabric, UCX or a plug-in.

    Known names count in any case; other names in lower case are variables of the script.
    """
    families = (*PREFIXES, *PARTLY_KNOWN, *_FURTHER)
    if name.startswith(families) and not _OF_BUILDS.fullmatch(name):
        return True
    return name.upper() in rules().variables


_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def version_key(text: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparing: ``2.30.7-1`` becomes (2, 30, 7)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("-")[0].split("+")[0]))


def is_version(text: str) -> bool:
    """Return True if ``text`` is a version such as 2.27 or 2.27.5."""
    return re.fullmatch(r"\d+\.\d+(\.\d+)?(-\d+)?", text) is not None


def installed_nccl() -> str | None:
    """Return the version of the NCCL wheel of this Python; None if there is none."""
    for wheel in _WHEELS:
        try:
            return metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    return None
