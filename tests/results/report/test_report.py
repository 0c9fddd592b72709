"""`hpcrun report` and `hpcrun plot`: the page, its files, and what they refuse."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded

from .conftest import MakeRun, add_event
from .page import Page

SECTIONS = [
    "What ran",
    "Curves",
    "Goodput and timeline",
    "Failures",
    "Methods and data",
]
EVIL = '<script>alert("x")</script>\x1b[2J'


@pytest.fixture
def sweep(make_run: MakeRun, tmp_path: Path) -> Path:
    """Return a folder with a sweep of two parameters, a failed run, an unfinished run and a new run."""
    for rate in (0.1, 0.2):
        for width in (64, 128):
            for seed in (0, 1):
                config = {"train": {"lr": rate}, "model": {"width": width}}
                name = f"lr{rate}-w{width}-s{seed}"
                make_run(name, seed=seed, level=rate * width, config=config)
    make_run("broken", state="failed", config={"train": {"lr": 0.4}}, reason=EVIL)
    make_run("running", state=None, config={"train": {"lr": 0.4}})
    return tmp_path / "runs"


def report(*arguments: object) -> int:
    """Run `hpcrun report` and return its exit code."""
    return guarded(["report", *map(str, arguments)])


def test_the_page_has_each_section_and_figure(sweep: Path, tmp_path: Path) -> None:
    assert report(sweep, "-o", tmp_path / "r.html", "--figures", tmp_path / "figures") == 0
    page = Page(tmp_path / "r.html")
    assert page.headings == SECTIONS
    # Loss, throughput, goodput, timeline.
    assert page.tags.count("svg") == 4
    assert len(page.ids) == len(set(page.ids))
    files = sorted(path.suffix for path in (tmp_path / "figures").iterdir())
    assert files == [".pdf"] * 4 + [".png"] * 4
    for run in sweep.iterdir():
        assert run.name in page.words
    assert "n=2" in page.words


def test_the_page_loads_nothing_and_runs_nothing(sweep: Path, tmp_path: Path) -> None:
    assert report(sweep, "-o", tmp_path / "r.html", "--title", EVIL) == 0
    page = Page(tmp_path / "r.html")
    assert all(value.startswith("#") for value in page.loads)
    assert {value[1:] for value in page.loads} <= set(page.ids)
    assert not re.search(r"https?://|@import|url\((?!#)", page.source)
    assert "script" not in page.tags
    assert "default-src 'none'" in page.source
    assert page.words.count('<script>alert("x")</script>') >= 2
    assert "\x1b" not in page.source


def test_runs_that_do_not_count_are_listed(sweep: Path, tmp_path: Path) -> None:
    assert report(sweep, "-o", tmp_path / "r.html") == 0
    words = Page(tmp_path / "r.html").words
    assert "2 runs not counted" in words
    assert "runs10finished8failed1unfinished1" in re.sub(r"\s", "", words)


def test_slow_nodes_are_in_the_report(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    add_event(run, "slow", 70, restart=1, step=30, host="n<2>", rank=3, ratio=1.624)
    add_event(run, "slow-over", 75, restart=1, step=38, host="n<2>")
    assert report(tmp_path / "runs", "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "n&lt;2&gt;" in page
    assert "1.62" in page
    assert "step 30 to step 38" in page


def test_a_results_file_gives_the_same_figures(sweep: Path, tmp_path: Path) -> None:
    assert guarded(["aggregate", str(sweep), "-o", str(tmp_path / "results.h5")]) == 0
    assert report(sweep, "-o", tmp_path / "a.html") == 0
    assert report(tmp_path / "results.h5", "-o", tmp_path / "b.html") == 0
    first, second = (
        re.findall(r"<svg.*?</svg>", (tmp_path / name).read_text(), re.DOTALL)
        for name in ("a.html", "b.html")
    )
    assert first == second


def test_runs_without_metrics_have_a_report(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("empty", state="failed")
    run.metrics.unlink()
    run.events.unlink()
    assert report(run.path, "-o", tmp_path / "r.html") == 0
    words = Page(tmp_path / "r.html").words
    assert "No run has logged a metric." in words
    assert "there is no timeline" in words


def test_bad_input_is_one_line_and_leaves_nothing(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    cases = (
        ([sweep, "-o", tmp_path], "is a directory"),
        ([sweep, "-o", tmp_path / "none" / "r.html"], "no such directory"),
        ([sweep, "-o", tmp_path / "notes.txt"], "would be replaced"),
        ([tmp_path / "empty"], "contains no run directories"),
        ([tmp_path / "none.h5"], "no such file"),
        ([sweep, tmp_path / "notes.txt"], "takes no other source"),
        ([sweep, "--metric", "accuracy"], "no run has the metric"),
        ([sweep, "--by", "train.x"], "no run has this key"),
        ([sweep, "--at", "end"], "last, best or a step"),
        ([sweep, "--figures", tmp_path / "notes.txt"], "is a file"),
    )
    before = sorted(tmp_path.rglob("*"))
    for arguments, words in cases:
        if "-o" not in arguments:
            arguments = [*arguments, "-o", tmp_path / "r.html"]
        assert report(*arguments) == 2, words
        told = capsys.readouterr().err
        assert words in told
        assert told.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_killed_report_leaves_the_old_page(sweep: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    page.write_text("<!DOCTYPE html>old")
    command = [sys.executable, "-m", "hpcrun", "report", str(sweep), "-o", str(page)]
    for delay in (0.2, 1.0, 2.0):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(delay)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        text = page.read_text()
        assert text == "<!DOCTYPE html>old" or text.endswith("</html>\n")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert page.read_text().endswith("</html>\n")


def test_plots_show_each_run_and_go_to_a_file(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in ("png", "pdf", "svg"):
        assert guarded(["plot", str(sweep), "-o", str(tmp_path / f"p.{suffix}")]) == 0
    shown = capsys.readouterr().out
    assert "training loss over steps" in shown
    assert "learning rate over steps" in shown
    assert "tokens per second" in shown
    assert "goodput" in shown
    assert all(run.name in shown for run in sweep.iterdir())
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "p.pdf").read_bytes()[:4] == b"%PDF"
    for options, words in (
        (["-o", str(tmp_path / "p.gif")], "should end in .png"),
        (["--metric", "accuracy"], "no run has it; there is: loss"),
        (["--by", "train.rl"], "--by train.rl: no run has this key in its config"),
    ):
        assert guarded(["plot", str(sweep), *options]) == 2
        assert words in capsys.readouterr().err


def test_curves_have_the_swept_values_and_group_by_a_key(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (rate, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]):
        state = "failed" if number == 3 else "finished"
        make_run(f"00{number}", seed=seed, state=state, config={"train": {"lr": rate}}, level=rate)
    folder, file = str(tmp_path / "runs"), tmp_path / "p.svg"
    assert guarded(["plot", folder, "--metric", "loss", "-o", str(file)]) == 0
    assert "  d  003 lr=0.2 seed=1 (failed)" in capsys.readouterr().out
    assert "003 lr=0.2 seed=1  (n=1)" in file.read_text()
    assert guarded(["plot", folder, "--by", "train.lr", "--metric", "loss", "-o", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "  a  lr=0.1 (2 runs)\n  b  lr=0.2 (2 runs)\n\n" in shown
    # The failed run does not count.
    legend = set(re.findall(r"lr=0\.\d  \(n=\d\)", file.read_text()))
    assert legend == {"lr=0.1  (n=2)", "lr=0.2  (n=1)"}
