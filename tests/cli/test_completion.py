"""The completion of bash and zsh: commands, options, values, keys and runs, without Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import jobs

BASH = """
source completion
COMP_WORDS=({words}); COMP_CWORD=$(({count} - 1)); _hpcrun; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
ZSH = """
autoload -Uz compinit && compinit -D -u
source ./completion
COMP_WORDS=({words}); COMP_CWORD=$(({count} - 1))
emulate sh -c '_hpcrun; print -rl -- "${{COMPREPLY[@]}}"'  # as bashcompinit does
"""


def completed(shell: str, line: str, folder: Path) -> set[str]:
    """Return the completions of the last word of ``line``."""
    # Only bash splits at the equals sign.
    words = (line.replace("=login", " = login") if shell == "bash" else line).split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    script = {"bash": BASH, "zsh": ZSH}[shell]
    program = script.format(words=quoted, count=len(words))
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "sinfo").write_text("#!/bin/sh\necho gpu; echo gpu-long; echo cpu\n")
    (folder / "bin" / "sinfo").chmod(0o755)
    # No Python on the PATH: the shell does all the work.
    for name in ("bash", "sh", "ls", "tr", "zsh"):
        if (found := shutil.which(name)) and not (folder / "bin" / name).exists():
            (folder / "bin" / name).symlink_to(found)
    done = subprocess.run(
        [shell, "-f", "-c", program] if shell == "zsh" else [shell, "-c", program],
        cwd=folder, env={"PATH": str(folder / "bin"), "HOME": str(folder)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split()}


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_the_words_of_a_command(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    made = jobs.hpcrun("completion", shell, cwd=tmp_path, env={"COLUMNS": "80"})
    assert made.returncode == 0, made.stderr
    (tmp_path / "completion").write_text(made.stdout)
    for name in ("gpt", "gpt-2", "vit"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    for line, wanted in (
        ("hpcrun su", {"submit"}),
        ("hpcrun re", {"report", "resume"}),
        ("hpcrun submit --no", {"--nodes", "--no-snapshot"}),
        ("hpcrun submit train.val", {"train.validate_every=", "train.validate_batches="}),
        ("hpcrun export gpt --format d", {"dcp"}),
        ("hpcrun cancel g", {"gpt", "gpt-2"}),
        ("hpcrun nccl l", {"lint"}),
        ("hpcrun submit --executor ", {"auto", "slurm", "local", "debug"}),
        ("hpcrun submit --launcher t", {"torchrun"}),
        # The shell completes files.
        ("hpcrun submit -c ", set()),
        ("hpcrun aggregate --map ", set()),
        ("hpcrun submit --partition g", {"gpu", "gpu-long"}),
        ("hpcrun --ho", {"--host"}),
        ("hpcrun --host login su", {"submit"}),
        ("hpcrun --host login submit --no", {"--nodes", "--no-snapshot"}),
        ("hpcrun --host login export gpt --format d", {"dcp"}),
        ("hpcrun --host=login su", {"submit"}),
    ):
        found = completed(shell, line, tmp_path)
        assert {word for word in found if not word.endswith("/")} == wanted, line
    assert "hpcrun" not in completed(shell, "hpcrun submit -- pyth", tmp_path)


def test_an_unknown_shell_is_refused(tmp_path: Path) -> None:
    done = jobs.hpcrun("completion", "csh", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "completion csh: there is no such shell" in done.stderr
