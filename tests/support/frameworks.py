"""An environment for tests that need a framework outside the package's dependencies."""

import subprocess
import sys
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


def make_environment(home: Path, *packages: str) -> Path:
    """Make a virtual environment with ``packages`` and all packages of this interpreter, including torch.

    Returns:
        The interpreter of the environment.
    """
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    # `--system-site-packages` would show the packages below this interpreter's environment.
    inherited = [folder for folder in sys.path if folder.endswith("site-packages")]
    (Path(own) / "parent.pth").write_text("".join(f"{folder}\n" for folder in inherited))
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *packages],
        check=True,
        timeout=600,
    )
    return python
