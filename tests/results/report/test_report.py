"""`hpcrun report` and `hpcrun plot`: the page, its server, the files, and what the commands refuse."""

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from html import unescape
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.results.report.content import Content, ReportRequest, collect
from hpcrun.results.report.runs import open_results
from hpcrun.results.report.server import ReportServer
from hpcrun.run.files import append_line

from .conftest import START, MakeRun, add_event
from .page import Page

SECTIONS = [
    "Comparison",
    "Curves",
    "Parameters",
    "All runs",
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


def test_the_page_has_each_section_and_run(sweep: Path, tmp_path: Path) -> None:
    assert report(sweep, "-o", tmp_path / "r.html") == 0
    page = Page(tmp_path / "r.html")
    assert page.headings == SECTIONS
    assert len(page.ids) == len(set(page.ids))
    data = page.data
    assert data["metric"] == "loss"
    assert {"tokens_per_second", "lr", "memory_gb"} < set(data["metrics"])
    assert (data["x"], data["by"]) == (["step", "samples", "time"], ["train.lr", "model.width"])
    assert [run["name"] for run in data["runs"]] == sorted(run.name for run in sweep.iterdir())
    for run in sweep.iterdir():
        assert run.name in page.words
    assert len(page.data["runs"][0]["tracks"][0]["y"]["loss"]) == 8
    assert page.run("broken")["keys"] == {
        **{"seed": 0, "train.lr": 0.4, "model.width": "absent", "state": "failed"}
    }
    assert page.source.count('<th scope="col">') > 20


def test_the_page_loads_nothing_and_runs_only_its_scripts(sweep: Path, tmp_path: Path) -> None:
    assert report(sweep, "-o", tmp_path / "r.html", "--title", EVIL) == 0
    page = Page(tmp_path / "r.html")
    assert all(value.startswith("#") for value in page.loads)
    assert {value[1:] for value in page.loads} <= set(page.ids)
    assert not re.search(r"https?://|@import|url\((?!#)", page.markup)
    scripts = re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL)
    policy = re.search(r'content="default-src \'none\'.*?script-src ([^;]*);', page.source)
    assert policy is not None
    digests = {b64encode(sha256(one.encode()).digest()).decode() for one in scripts}
    assert set(re.findall(r"'sha256-([^']*)'", unescape(policy[1]))) == digests
    assert "'unsafe-inline'" not in policy[1]
    assert page.tags.count("script") == len(scripts) + 1
    assert page.words.count('<script>alert("x")</script>') >= 2
    assert "\x1b" not in page.source


def test_runs_that_do_not_count_are_listed(sweep: Path, tmp_path: Path) -> None:
    assert report(sweep, "-o", tmp_path / "r.html") == 0
    page = Page(tmp_path / "r.html")
    assert [run["name"] for run in page.data["runs"] if not run["counts"]] == ["broken", "running"]
    assert "runs10finished8failed1unfinished1" in re.sub(r"\s", "", page.words)


