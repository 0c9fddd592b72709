"""The nodes of each partition with their generic resources, as sinfo lists them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NodeRow:
    """A node in one of its partitions: its state from sinfo, and its generic resources."""

    partition: str
    default: bool
    node: str
    state: str
    gres: str


def sinfo_gres_command(partition: str | None = None) -> list[str]:
    """Build the query for the nodes of ``partition`` (or several, by commas), or of all partitions."""
    command = ["sinfo", "--noheader", "--Node", "--format=%P|%N|%T|%G"]
    return [*command, *([f"--partition={partition}"] if partition else [])]


def parse_sinfo_gres(text: str) -> list[NodeRow]:
    """Return a row for each node and partition; lines of another format are ignored."""
    lines = (line.strip().split("|") for line in text.splitlines())
    return [
        NodeRow(fields[0].rstrip("*"), fields[0].endswith("*"), *fields[1:])
        for fields in lines
        if len(fields) == 4
    ]
