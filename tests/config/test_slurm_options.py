"""Options of sbatch and srun are read in every form that the programs take."""

from __future__ import annotations

import pytest

from hpcrun.config.slurm_options import joined_items, parse_options


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (["--signal=B:USR1@60"], [("signal", "B:USR1@60")]),
        (["--sig=R:10@60"], [("signal", "R:10@60")]),
        (["--ntasks-per-n=2"], [("ntasks-per-node", "2")]),
        (["-N2"], [("nodes", "2")]),
        (["-N", "2"], [("nodes", "2")]),
        (["-n 1"], [("ntasks", "1")]),
        (["--ntasks", "1", "-H"], [("ntasks", "1"), ("hold", None)]),
        (["--hold", "--ntasks=1"], [("hold", None), ("ntasks", "1")]),
        (["--ntasks='1'"], [("ntasks", "1")]),
        (['-J "a b" -n 1'], [("job-name", "a b"), ("ntasks", "1")]),
        (["-vQn1"], [("verbose", None), ("quiet", None), ("ntasks", "1")]),
        (["--hold --ntasks=1"], [("hold", None), ("ntasks", "1")]),
        (["--comment=a --ntasks=1"], [("comment", "a --ntasks=1")]),
        (["-k", "-t", "5"], [("no-kill", None), ("time", "5")]),
        (["--no-kill=off"], [("no-kill", "off")]),
        (["--comment"], [("comment", None)]),
        (["--no"], [("no", None)]),
        (["--kill", "0"], [("kill-on-invalid-dep", "0")]),
        (["-J 'a"], [("job-name", "'a")]),
    ],
)
def test_an_option_has_its_long_name_and_value(
    items: list[str], found: list[tuple[str, str | None]]
) -> None:
    assert [(one.name, one.value) for one in parse_options("sbatch", items)] == found


def test_letters_mean_what_their_program_means() -> None:
    def told(program: str, item: str) -> list[tuple[str, str | None]]:
        return [(one.name, one.value) for one in parse_options(program, [item])]  # type: ignore[arg-type]

    assert told("srun", "-K0") == [("kill-on-bad-exit", "0")]
    assert told("srun", "-lW5") == [("label", None), ("wait", "5")]
    assert told("sbatch", "-Wn1") == [("wait", None), ("ntasks", "1")]
    assert told("srun", "--kill=0") == [("kill-on-bad-exit", "0")]


@pytest.mark.parametrize(
    ("items", "joined"),
    [
        (["--ntasks", "1"], ["--ntasks=1"]),
        (["-n", 1, "--hold"], ["-n1", "--hold"]),
        (["--hold", "x"], ["--hold", "x"]),
        (["x"], ["x"]),
        (["--comment=a", "b"], ["--comment=a", "b"]),
        ("--hold", "--hold"),
        ([["-n"], 1], [["-n"], 1]),
    ],
)
def test_a_word_joins_the_option_that_needs_it(items: object, joined: object) -> None:
    assert joined_items("sbatch", items) == joined