def test_equal_failures_share_a_row(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(3):
        make_run(f"a{number}", state="failed", reason="out of memory")
    assert report(tmp_path / "runs", "-o", tmp_path / "r.html") == 0
    page = Page(tmp_path / "r.html")
    assert page.words.count("out of memory") == 1
    assert "a0, a1, a2" in page.words


def test_a_page_of_24_runs_is_small(make_run: MakeRun, tmp_path: Path) -> None:
    for number in range(24):
        run = make_run(f"r{number:02d}", seed=number)
        names = [f"metric{at}" for at in range(16)]
        with run.metrics.open("w") as stream:
            for step in range(1, 2001):
                line = {"step": step, "time": START + step} | dict.fromkeys(names, step / 7)
                stream.write(json.dumps(line) + "\n")
    assert report(tmp_path / "runs", "-o", tmp_path / "r.html", "--metric", "metric3") == 0
    page = Page(tmp_path / "r.html")
    library = max(re.findall(r"<script>(.*?)</script>", page.source, re.DOTALL), key=len)
    assert len(page.source.encode()) - len(library.encode()) < 2_000_000
    (track,) = page.data["runs"][0]["tracks"]
    assert len(track["x"]["step"]) <= 400
    assert (track["x"]["step"][0], track["x"]["step"][-1]) == (1, 2000)


def test_slow_nodes_are_in_the_report(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run("a")
    add_event(run, "slow", 70, restart=1, step=30, host="n<2>", rank=3, ratio=1.624)
    add_event(run, "slow-over", 75, restart=1, step=38, host="n<2>")
    assert report(tmp_path / "runs", "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert "n&lt;2&gt;" in page
    assert "1.62" in page
    assert "step 30 to step 38" in page


def test_a_results_file_gives_the_same_data(sweep: Path, tmp_path: Path) -> None:
    assert guarded(["aggregate", str(sweep), "-o", str(tmp_path / "results.h5")]) == 0
    assert report(sweep, "-o", tmp_path / "a.html") == 0
    assert report(tmp_path / "results.h5", "-o", tmp_path / "b.html") == 0
    assert Page(tmp_path / "a.html").data == Page(tmp_path / "b.html").data


def test_runs_without_metrics_have_a_report(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run("empty", state="failed")
    run.metrics.unlink()
    run.events.unlink()
    assert report(run.path, "-o", tmp_path / "r.html") == 0
    words = Page(tmp_path / "r.html").words
    assert "No run has logged a metric." in words
    assert "No end of an attempt is recorded." in words


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
        ([sweep, "--metric", "accuracy"], "accuracy: no run has it"),
        ([sweep, "--by", "train.x"], "no run has this key"),
        ([sweep, "--at", "end"], "last, best or a step"),
        ([sweep, "--port", "8000"], "is an option of --serve"),
        ([sweep, "--serve"], "writes no file"),
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


def test_plots_show_each_run(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["plot", str(sweep)]) == 0
    shown = capsys.readouterr().out
    assert "training loss over steps" in shown
    assert "learning rate over steps" in shown
    assert "tokens per second" in shown
    assert all(run.name in shown for run in sweep.iterdir())
    assert guarded(["plot", str(sweep), "--metric", "accuracy"]) == 2
    assert "no run has it; there is: loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"step": 1, "accuracy": 0.5, "runtime": 3.0}, "nothing to plot: there is: accuracy, runtime; cho"),
        (None, "nothing to plot: no run has a metric"),
    ],
)  # fmt: skip
def test_a_plot_without_curves_says_so(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], row: dict[str, float] | None, told: str
) -> None:
    run = make_run("odd")
    run.metrics.unlink(missing_ok=True)
    if row:
        append_line(run.metrics, row)
    assert guarded(["plot", str(run.path)]) == 0
    assert told in capsys.readouterr().out


def test_curves_are_named_by_the_swept_values(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (rate, seed) in enumerate([(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]):
        state = "failed" if number == 3 else "finished"
        make_run(f"00{number}", seed=seed, state=state, config={"train": {"lr": rate}}, level=rate)
    folder = str(tmp_path / "runs")
    assert guarded(["plot", folder, "--metric", "loss"]) == 0
    assert "  d  003 lr=0.2 seed=1 (failed)" in capsys.readouterr().out


@contextmanager
def serve(sweep: Path) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yield a `hpcrun report --serve` in a login by ssh, its address, and the lines after the address."""
    command = [sys.executable, "-m", "hpcrun", "report", str(sweep), "--serve"]
    environ = os.environ | {"SSH_CONNECTION": "192.0.2.1 50000 192.0.2.2 22"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(4)]
            yield process, lines[0].strip(), "".join(lines[1:])
        finally:
            process.kill()


def ask(address: str, host: str | None = None) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    request = urllib.request.Request(address, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_answers_its_user_only_and_ends(sweep: Path, number: int) -> None:
    with serve(sweep) as (process, address, lines):
        port, _, token = address.split(":")[2].strip("/").partition("/")
        assert f"ssh -N -L {port}:127.0.0.1:{port} " in lines
        code, page = ask(address)
        assert (code, page.startswith("<!DOCTYPE html>")) == (200, True)
        assert "connect-src 'self'" in unescape(page)
        assert ask(f"{address}main")[1].startswith("<dl")
        # Another port of the user's computer is forwarded.
        assert ask(address, f"localhost:{int(port) + 1}")[0] == 200
        assert ask(address, "evil.example")[0] == 403
        assert ask(f"http://127.0.0.1:{port}/{token[::-1]}/")[0] == 403
        assert ask(f"http://127.0.0.1:{port}/")[0] == 403
        assert ask(f"{address}../../etc/passwd")[0] == 404
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.read() == "ended\n"
        assert process.wait() == 0


def test_malformed_requests_of_other_users_print_nothing(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()

    def read() -> Content:
        with open_results([str(sweep)], sweep, tmp_path / "kept") as store:
            return collect(store, ReportRequest())

    fine = "Host: 127.0.0.1\r\n\r\n"
    requests = {
        "GET / HTTP/1.1\r\nHost: [::1\r\n\r\n": 403,
        "GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1:99999999\r\n\r\n": 403,
        "GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1\r\n" + fine: 403,
        "GET /TOKEN/ HTTP/1.1\r\n\r\n": 403,
        "GET /TOKEN/ HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n": 403,
        f"GET /%ff%00\xff\x80?#[ HTTP/1.1\r\n{fine}": 403,
        f"GET http://[::1/ HTTP/1.1\r\n{fine}": 403,
        f"GET /TOKEN/%zz/../ HTTP/1.1\r\n{fine}": 404,
        f"GET /TOKEN/ HTTP/9.9.9\r\n{fine}": 400,
        "GET / HTTP/1.1\r\nX: " + "x" * 70_000: 431,
        "GET /" + "x" * 70_000: 414,
        f"POST /TOKEN/ HTTP/1.1\r\n{fine}": 501,
        "\x00\xff\r\n\r\n": 400,
    }
    with ReportServer(read) as server:
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed):
            threading.Thread(target=server.serve_forever, daemon=True).start()
            own = ("127.0.0.1", server.server_port)
            # More than the server keeps open, and all send nothing.
            silent = [socket.create_connection(own) for _ in range(100)]
            for request, code in requests.items():
                with socket.create_connection(own, 60) as line:
                    line.sendall(request.replace("TOKEN", server.token).encode("latin-1"))
                    line.shutdown(socket.SHUT_WR)
                    assert f" {code} " in line.makefile("rb").read().decode("latin-1")[:400], (
                        request
                    )
            assert ask(server.url)[0] == 200
            server.shutdown()
        for line in silent:
            line.close()
    assert printed.getvalue() == ""


def test_a_port_in_use_is_refused(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert report(sweep, "--serve", "--port", other.getsockname()[1]) == 2
    assert "in use; omit it for a free port" in capsys.readouterr().err
