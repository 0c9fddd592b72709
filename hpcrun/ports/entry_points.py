"""The search for add-ons: hpcrun's own in a table, those of other packages by their entry points.

A search reads the metadata of all installed packages, which takes as long as a dry run's checks. So it begins
only when a config or a command line names something that the table does not have.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpcrun.errors import UserError, one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


@dataclass(frozen=True)
class AddOn:
    """An add-on of an installed package.

    Attributes:
        name: its name for users.
        value: ``module:attribute``, or ``module``.
        package: the name of its distribution.
        summary: the package with its version, and its description of one line.
        point: its entry point.
    """

    name: str
    value: str
    package: str
    summary: str
    point: EntryPoint


@dataclass(frozen=True)
class Port:
    """A kind of add-on.

    Attributes:
        group: of the entry points.
        noun: one add-on, in messages.
        own: hpcrun's own add-ons: the name and ``module:attribute``.
    """

    group: str
    noun: str
    own: Mapping[str, str]

    def of_packages(self) -> list[AddOn]:
        """Return the add-ons of other packages, by name; no package replaces one of hpcrun's own."""
        found = (one for one in _installed(self.group) if one.name not in self.own)
        return sorted(found, key=lambda one: (one.name, one.package))

    def find(self, name: str) -> AddOn:
        """Return the add-on ``name`` of another package, without an import of the package.

        Raises:
            UserError: no package has it, or two have it.
        """
        known = self.of_packages()
        found = [one for one in known if one.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            packages = " and ".join(one.package for one in found)
            raise UserError(
                f"{name}: {packages} both have a {self.noun} of this name; uninstall one of them"
            )
        names = [*self.own, *(one.name for one in known)]
        near = difflib.get_close_matches(name, names, n=1)
        there = f"there are: {', '.join(names)}" if names else "no installed package has one"
        hint = f"did you mean {near[0]}?" if near else there
        raise UserError(
            f"{name}: no such {self.noun}; {hint} (a package adds one with an entry point of the group "
            f"{self.group})"
        )

    def load(self, name: str) -> Any:
        """Return the object with the name ``name``.

        Raises:
            UserError: there is no such add-on, or its package cannot be imported.
        """
        home = self.own.get(name)
        if home is not None:
            module, _, attribute = home.partition(":")
            return getattr(import_module(module), attribute)
        add_on = self.find(name)
        try:
            return add_on.point.load()
        except Exception as error:
            raise UserError(
                f"{name}: the {self.noun} of the package {add_on.package} cannot be imported from "
                f"{add_on.value}: {one_line(error)}; repair the package, or uninstall it"
            ) from error


def _installed(group: str) -> Iterator[AddOn]:
    from importlib.metadata import distributions

    seen = set[str]()
    for package in distributions():
        try:
            # Cheaper than the entry points of each package: nearly all packages have other groups.
            text = package.read_text("entry_points.txt")
            if not text or f"[{group}]" not in text.replace(" ", ""):
                continue
            name = package.metadata["Name"]
            summary = f"{name} {package.version}: {package.metadata['Summary'] or 'no description'}"
            points = [point for point in package.entry_points if point.group == group]
        except Exception:
            # Damaged metadata of a package costs its own add-ons, which are not found then.
            continue
        # The first on sys.path wins, as for its modules.
        if name.lower() not in seen:
            seen.add(name.lower())
            for point in points:
                yield AddOn(point.name, point.value, name, summary, point)


SINKS = Port(
    "hpcrun.sinks",
    "metric sink",
    {
        "tensorboard": "hpcrun.train.metrics.sinks:TensorBoard",
        "wandb": "hpcrun.integrations.wandb:WeightsAndBiases",
    },
)
NODE_CHECKS = Port("hpcrun.node_checks", "check of nodes", {})
STRATEGIES = Port(
    "hpcrun.strategies", "strategy", {"in-place": "hpcrun.job.restart.in_place:start_in_place"}
)
