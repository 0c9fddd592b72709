"""The build step that pyproject.toml cannot express: the wheel gets a copy of the folder sbatch/."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithBatchScripts(build_py):
    """Copy ``sbatch/`` into the package, where an installed hpcrun looks for the scripts."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "hpcrun" / "sbatch"
        self.mkpath(str(target))
        for script in sorted(Path("sbatch").glob("*.sbatch")):
            self.copy_file(str(script), str(target / script.name))


setup(cmdclass={"build_py": BuildWithBatchScripts})
