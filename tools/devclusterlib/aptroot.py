"""Packages of Debian's later suites through a private apt.

The system's apt does not change. Only the address of its mirror and the keys of its archive are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .commands import attempt
from .errors import CommandFailed, Unavailable

SYSTEM_SOURCES = Path("/etc/apt")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
# Debian's names for its suites, the most stable one first. They stay when releases come and go.
SUITES = ("stable", "testing", "unstable", "stable-backports", "experimental")
PATIENCE_S = 540.0


@dataclass(frozen=True)
class Mirror:
    """A mirror of Debian packages: its URI and the file with the keys that sign its suites."""

    uri: str
    keys: str


def source_texts(folder: Path = SYSTEM_SOURCES) -> list[str]:
    """Return the machine's apt sources: the deb822 files and the one-line files, each as text."""
    files = [folder / "sources.list", *sorted(folder.glob("sources.list.d/*"))]
    wanted = (".list", ".sources")
    return [path.read_text() for path in files if path.suffix in wanted and path.is_file()]


def find_mirror(texts: Iterable[str], codename: str) -> Mirror:
    """Return the mirror with the machine's own release ``codename``.

    Other entries (security updates, other vendors) do not have Debian's later suites.

    Raises `Unavailable` if no entry has the release.
    """
    for text in texts:
        for mirror, suites in (*deb822_entries(text), *one_line_entries(text)):
            if codename in suites:
                return mirror
    raise Unavailable(
        f"the apt sources of this machine name no mirror with Debian's {codename or 'release'}",
        f"add one below {SYSTEM_SOURCES}; other versions of Slurm come from Debian's later suites",
    )


def deb822_entries(text: str) -> list[tuple[Mirror, list[str]]]:
    """Return mirror and suites of each enabled stanza of a ``.sources`` file."""
    entries = []
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields = {
            key.lower(): " ".join(value.split())
            for key, value in re.findall(r"^([A-Za-z-]+):((?:.*)(?:\n[ \t].*)*)", stanza, re.M)
        }
        usable = "deb" in fields.get("types", "").split() and fields.get("uris")
        if usable and fields.get("enabled", "yes").lower() not in ("no", "false", "0"):
            mirror = Mirror(fields["uris"].split()[0], key_file(fields.get("signed-by", "")))
            entries.append((mirror, fields.get("suites", "").split()))
    return entries


def one_line_entries(text: str) -> list[tuple[Mirror, list[str]]]:
    """Return mirror and suite of each line of a ``sources.list`` file."""
    found = re.findall(r"^\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)", text, re.M)
    entries = []
    for options, uri, suite in found:
        signed = re.search(r"signed-by=(\S+)", options)
        entries.append((Mirror(uri, key_file(signed[1] if signed else "")), [suite]))
    return entries


def key_file(signed_by: str) -> str:
    """Return the file of Signed-By; Debian's keyring if Signed-By is missing or holds the key itself."""
    return signed_by if re.fullmatch(r"/\S+", signed_by) else KEYRING


def release_codename(text: str) -> str:
    """Return VERSION_CODENAME from /etc/os-release, "" if it is missing."""
    found = re.search(r'^VERSION_CODENAME="?([a-z-]+)', text, re.M)
    return found[1] if found else ""


def system_mirror() -> Mirror:
    """Return this machine's Debian mirror; raises `Unavailable` without a mirror or its keys."""
    mirror = find_mirror(source_texts(), release_codename(Path("/etc/os-release").read_text()))
    if not Path(mirror.keys).is_file():
        raise Unavailable(
            f"the keys {mirror.keys} are not there, packages of later suites cannot be verified",
            "install debian-archive-keyring",
        )
    return mirror


def parse_candidate(text: str) -> str:
    """Return the version that `apt-cache policy PACKAGE` would install, "" for none."""
    found = re.search(r"^ +Candidate: (\d\S*)$", text, re.M)
    return found[1] if found else ""


