"""A site's file: defaults below the profile, and rules that nothing switches off."""

from pathlib import Path

import pytest

from hpcrun import folders
from hpcrun.cli.main import guarded
from hpcrun.config import ConfigError
from hpcrun.config.site import read_site
from hpcrun.slurm.launch import planned

RULES = """\
job:
  partition: gpu
  env: {NCCL_IB_HCA: mlx5_0}
forbid:
  job.executor: [local, debug]
  job.partition: [debug*]
  job.sbatch_args: [--exclusive*]
  job.env: [LD_PRELOAD]
  job.env.TOKEN: [abc]
  watch.notify:
require:
  job.account:
  job.qos: [normal, long]
messages:
  job.account: the command `projects` lists your accounts
"""
GOOD = ["--account", "a", "--qos", "long", "--executor", "slurm"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder without a system file; ``$HPCRUN_SITE`` names a file in it."""
    monkeypatch.setattr(folders, "SITE_FILE", tmp_path / "etc.yaml")
    monkeypatch.setenv("HPCRUN_SITE", str(tmp_path / "site.yaml"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.yaml").write_text(RULES)
    return tmp_path


def submitted(*words: str) -> int:
    """Return the exit code of a submission that would only print its script."""
    return guarded(["submit", "--dry-run", *words])


def test_a_default_of_the_site_is_below_the_profile(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["config", "where", "job.account=a", "job.qos=long"]) == 0
    shown = capsys.readouterr().out
    assert ["job.partition", '"gpu"', f"{place}/site.yaml:2"] in [
        *map(str.split, shown.splitlines())
    ]
    (place / "config" / "hpcrun").mkdir(parents=True)
    (place / "config" / "hpcrun" / "default.yaml").write_text("job: {partition: mine}\n")
    assert submitted(*GOOD) == 0
    shown = capsys.readouterr().out
    assert "partition: mine" in shown
    assert submitted(*GOOD, "--profile", "") == 0
    assert "partition: gpu" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--executor", "local"], "--executor: job.executor: local is forbidden at this site"),
        (["--partition", "x,debug1"], "--partition: job.partition: debug1 is forbidden"),
        (["job.sbatch_args=[--exclusive=user]"], "job.sbatch_args: --exclusive=user is forbidden"),
        (["job.env.LD_PRELOAD=x"], "command line: job.env: LD_PRELOAD is forbidden"),
        (["job.env.TOKEN=abc"], "command line: job.env.TOKEN: is forbidden at this site"),
        (["watch.notify=env:URL"], "command line: watch.notify: may not be set at this site"),
        (["--qos", "nrmal"], "--qos: job.qos: should be normal or long at this site"),
        (["job.qos=null"], "site.yaml:13: job.qos: should be normal or long at this site; give"),
        (["job.account=null"], "job.account: is required at this site: the command `projects`"),
    ],
)
@pytest.mark.parametrize("profile", [[], ["--profile", ""]])
def test_a_rule_refuses_with_the_place_of_the_value(
    words: list[str], line: str, profile: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    good = ["job.account=a", "job.qos=long", "job.executor=slurm"]
    assert submitted(*good, *words, *profile) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert line in shown
    assert "abc" not in shown


@pytest.mark.parametrize(
    ("rules", "words", "line"),
    [
        ("forbid: {job.nodes: [8]}", ["--nodes", "7-8"], "--nodes: job.nodes: 8 is forbidden at"),
        (
            "forbid: {job.nodes: 6-7}",
            ["--nodes", "7"],
            "--nodes: job.nodes: 7 is forbidden at this",
        ),
        ("require: {job.nodes: [1-4]}", ["--nodes", "3-5"], "should be 1-4 at this site ("),
        ("forbid: {job.mem: 64G}", ["--mem", "65536m"], "--mem: job.mem: 65536M is forbidden at"),
        ("forbid: {job.mem: '2048'}", ["job.mem=2g"], "line: job.mem: 2G is forbidden at"),
        ("forbid: {job.time: 3-0}", ["--time", "72:00:00"], "--time: job.time: 3-00:00:00 is for"),
        ("require: {job.time: 90}", ["--time", "91"], "01:31:00"),
        ("forbid: {job.gpus: '4'}", ["--gpus", "a100:4"], "--gpus: job.gpus: 4 is forbidden at"),
        ("forbid: {job.exclude_hours: 1}", ["job.exclude_hours=1e0"], "hours: 1.0 is forbidden"),
        ("forbid: {job.constraint: v100}", ["--constraint", "a100|v100"], "v100 is forbidden"),
        ("require: {job.constraint: a&b}", ["--constraint", "a"], "should be a&b at this site ("),
    ],
)
def test_another_spelling_does_not_evade_a_rule(
    place: Path, rules: str, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "site.yaml").write_text(rules)
    assert submitted("--executor", "slurm", "train.batch_size=512", *words) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("require: {job.nodes: [1-4]}", ["--nodes", "2-3"]),
        ("require: {job.mem: [64G]}", ["--mem", "65536M"]),
        ("require: {job.time: [1-0, '60']}", ["--time", "1:00:00"]),
        ("require: {job.constraint: a&b}", ["--constraint", "a&b"]),
        ("require: {job.partition: [a, b]}", ["--partition", "b,a"]),
    ],
)
def test_a_rule_allows_every_spelling_of_its_values(
    place: Path, rules: str, words: list[str]
) -> None:
    (place / "site.yaml").write_text(rules)
    assert submitted("--executor", "slurm", "train.batch_size=512", *words) == 0


@pytest.mark.parametrize(("configured", "code"), [(True, 0), (False, 2)])
@pytest.mark.parametrize("more", [[], ["--sweep", "seed=1,2"]])
def test_a_required_executor_may_be_that_of_auto(
    place: Path,
    configured: bool,
    code: int,
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (place / "site.yaml").write_text("require: {job.executor: slurm}\nforbid: {job.executor: }\n")
    monkeypatch.setattr(planned.slurm, "configured", lambda: configured)
    assert submitted("--cpu", *more) == code
    assert ("should be slurm at this site (" in capsys.readouterr().err) is not configured


@pytest.mark.parametrize("more", [[], ["--sweep", "seed=1,2"]])
def test_auto_does_not_choose_a_forbidden_executor(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planned.slurm, "configured", lambda: False)
    words = ["--account", "a", "--qos", "long", "--nodes", "1", "--gpus", "1", "--cpu"]
    assert submitted(*words, *more) == 2
    assert "job.executor: local is forbidden at this site (" in capsys.readouterr().err


def test_the_rules_of_both_files_apply(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "etc.yaml").write_text("job: {partition: all, mem: 4G}\nforbid: {job.qos: [long]}\n")
    assert submitted(*GOOD) == 2
    assert "--qos: job.qos: long is forbidden at this site (" in capsys.readouterr().err
    assert submitted(*GOOD, "--qos", "normal") == 0
    shown = capsys.readouterr().out
    assert "partition: gpu" in shown
    assert "mem: 4G" in shown


def test_a_sweep_and_a_resume_obey_the_rules(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "site.yaml").unlink()
    (place / "etc.yaml").write_text("{}\n")
    here = ["--executor", "local", "--cpu"]
    monkeypatch.delenv("HPCRUN_SITE")
    assert guarded(["submit", "--prepare", "--name", "old", *here]) == 0
    (place / "etc.yaml").write_text("forbid: {job.cpu: true, seed: 7}\n")
    capsys.readouterr()
    assert guarded(["resume", "old", "--detach"]) == 2
    assert "runs/old/config.yaml:" in capsys.readouterr().err
    assert submitted("--executor", "slurm", "--sweep", "seed=6,7") == 2
    assert "seed: 7 is forbidden at this site" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {lr: 1}\n", "site.yaml:1: train: a site's file may only contain job, restarts,"),
        (
            "forbid: {job.partitoin: x}\n",
            "forbid: job.partitoin: unknown key; did you mean job.par",
        ),
        ("forbid: {job: x}\n", "forbid: job: is a section; name a key of it"),
        ("forbid: [job.mem]\n", "site.yaml:1: forbid: should be keys, such as"),
        ("forbid: {job.nodes: [8, many]}\n", "site.yaml:1: forbid: job.nodes: should be a whole"),
        ("forbid: {job.gpus: 'a100:4'}\n", "forbid: job.gpus: should be a whole number, not"),
        ("forbid: {job.account: [1e3]}\n", "forbid: job.account: should be text, in quotes if"),
        ("forbid: {job.executor: auto}\n", "forbid: job.executor: name the executor that auto"),
        ("forbid: {job.mem: [null]}\n", "forbid: job.mem: a value may not be null; use require"),
        ("messages: {job.mem: x}\n", "messages: job.mem: no rule of this file is about this key"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(place: Path, text: str, line: str) -> None:
    (place / "site.yaml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_site({"HPCRUN_SITE": str(place / "site.yaml")})
    assert line in str(refused.value)


def test_an_empty_variable_does_not_switch_rules_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HPCRUN_SITE", "")
    assert submitted("--executor", "slurm") == 2
    assert capsys.readouterr().err == (
        "hpcrun: $HPCRUN_SITE: is empty; name the site's file, or unset the variable\n"
    )


def test_a_missing_file_of_the_variable_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"^\$HPCRUN_SITE: no such file .*none.yaml; correct"):
        read_site({"HPCRUN_SITE": str(place / "none.yaml")})


def test_defaults_that_a_config_replaces_may_contradict_each_other(place: Path) -> None:
    text = "job: {tasks_per_node: 1, gpus: 2}\nforbid: {job.exclusive: true}\n"
    (place / "site.yaml").write_text(text)
    assert submitted("--gpus", "1", "--executor", "local") == 0
