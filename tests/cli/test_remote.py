"""Commands on another host: a real ssh, rsync and sshd between two homes."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpcrun.cli.main import guarded
from hpcrun.cli.ssh import Host, prepare_script
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.cli.terminal import Terminal
from tests.support import sshd
from tests.support.jobs import events, wait_for, wait_for_end

SCRIPT = """\
import os, sys, time
print(sys.argv[1:], flush=True)
late = time.monotonic() + 300  # A failed test must not leave a script that waits forever.
while not os.path.exists("go") and time.monotonic() < late:
    time.sleep(0.05)
sys.exit(int(open("go").read()))
"""
# Shows what arrives on the other host, and starts no Python.
ECHO = """#!/bin/bash
printf '<%s>' "$@"; echo
echo "folder=$PWD client=$HPCRUN_CLIENT commit=$HPCRUN_SENT_COMMIT term=$TERM size=$(stty size 2>&1)"
[ "$1" = status ] && exit "${2:-0}"
[ "$1" != logs ] || { trap 'exit 130' INT; echo waiting; sleep 1000; }
"""
HARD = ["it's", '"$HOME"', "`x`", "a  b", "*", "\\", "!", "é", ""]


@pytest.fixture(scope="module")
def site() -> Iterator[sshd.Site]:
    """A laptop and a login host, both with this checkout."""
    reason = sshd.why_not()
    if reason is not None:
        if os.environ.get("HPCRUN_REQUIRE_SLURM") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    running = sshd.Site("root")
    try:
        yield running
    finally:
        running.close()


@pytest.fixture
def project(site: sshd.Site, request: pytest.FixtureRequest) -> Path:
    """A git work tree on the laptop with its own name."""
    folder = site.here / re.sub(r"\W+", "-", request.node.name)
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "package" / "part one.py").write_text("1\n")
    (folder / ".gitignore").write_text("data.bin\nruns\n")
    (folder / "data.bin").write_text("large")
    (folder / ".env").write_text("TOKEN=1")
    git = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run([*git, "add", "train.py", "package"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "first"], check=True)
    return folder


@pytest.fixture
def echo(site: sshd.Site) -> Iterator[None]:
    """Replace the other hpcrun by one that shows its call."""
    program = site.there / "bin" / "hpcrun"
    before = program.read_text()
    program.write_text(ECHO)
    yield
    program.write_text(before)


@contextlib.contextmanager
def settings(site: sshd.Site, text: str) -> Iterator[None]:
    """Give the laptop a file of hosts."""
    path = site.here / ".config" / "hpcrun" / "hosts.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    yield
    path.unlink()


def submit(name: str, *words: str) -> list[str]:
    """Return the words of a submission of the script, which ends when the file ``go`` exists."""
    given = ["--executor", "local", "--cpu", "--gpus", "1", "restarts.crash=0"]
    return ["submit", "--detach", *given, "--name", name, "--", "python", "train.py", *words]


def run_of(site: sshd.Site, project: Path, name: str) -> RunDirectory:
    return RunDirectory(site.there / "hpcrun" / project.name / "runs" / name)


def alive(site: sshd.Site, word: str) -> list[psutil.Process]:
    """Return the processes of the login host that have ``word`` in their command line."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if word in process.cmdline() and process.environ().get("HOME") == str(site.there):
                found.append(process)
    return found


