"""What shells, starters and launchers print about a missing command or a signal, in every wording."""

import pytest

from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.read_log import labeled

MISSING = {
    "command-missing": (
        "/bin/sh: 1: scontrol: not found",
        "/bin/sh: nvidia-smi: not found",
        "-sh: squeue: not found",
        "run.sh: 3: exec: torchrun: not found",
        "bash: torchrun: command not found",
        "/bin/bash: enroot-aufs2ovlfs: command not found",
        "start.sh: line 4: mpirun: command not found",
        "zsh: command not found: srun",
        "job.zsh:7: command not found: nvcc-wrapper",
        "/usr/bin/env: 'python': No such file or directory",
        "env: ‘python3.12’: No such file or directory",
        "fish: Unknown command: torchrun",
        "ksh: sbatch: not found",
        "go.ksh[3]: deepspeed:  not found",
        "accelerate: Command not found.",
        "nohup: failed to run command 'torchrun': No such file or directory",
        'exec: "torchrun": executable file not found in $PATH',
        "FileNotFoundError: [Errno 2] No such file or directory: 'srun'",
        "[rank3]: /bin/sh: 1: rocm-smi: not found",
        "node01: zsh: command not found: srun",
        "\x1b[31mzsh: command not found: srun\x1b[0m",
    ),
    "module-not-loaded": (
        "/var/spool/slurmd/job00123/slurm_script: 7: module: not found",
        "zsh: command not found: module",
        "module: Command not found.",
    ),
    "shell-dialect": (
        "train.sh: 12: [[: not found",
        "/bin/sh: 3: source: not found",
        'train.sh: 5: Syntax error: "(" unexpected',
        "go.sh: 8: Bad substitution",
    ),
    "script-missing": (
        "sh: 0: cannot open train.sh: No such file",
        "zsh: can't open input file: train.sh",
        "bash: train.sh: No such file or directory",
    ),
    "shell-path": (
        "slurm_script: line 9: ./go.sh: No such file or directory",
        "job.sh: line 4: cd: /data/set: No such file or directory",
        "zsh: no such file or directory: ./go",
        "job.sh: 3: cd: can't cd to /data/set",
    ),
    "slurm-dos-lines": ("job.sh: line 3: $'\\r': command not found",),
    "permission-denied": (
        "zsh: permission denied: ./train.sh",
        "./train.sh: Permission denied.",
        "sh: 1: ./train.sh: Permission denied",
    ),
}
ENDED = {
    "shell-conda": ("/var/spool/slurmd/job00123/slurm_script: 12: conda: not found",),
    "rank-killed": (
        "Killed",
        "Killed: 9",
        "job.sh: line 5: 12989 Killed                  python train.py",
        "go.ksh[4]: 4711: Killed",
        "zsh: killed     python train.py",
        "fish: Job 1, 'python train.py' terminated by signal SIGKILL (Forced quit)",
        "subprocess.CalledProcessError: Command '['python', 'a.py']' died with <Signals.SIGKILL: 9>.",
        "[2026-03-01 10:00:00,123] [ERROR] [launch.py:321] exits with return code = -9",
        "ERROR:composer.cli.launcher:Rank 2 crashed with exit code -9",
        "container exited with code 137",
    ),
    "segmentation-fault": (
        "Segmentation fault",
        "zsh: segmentation fault (core dumped)  python train.py",
        "subprocess.CalledProcessError: Command 'a' died with <Signals.SIGSEGV: 11>.",
        "process finished with exit code 139",
    ),
    "bus-error": ("Bus error (core dumped)", "zsh: bus error  ./train"),
    "aborted": (
        "Aborted (core dumped)",
        "go.sh: line 3:  771 Aborted                 (core dumped) ./train",
        "subprocess.CalledProcessError: Command 'a' died with <Signals.SIGABRT: 6>.",
        "E0301 api.py:869] failed (exitcode: -6) local_rank: 3 (pid: 26026) of binary: /usr/bin/python",
    ),
    "terminated": ("Terminated", "zsh: terminated  python train.py"),
}


@pytest.mark.parametrize(
    ("expected", "text"),
    [(name, text) for table in (MISSING, ENDED) for name, texts in table.items() for text in texts],
)
def test_every_wording_of_a_starter_has_its_cause(expected: str, text: str) -> None:
    lines = ("hpcrun: attempt 1-0 begins", text)
    found = find_cause(labeled(line, "job.log", at) for at, line in enumerate(lines, 1))
    assert found is not None
    assert found.id == expected


@pytest.mark.parametrize(
    "text",
    [
        "Killed 3 of 12 leftover workers.",
        "status: killed jobs 0, aborted jobs 0",
        "Terminated training after early stopping at epoch 9",
        "wget: cache entry not found, downloading",
        "key 137 not found in cache, using the default",
        "Segmentation fault tolerance enabled",
        "pool: Killed 2 idle workers",
        "job.sh: line 12:  4711 Terminated              nvidia-smi dmon -d 10",
        "app[12]: cache: not found, using the default",
        "heartbeat timeout: 600 s, shutdown timeout: 60 s",
        "the batch size should be divisible by 8 for the best speed",
        "requested 4 GPUs, found 4",
        "checkpoint: not found, starting from scratch",
    ],
)
def test_ordinary_output_with_such_words_is_no_cause(text: str) -> None:
    assert find_cause([*[labeled(text, "job.log", at) for at in (1, 2)]]) is None
