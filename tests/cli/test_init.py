"""`hpcrun init` writes a program and a config that train, and overwrites nothing."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.cli.terminal import Terminal
from tests.cli.test_bad_input import require_one_line
from tests.support import jobs

NAMES = {"task": "my_task", "script": "train", "lightning": "train", "transformers": "train"}


def require_package(kind: str) -> None:
    module = {"script": "hpcrun.train.own_loop.resumable"}.get(kind, f"hpcrun.integrations.{kind}")
    package = kind if kind in ("lightning", "transformers") else "torch"
    try:
        found = find_spec(module) is not None and find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if kind != "task" and not found:
        pytest.skip(f"{package} or {module} is not installed")


@pytest.mark.parametrize(
    "kind",
    [
        # The frameworks take long to import.
        pytest.param(kind, marks=[] if kind in ("task", "script") else pytest.mark.slow)
        for kind in NAMES
    ],
)
def test_the_written_program_trains_on_two_ranks(kind: str, tmp_path: Path) -> None:
    require_package(kind)
    made = jobs.hpcrun("init", "--kind", kind, "--size", "1x2", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    name = NAMES[kind]
    next_line = made.stdout.splitlines()[-1]
    assert next_line == f"next: hpcrun submit -c {name}.yaml"
    words = next_line.removeprefix("next: hpcrun ").split()
    done = jobs.hpcrun(*words, "--executor", "local", "--cpu", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = read_json(RunDirectory(tmp_path / "runs" / name).result) or {}
    assert (result["state"], result.get("ranks", 2)) == ("finished", 2)
    assert "loss" in done.stdout
    top = {path.name for path in tmp_path.iterdir()}
    # A Trainer makes its folder at once; its checkpoints go to the run's.
    assert not [*tmp_path.glob("checkpoints/*")]
    assert top <= {f"{name}.py", f"{name}.yaml", "runs", "__pycache__", "checkpoints"}


def test_three_questions_are_asked_on_a_terminal(tmp_path: Path) -> None:
    screen = Terminal(tmp_path, "init")
    for question, answer in (
        (r"What do you begin with: .*\[script\] ", "skript"),
        (r"skript: should be script, [^?]*\? \[script\] ", "task"),
        (r"Which file\? \[my_task.py\] ", "numpy.py"),
        (r"would hide the package numpy[^?]*\? \[my_task.py\] ", ""),
        (r"How many nodes, and GPUs on each\? \[1x1\] ", "many"),
        (r"many: should be nodes x GPUs[^?]*\? \[1x1\] ", "2x4"),
    ):
        screen.read_until(question)
        screen.type(f"{answer}\n")
    screen.read_until(r"next: hpcrun submit -c my_task\.yaml")
    assert screen.end() == 0
    config = yaml.safe_load((tmp_path / "my_task.yaml").read_text())
    assert (config["task"], config["job"]["nodes"], config["job"]["gpus"]) == (
        "my_task:MyTask",
        2,
        4,
    )
    screen = Terminal(tmp_path, "init", "--kind", "task")
    screen.read_until("Which file")
    screen.type("\x04")
    screen.read_until("no answer; give --file. Nothing was written")
    assert screen.end() == 2


def test_bad_answers_and_existing_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "there.yaml").write_text("mine\n")
    (tmp_path / "folder").mkdir(mode=0o500)
    before = sorted(tmp_path.rglob("*"))
    for words, expected in (
        ([], "there is no terminal to ask; give --kind script|task|lightning|transformers"),
        (["--kind", "skript"], "--kind: invalid choice"),
        (
            ["--kind", "script", "--file", "there.py"],
            "there.yaml: exists already; name another --file",
        ),
        (
            ["--kind", "script", "--file", "no/there.py"],
            "no/there.py: cannot be written: No such file",
        ),
        (["--kind", "script", "--file", "train.sh"], "--file train.sh: should end with .py"),
        (["--kind", "script", "--file", "torch.py"], "would hide the package torch"),
        (["--kind", "script", "--file", "random.py"], "would hide the package random"),
        (["--kind", "task", "--file", "numpy.py"], "would hide the package numpy"),
        (
            ["--kind", "task", "--file", "my-task.py"],
            "my-task.py: should be a name of Python with .py",
        ),
        (["--kind", "task", "--file", "a/task.py"], "a task is a module of this folder"),
        (["--kind", "task", "--size", "2"], "--size 2: should be nodes x GPUs, such as 2x4"),
        (["--kind", "task", "--size", "0x4"], "--size 0x4: should be nodes x GPUs"),
    ):
        done = jobs.hpcrun("init", *words, cwd=tmp_path)
        require_one_line(done, expected)
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.yaml").read_text() == "mine\n"