def test_a_run_is_submitted_watched_cancelled_and_resumed(site: sshd.Site, project: Path) -> None:
    run, there = run_of(site, project, "a"), site.there / "hpcrun" / project.name
    done = site.hpcrun(*submit("a", *HARD), cwd=project)
    assert done.stderr == "hpcrun: not sent (passwords, keys, links to other folders): .env\n"
    # A pending run has no log yet.
    logs = site.words("logs", "a")
    wait_for(lambda: "[" in site.run(*logs, cwd=project).stdout, why="a line of the script")
    assert str(HARD) in site.hpcrun("logs", "a", cwd=project).stdout
    copied = sorted(path.name for path in (run.code / "001").rglob("*") if path.is_file())
    assert copied == [".gitignore", "part one.py", "train.py"]
    commit = subprocess.run(
        ["git", "-C", project, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (read_json(run.record) or {})["git"] == {"commit": commit, "dirty": False}
    again = site.hpcrun(*submit("a", *HARD), cwd=project, code=2)
    assert "has it already" in again.stderr
    site.hpcrun("cancel", "a", cwd=project)
    # The next submission sends the changes, and removes what is gone.
    (project / "package" / "part one.py").unlink()
    (project / "train.py").write_text(SCRIPT + "# new\n")
    (there / "go").write_text("3")
    site.hpcrun("resume", "a", "--follow", cwd=project, code=1)
    assert not (there / "package" / "part one.py").exists()
    assert (there / "go").exists()
    assert (run.code / "002" / "train.py").read_text() == SCRIPT + "# new\n"
    assert not (run.code / "002" / "package").exists()
    assert (read_json(run.record) or {})["git"] == {"commit": commit, "dirty": False}
    assert not list(project.glob("runs"))


def test_words_folder_and_exit_code_pass_unchanged(
    site: sshd.Site, project: Path, echo: None
) -> None:
    site.hpcrun("submit", "a", "--", *HARD, cwd=project / "package")
    for code in (0, 1, 2, 75, 130):
        done = site.hpcrun("status", str(code), *HARD, cwd=project / "package", code=code)
        words, facts = done.stdout.splitlines()
        assert words == "".join(f"<{word}>" for word in ("status", str(code), *HARD))
        assert f"folder={site.there}/hpcrun/{project.name}/package client=0.1.0 " in facts
        assert done.stderr == ""


def test_a_terminal_keeps_its_size_colors_and_ctrl_c(
    site: sshd.Site, project: Path, echo: None
) -> None:
    site.hpcrun("submit", cwd=project)
    program = site.command(*site.words("logs", "-f", "a"), cwd=project)
    terminal = Terminal(project, columns=77, program=program)
    try:
        terminal.read_until("term=xterm-256color size=24 77(.|\n)*waiting")
        # The shell prints its line before it starts the program.
        wait_for(lambda: len(alive(site, "1000")) == 1, why="the program there")
        (sleeper,) = alive(site, "1000")
        terminal.press_ctrl_c()
        assert terminal.end() == 130
        wait_for(lambda: not sleeper.is_running(), why="the end of the program there")
        assert "closed" not in terminal.text
    finally:
        terminal.kill()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_the_command_here_ends_logs_there(
    site: sshd.Site, project: Path, how: signal.Signals
) -> None:
    site.hpcrun(*submit("a"), cwd=project)
    run = run_of(site, project, "a")
    follower = subprocess.Popen(
        site.command(*site.words("logs", "-f", "a"), cwd=project),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert follower.stdout is not None
        assert any("[]" in line for line in follower.stdout)
        (other,) = alive(site, "logs")
        if how == signal.SIGINT:
            # As a terminal does, to every program of the pipeline.
            os.killpg(follower.pid, how)
            assert follower.wait() == 130
        else:
            follower.kill()
            follower.wait()
        wait_for(lambda: not other.is_running(), why="the end of `logs -f` there")
    finally:
        (site.there / "hpcrun" / project.name / "go").write_text("0")
        wait_for_end(run)


@pytest.mark.parametrize(
    "moment",
    [
        "made",
        pytest.param("before", marks=pytest.mark.slow),
        pytest.param("within", marks=pytest.mark.slow),
    ],
)
def test_a_cut_submission_submits_once_when_it_is_repeated(
    site: sshd.Site, project: Path, moment: str
) -> None:
    hold, program = site.there / "hold", site.there / "bin" / "hpcrun"
    text, run = program.read_text(), run_of(site, project, "a")
    hold.touch()
    # The command there waits, so that the cut meets it before it begins, or at its begin.
    waiting = f"while [ -e {hold} ]; do touch {hold}.reached; sleep 0.05; done"
    python = text.splitlines()[-1]
    begun = f"{python} & sleep 0.1; {waiting}; wait"
    held = {"before": f"{waiting}; {python}", "within": begun, "made": python}
    program.write_text(f"#!/bin/sh\n{held[moment]}\n")
    cut = subprocess.Popen(
        site.command(*site.words(*submit("a")), cwd=project),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    reached = run.path if moment == "made" else Path(f"{hold}.reached")
    wait_for(reached.exists, why="the command there")
    site.stop()
    hold.unlink()
    Path(f"{hold}.reached").unlink(missing_ok=True)
    _, said = cut.communicate()
    assert cut.returncode == 255
    assert said.splitlines()[-1].startswith("hpcrun: no connection to login.site, or it was cut")
    wait_for(lambda: not alive(site, "submit"), why="the end of the command there")
    program.write_text(text)
    site.start()
    again = site.run(*site.words(*submit("a")), cwd=project)
    assert again.returncode == 0 or "has it already" in again.stderr, again.stderr
    assert len(events(run, "submitted")) == 1
    (site.there / "hpcrun" / project.name / "go").write_text("0")
    wait_for_end(run)
    assert len(events(run, "submitted")) == 1


def test_a_host_that_cannot_be_used_gets_one_line(site: sshd.Site, project: Path) -> None:
    def refused(*words: str, code: int = 2) -> str:
        done = site.run(*site.words(*words), cwd=project)
        assert done.returncode == code
        (line,) = done.stderr.splitlines()
        return line

    assert refused("status").startswith(
        f"hpcrun: login.site has no folder hpcrun/{project.name}; `hpcrun --host login.site submit`"
    )
    (site.there / "hpcrun" / project.name).mkdir(parents=True)
    with settings(site, "login.site: {setup: 'PATH=/usr/bin:/bin'}\n"):
        assert "login.site has no command hpcrun; install it there" in refused("status")
    with settings(site, "login.site: {setup: [module load hpcrun]}\n"):
        done = site.run(*site.words("status"), cwd=project)
        assert done.returncode == 2
        shown = "hpcrun: login.site: setup of hosts.yaml failed: module load hpcrun"
        assert done.stderr.splitlines()[-1] == shown
    with settings(site, "login.site: {setup: ['PATH=/usr/bin:/bin; # none']}\n"):
        assert "login.site has no command hpcrun; install it there" in refused("status")
    with settings(site, "login.site: {folder: $HOME/x}\n"):
        assert "hosts.yaml:1: login.site: folder: should be a path, in the home" in refused(
            "status"
        )
    with settings(site, "login.site: {fodler: x}\n"):
        assert "hosts.yaml:1: login.site: takes the keys folder and setup" in refused("status")
    site.stop()
    try:
        done = site.run(*site.words("status"), cwd=project)
        assert done.returncode == 255
        assert done.stderr.splitlines()[-1].startswith("hpcrun: no connection to login.site")
    finally:
        site.start()


def test_another_folder_of_the_same_name_is_refused(
    site: sshd.Site, project: Path, echo: None
) -> None:
    site.hpcrun("submit", cwd=project)
    other = site.here / "other" / project.name
    other.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", other], check=True)
    (other / "x.py").write_text("")
    (line,) = site.hpcrun("submit", cwd=other, code=2).stderr.splitlines()
    assert (
        f"login.site:hpcrun/{project.name} is the copy of another folder, not of root:{other}; to "
        in line
    )
    assert (site.there / "hpcrun" / project.name / "train.py").exists()
    with settings(site, "login.site: {folder: ~/second}\n"):
        site.hpcrun("submit", cwd=other)
    assert (site.there / "second" / project.name / "x.py").exists()


def test_a_profile_that_reads_its_input_does_not_wait(
    site: sshd.Site, project: Path, echo: None
) -> None:
    profile = site.there / ".bash_profile"
    before = profile.read_text()
    profile.write_text(f"cat >/dev/null\n{before}")
    try:
        done = site.hpcrun("submit", cwd=project)
        assert done.stdout.startswith("<submit>\n")
        assert (site.there / "hpcrun" / project.name / "train.py").exists()
    finally:
        profile.write_text(before)


def test_files_that_a_user_made_there_are_not_replaced(
    site: sshd.Site, project: Path, echo: None
) -> None:
    there = site.there / "hpcrun" / project.name
    (there / "data").mkdir(parents=True)
    (there / "train.py").write_text("by hand\n")
    (line,) = site.hpcrun("submit", cwd=project, code=2).stderr.splitlines()[1:]
    assert (
        f"login.site:hpcrun/{project.name} has files that hpcrun did not send; to replace" in line
    )
    assert sorted(path.name for path in there.iterdir()) == ["data", "train.py"]
    assert (there / "train.py").read_text() == "by hand\n"
    (there / ".git").mkdir()
    site.hpcrun("submit", cwd=project)
    assert (there / "train.py").read_text() == SCRIPT
    # The lock of a git that was killed.
    (there / ".git" / "index.lock").touch()
    line = site.hpcrun("submit", cwd=project, code=2).stderr.splitlines()[-1]
    assert line.endswith(f"remove hpcrun/{project.name}/.git/index.lock there")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--host"], "--host: name a host before the command: hpcrun --host HOST status"),
        (["--host=a", "--host", "b", "status"], "--host a: is given twice; give one host, and"),
        (["--host", "a", "--host=b", "status"], "--host a: is given twice; give one host, and"),
    ],
)
def test_a_wrong_host_option_is_refused(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(words) == 2
    assert line in capsys.readouterr().err


def test_a_missing_runtime_folder_does_not_matter(site: sshd.Site) -> None:
    words = ["env", "XDG_RUNTIME_DIR=/run/user/no", *site.words("--version")]
    assert site.run(*words).returncode == 0


def test_a_cut_copy_of_the_code_is_completed(tmp_path: Path) -> None:
    """Runs the lines for the other host here; the shell ends before the n-th command."""

    def run(owner: str, last: int) -> "subprocess.CompletedProcess[bytes]":
        script = prepare_script(Host("x"), str(tmp_path / f"copy{number}"), owner)
        cut = f"trap '[ $((n += 1)) -le {last} ] || exit 9' DEBUG; {script}"
        return subprocess.run(
            ["bash", "-c", cut], input=b"a\0b c\0", capture_output=True, check=False
        )

    number = 0
    while run("me:/code", number).returncode == 9:
        done = run("me:/code", 1000)
        assert done.returncode == 0, (number, done.stderr)
        number += 1
    assert number > 8
    refused = run("me:/other", 1000)
    assert refused.returncode == 2
    assert b"not of me:/other; to replace its files, make" in refused.stderr


def test_another_version_there_is_named(site: sshd.Site, project: Path) -> None:
    words = [
        "-c",
        "import hpcrun; hpcrun.__version__ = '9.9'; from hpcrun.cli.main import main; main()",
    ]
    done = site.run(site.words()[0], *words, *site.words("--version")[3:], cwd=project)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert re.search(r"has hpcrun 0\.1\.0, and your machine 9\.9", line)
