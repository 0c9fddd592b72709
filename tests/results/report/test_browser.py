"""The report in a real headless browser: no console errors, figures painted, light and dark."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded

from .conftest import MakeRun

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (apt-get install chromium)"),
]
DARK, LIGHT = 0, 1


def browse(folder: Path, page: Path, *options: str) -> tuple[str, str]:
    """Open ``page`` without a network and return what the browser writes to both outputs."""
    done = subprocess.run(
        [
            *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--enable-logging=stderr", f"--user-data-dir={folder}", "--virtual-time-budget=3000"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout, done.stderr


@pytest.fixture
def page(make_run: MakeRun, tmp_path: Path) -> Path:
    """Return the report of a sweep with a failed run."""
    for rate in (0.1, 0.2):
        for seed in (0, 1, 2):
            make_run(f"lr{rate}-s{seed}", seed=seed, level=rate, config={"train": {"lr": rate}})
    make_run("broken", state="failed", reason="<img src=x onerror=console.error(1)>")
    assert guarded(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "report.html")]) == 0
    return tmp_path / "report.html"


def test_a_browser_shows_all_figures_without_errors(page: Path, tmp_path: Path) -> None:
    tree, log = browse(tmp_path / "profile", page, "--dump-dom")
    assert "CONSOLE" not in log
    # Loss, one parameter, throughput, goodput, timeline.
    assert len(re.findall(r"<svg[^>]* class=\"figure\"|<svg class=\"figure\"", tree)) == 5
    assert "<img" not in tree


def test_the_console_of_the_browser_is_seen(tmp_path: Path) -> None:
    # Guards the test above: a browser that logs no errors at all would pass it.
    broken = tmp_path / "broken.html"
    broken.write_text("<!DOCTYPE html><script>console.error('seen')</script>")
    _, log = browse(tmp_path / "profile", broken, "--dump-dom")
    assert "CONSOLE" in log


@pytest.mark.parametrize("width", [1280, 420])
def test_light_and_dark_differ_and_the_page_fits(page: Path, tmp_path: Path, width: int) -> None:
    import matplotlib.image

    corners = []
    for scheme in (LIGHT, DARK):
        picture = tmp_path / f"{width}-{scheme}.png"
        size = (f"--window-size={width},3000", f"--blink-settings=preferredColorScheme={scheme}")
        browse(tmp_path / f"profile-{scheme}", page, f"--screenshot={picture}", *size)
        pixels = matplotlib.image.imread(picture)
        assert pixels.shape[1] == width
        # Figures and texts in color, not an empty page.
        assert len({tuple(pixel) for pixel in pixels[::7, ::7, :3].reshape(-1, 3).tolist()}) > 50
        corners.append(float(pixels[2, 2, :3].mean()))
    assert corners[0] > 0.9
    assert corners[1] < 0.2
