"""A missing script is refused if that can be known before the job, and only then."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from hpcrun.config.commands.command import require_there
from hpcrun.errors import UserError


def refused(line: str, folder: Path, **changes: Any) -> bool:
    """Return True if the command is refused in ``folder``."""
    facts: dict[str, Any] = {"launched": False, "here": False, "prepared_by": []} | changes
    try:
        require_there(shlex.split(line), folder, **facts)
    except UserError as error:
        return "missing" in str(error).partition(": no such file in ")[0]
    return False


@pytest.mark.parametrize(
    "line",
    [
        "python missing.py",
        "python -u -W ignore code/missing.py --lr 1",
        "python3 missing",
        "bash missing.sh",
        "./missing",
        "torchrun --nproc-per-node 2 missing.py",
        "accelerate launch --config_file there.yaml missing.py there.py",
    ],
)
def test_a_relative_path_is_known(line: str, tmp_path: Path) -> None:
    assert refused(line, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "python there.py missing.py",
        "python -m missing.py",
        "python -c 'open(\"missing.py\")'",
        "python -",
        "python /nodes/missing.py",
        "bash -c 'python missing.py'",
        "apptainer exec image.sif python missing.py",
        "missing",
        "torchrun -m missing.train",
    ],
)
def test_what_may_be_there_on_the_node_passes(line: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    assert not refused(line, tmp_path)


def test_an_absolute_path_is_known_below_the_folder(tmp_path: Path) -> None:
    assert refused(f"python {tmp_path}/missing.py", tmp_path)
    assert refused("python /nodes/missing.py", tmp_path, here=True)


def test_what_the_set_up_makes_passes(tmp_path: Path) -> None:
    made = ["git clone https://example.org/missing"]
    assert not refused("python missing/train.py", tmp_path, prepared_by=made)
    assert refused("python missing.py", tmp_path, prepared_by=["module load cuda"])


def test_a_launchers_script_is_the_first_python_file(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    assert refused("--mixed_precision bf16 missing.py there.py", tmp_path, launched=True)
    assert not refused("there.py missing.py", tmp_path, launched=True)
    assert not refused("-m missing.train", tmp_path, launched=True)


@pytest.mark.parametrize(
    "line",
    [
        "bash -euo pipefail there.py",
        "bash -eo pipefail -c 'python train.py'",
    ],
)
def test_the_value_of_an_option_is_no_script(line: str, tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    require_there(shlex.split(line), tmp_path, launched=False, here=False, prepared_by=[])


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("train.py --lr 1", "train.py: cannot be run by itself; did you mean `python train.py`?"),
        ("./train.py", "./train.py: cannot be run by itself; did you mean `python ./train.py`?"),
        ("run.sh", "run.sh: cannot be run by itself; did you mean `bash run.sh`?"),
        ("binary", "binary: cannot be run by itself; chmod +x ./binary, and write ./binary"),
        ("./binary", "./binary: cannot be run by itself; chmod +x ./binary, and write ./binary"),
        (
            "'python train.py'",
            "'python train.py': the quotes make one name of the program and its "
            "arguments; remove them: -- python train.py",
        ),
        (
            "./dos",
            "./dos: has Windows line endings, so Linux reads a carriage return as a part of each line; "
            "remove them: sed -i 's/\\r$//' ./dos",
        ),
        (
            "./plain.sh",
            "./plain.sh: has no first line such as #!/bin/bash, so Linux knows no interpreter for it; did "
            "you mean `bash ./plain.sh`?",
        ),
        (
            "source env",
            "source: is a command of the shell, not a program; give it as a line of the set-up, and "
            "your program after `--`: 'job.setup=[source env]'",
        ),
        (
            "conda activate x",
            "conda: is a command of the shell, not a program; give it as a line of the set-up, "
            "and your program after `--`: 'job.setup=[conda activate x]'",
        ),
        (
            "python net.ipynb",
            "net.ipynb: is a notebook, and Python runs scripts; convert it first: jupyter "
            "nbconvert --to script net.ipynb",
        ),
        ("python trian.py", "trian.py: no such file in HERE; did you mean train.py?"),
        (
            "python my train.py",
            "my: no such file in HERE; quote a path with a blank: 'my train.py'",
        ),
        (
            "bash '$WORK/t.sh'",
            "$WORK/t.sh: no such file in HERE; no shell expands $WORK there: write it without "
            "quotes",
        ),
        (
            "python '~/t.py'",
            "~/t.py: no such file in HERE; no shell expands ~ there: write it without quotes",
        ),
    ],
)
def test_a_script_without_its_interpreter_is_refused(
    line: str, remedy: str, tmp_path: Path
) -> None:
    for name in ("train.py", "run.sh", "binary", "net.ipynb", "my train.py"):
        (tmp_path / name).touch()
    for name, text in (
        ("dos", "#!/bin/sh\r\nls\r\n"),
        ("plain.sh", "ls\n"),
        ("tool", "#!/bin/sh\n"),
    ):
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / name).chmod(0o755)
    with pytest.raises(UserError) as caught:
        require_there(shlex.split(line), tmp_path, launched=False, here=False, prepared_by=[])
    assert str(caught.value) == remedy.replace("HERE", str(tmp_path))
    (tmp_path / "train.py").chmod(0o755)
    assert not refused("./train.py", tmp_path)
    assert not refused("./tool source 'python train.py'", tmp_path)
    assert not refused("python train.py", tmp_path)


def test_a_python_behind_a_closed_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may enter every folder, so the refusal of Linux is planted."""

    def closed(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "python").symlink_to("python3")
    (tmp_path / "python3").symlink_to("/closed/python3")
    monkeypatch.setattr(Path, "is_file", closed)
    for name, where in (
        ("./python", "it, as a link to /closed/python3;"),
        ("./python3", "it, as a link to /closed/python3;"),
        ("./tool", "it; ask its owner"),
    ):
        with pytest.raises(UserError, match=where):
            require_there([name, "t.py"], tmp_path, launched=False, here=False, prepared_by=[])
