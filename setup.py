"""The build step that pyproject.toml cannot express: the wheel gets copies of folders of the checkout."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

COPIED = (
    "sbatch/*.sbatch",
    "configs/*.yaml",
    "examples/*.py",
    "examples/add_ons/**/*.py",
    "examples/add_ons/pyproject.toml",
    "docs/**/*.md",
    "tools/train_dist_torchrun.sh",
)


class BuildWithCopies(build_py):
    """Copy files into the package, where an installed hpcrun finds them (``hpcrun/folders.py``)."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for pattern in COPIED:
            for source in sorted(Path().glob(pattern)):
                target = Path(self.build_lib, "hpcrun", source)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


setup(cmdclass={"build_py": BuildWithCopies})