class AptRoot:
    """A private apt below ``folder`` with one suite of ``mirror`` and no installed package.

    Because no package is installed, apt downloads all dependencies, including the C library.
    """

    def __init__(self, folder: Path, mirror: Mirror, suite: str, env: dict[str, str]) -> None:
        self.folder = folder
        self.env = env
        for name in ("lists/partial", "archives/partial"):
            (folder / name).mkdir(parents=True)
        (folder / "status").touch()
        (folder / "suite.sources").write_text(
            f"Types: deb\nURIs: {mirror.uri}\nSuites: {suite}\nComponents: main\n"
            f"Signed-By: {mirror.keys}\n"
        )

    def options(self) -> list[str]:
        """Return the options that move every path of apt below this root."""
        settings = {
            "Dir::Etc::sourcelist": f"{self.folder}/suite.sources",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": str(self.folder),
            "Dir::State::lists": f"{self.folder}/lists",
            "Dir::State::status": f"{self.folder}/status",
            "Dir::Cache": str(self.folder),
            "Dir::Cache::archives": f"{self.folder}/archives",
            "APT::Install-Recommends": "0",
            # A system hook of `apt-get update` would change the system's lists.
            "APT::Update::Post-Invoke-Success": "",
            "APT::Update::Error-Mode": "any",
        }
        return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]

    def update(self) -> str:
        """Download the suite's lists; return "" or apt's error message."""
        return self.fetch("update")

    def fetch(self, *words: str) -> str:
        """Run `apt-get` with ``words``; return "" or apt's error message."""
        command = ["apt-get", *self.options(), "--quiet", *words]
        try:
            done = attempt(command, env=self.env, timeout=PATIENCE_S)
        except CommandFailed as error:
            return error.words
        return "" if done.returncode == 0 else last_error(done.stderr)

    def candidate(self, package: str) -> str:
        """Return the version of ``package`` in the suite, "" if the suite does not have it."""
        command = ["apt-cache", *self.options(), "policy", package]
        return parse_candidate(attempt(command, env=self.env).stdout)

    def download(self, packages: Iterable[str]) -> list[Path]:
        """Download and verify ``packages`` with all dependencies; return the files.

        Raises `Unavailable` with apt's error message.
        """
        failure = self.fetch("--yes", "--download-only", "install", *packages)
        if failure:
            raise Unavailable(
                f"the packages cannot be fetched: {failure}",
                "repair the network or the apt sources, then run it again",
            )
        return sorted(self.folder.glob("archives/*.deb"))


def last_error(words: str) -> str:
    """Return the last error of apt's output, as one line."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:")]
    return (errors or lines or ["apt said nothing"])[-1]


def find_suite(
    folder: Path, mirror: Mirror, package: str, version: str, env: dict[str, str]
) -> AptRoot:
    """Return the private apt of the first suite that has ``package`` in ``version``.

    Raises `Unavailable` if no suite has that version, or none can be reached.
    """
    have: list[str] = []
    failures: list[str] = []
    for suite in SUITES:
        root = AptRoot(folder / suite, mirror, suite, env)
        failure = root.update()
        candidate = "" if failure else root.candidate(package)
        if of_version(candidate, version):
            return root
        if failure:
            failures.append(f"{suite}: {failure}")
        else:
            have.append(f"{suite} {candidate or 'none'}")
    if not have:
        raise Unavailable(
            f"no suite of Debian can be fetched ({failures[0]})",
            "repair the network or the apt sources, then run it again",
        )
    raise Unavailable(
        f"no suite of Debian has Slurm {version} ({', '.join([*have, *failures])})",
        "take one of these versions",
    )


def of_version(candidate: str, version: str) -> bool:
    """Return True if a package's ``candidate`` is of Slurm ``version``, ignoring the epoch."""
    bare = candidate.partition(":")[2] or candidate
    return bare == version or bare.startswith((f"{version}.", f"{version}-"))
