"""`hpcrun nccl`: command lines and their output."""

import json
from pathlib import Path

import pytest

from hpcrun.api.submission.choose_config import OF_NCCL
from hpcrun.cli.main import guarded
from hpcrun.network.nccl.rules import PARTLY_KNOWN, PREFIXES
from hpcrun.ranks.interfaces import own_interfaces
from tests.support import jobs

CLEAN = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "=eth0"}


def lint(folder: Path, *words: str, **env: str) -> tuple[int, str, str]:
    """Return exit code and both outputs of `hpcrun nccl lint` in an environment without other settings."""
    done = jobs.hpcrun("nccl", "lint", *words, cwd=folder, env=env)
    return done.returncode, done.stdout, done.stderr


def test_the_environment_is_checked_and_errors_give_code_1(tmp_path: Path) -> None:
    code, out, err = lint(tmp_path, NCCL_TIMEOUT="1800")
    assert code == 1
    assert "environment: error: NCCL_TIMEOUT=1800: no library reads this name" in out
    assert "https://" in out
    assert "1 error" in err
    code, out, err = lint(tmp_path, **CLEAN)
    assert (code, out) == (0, "")
    assert "nothing is wrong" in err


def test_only_warnings_give_code_0_and_notes_need_an_option(tmp_path: Path) -> None:
    code, out, _ = lint(tmp_path, NCCL_DEBUG="INFO", NCCL_SOCKET_IFNAME="eth0")
    assert code == 0
    assert out.count(": warning: ") == 1
    assert ": note: " not in out
    assert ": note: NCCL_SOCKET_IFNAME" in lint(tmp_path, "--notes", NCCL_SOCKET_IFNAME="eth0")[1]


def test_a_script_is_checked_with_its_lines(tmp_path: Path) -> None:
    script = "#!/bin/bash\nexport NCCL_IB_TIMEOUT=50\nsrun --export=ALL,NCCL_IB_HCA=a0,a1 x\n"
    (tmp_path / "train.sh").write_text(script)
    code, out, err = lint(tmp_path, "train.sh")
    assert code == 1
    assert "2 variables in train.sh: 2 errors" in err
    assert "train.sh:2: error: NCCL_IB_TIMEOUT=50: should be 1 to 31" in out
    assert "train.sh:3: error: NCCL_IB_HCA=a0: --export cuts the value" in out
    (tmp_path / "train.sh").write_text("#!/bin/bash\nsrun x\n")
    code, out, err = lint(tmp_path, "train.sh")
    assert (code, out) == (0, "")
    assert "no variable of NCCL" in err


def test_a_config_and_a_run_are_checked_with_their_lines(finished_copy: Path) -> None:
    text = "job:\n  env:\n    NCCL_TIMEOUT: '3'\n  setup: ['export NCCL_ALGO=rings']\n"
    (finished_copy / "c.yaml").write_text(text)
    code, out, _ = lint(finished_copy, "c.yaml")
    assert code == 1
    assert "c.yaml:3: error: NCCL_TIMEOUT=3" in out
    assert "c.yaml:4: error: NCCL_ALGO=rings" in out
    assert lint(finished_copy, "done")[0] == 0
    kept = finished_copy / "runs" / "done" / "config.yaml"
    for more in (
        "- export NCCL_IB_TIMEOUT=50",
        "- NCCL_DEBUG=WARN\n  - python x.py",
        "- |\n    export NCCL_IB_TIMEOUT=50",
    ):
        kept.write_text(f"job:\n  setup:\n  - module load x\n  {more}\n")
        out = lint(finished_copy, "done")[1]
        assert f"{kept}:{5 if '|' in more else 4}: " in out
    kept.write_text("command: [bash, -c, 'export NCCL_ALGO=rings; python t.py']\n")
    assert f"{kept}:1: error: NCCL_ALGO=rings" in lint(finished_copy, "done")[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "nccl lint"),
        (["lnt"], "did you mean lint"),
        (["lint", "--nccl", "new"], "2.27.5"),
        (["lint", "nothing.sh"], "nothing.sh"),
        (["advise", "train.sh"], "only lint does"),
        (["tune"], "--local 2"),
        (["tune", "--local", "1"], "2 to 64"),
        (["tune", "--local", "2", "--sizes", "8:x"], "--sizes 8:x"),
        (["tune", "--local", "2", "--seconds", "0"], "--seconds 0"),
        (["tune", "train.sh"], "only lint does"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert guarded(["nccl", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_the_advice_for_this_node_has_settings_and_remarks(tmp_path: Path) -> None:
    told = json.loads(jobs.hpcrun("nccl", "advise", "--json", cwd=tmp_path).stdout)
    assert sorted(told) == ["remarks", "set"]
    shell = jobs.hpcrun("nccl", "advise", cwd=tmp_path)
    assert shell.returncode == 0
    assert shell.stdout.startswith("# ")


def test_a_submission_names_the_settings_to_look_at(folder: Path) -> None:
    def told(*overrides: str, **env: str) -> str:
        words = ("submit", "--dry-run", "-c", "empty.yaml", "--name", "a", *overrides)
        done = jobs.hpcrun(*words, cwd=folder, env=env)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "NCCL" not in told("task=probe:Probe")
    assert "NCCL" not in told("task=probe:Probe", **CLEAN)
    text = told("task=probe:Probe", "job.env.NCCL_TIMEOUT=3", NCCL_DEBUG="INFO")
    assert "hpcrun: look at NCCL_TIMEOUT, NCCL_DEBUG: `hpcrun nccl lint` says why" in text
    replaced = told("task=probe:Probe", "job.env.NCCL_IB_TIMEOUT=22", NCCL_IB_TIMEOUT="50")
    assert "NCCL" not in replaced


def test_tune_reports_the_trials_of_this_machine(tmp_path: Path) -> None:
    names = list(own_interfaces())
    if len(names) != 1:
        pytest.skip(f"this machine has {len(names)} interfaces")
    # No interface remains to try: the default stays, whatever load the machine has.
    done = jobs.hpcrun(
        *("nccl", "tune", "--local", "2", "--backend", "gloo", "--collectives", "all_reduce"),
        *("--sizes", "8:1K:128", "--seconds", "0.01", "--deterministic"),
        "--json",
        cwd=tmp_path,
        env={"GLOO_SOCKET_IFNAME": names[0]},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["env"], report["ranks"], report["backend"]) == ({}, 2, "gloo")


def test_a_submission_looks_for_every_name_with_rules() -> None:
    assert all(map(OF_NCCL.match, (*PREFIXES, *PARTLY_KNOWN)))
