"""Packages with add-ons, as an installer leaves them: modules, and a folder of metadata."""

from collections.abc import Mapping
from pathlib import Path


def install(
    folder: Path, package: str, points: Mapping[str, Mapping[str, str]], **modules: str
) -> Path:
    """Write a package into ``folder``, which belongs on sys.path then, and return the folder.

    Args:
        folder: the place, as site-packages.
        package: the name of the distribution.
        points: for each group the names, and what each stands for.
        modules: the text of each module.
    """
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    about = f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nSummary: for a test\n"
    (metadata / "METADATA").write_text(about)
    lines = []
    for group, names in points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder
