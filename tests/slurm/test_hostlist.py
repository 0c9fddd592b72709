"""Host lists, compared with ``scontrol show hostnames`` if it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcrun.errors import ClusterError
from hpcrun.slurm.notation import expand


@pytest.mark.parametrize(
    ("expression", "hosts"),
    [
        ("node1", "node1"),
        ("node[1-3]", "node1 node2 node3"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[8-011]", "n8 n9 n10 n11"),
        ("n[3,1-2,07]", "n3 n1 n2 n07"),
        ("n[99-101]", "n99 n100 n101"),
        ("tux[1],b[3-4]", "tux1 b3 b4"),
        ("z,a[2-3],m", "z a2 a3 m"),
        ("n1,n1", "n1 n1"),
        ("[1-3]", "1 2 3"),
        ("gpu-a.site_b[1-2]", "gpu-a.site_b1 gpu-a.site_b2"),
        ("rack[1-2]node[3-4]", "rack1node3 rack1node4 rack2node3 rack2node4"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
        ("n[1-2]3[4-5]", "n134 n135 n234 n235"),
        ("node-ib1,node-ib2", "node-ib1 node-ib2"),
        ("a b\tc\nd,,e,", "a b c d e"),
    ],
)
def test_every_bracket_form_expands_as_slurm_does(expression: str, hosts: str) -> None:
    assert expand(expression) == hosts.split()


@pytest.mark.parametrize(
    "expression",
    [
        *("n[]", "n[1,]", "n[,1]", "n[3-1]", "n[a-b]", "n[1-2-3]", "n[1-2:2]", "n[-1]", "n[1 2]"),
        *("a[[1]]", "n[1-3]x", "n[1-2]-ib", "a[1-2],b[1-2]c,d", "n[1-65537]", "n[0x1-2]"),
    ],
)
def test_what_scontrol_rejects_is_refused_in_one_line(expression: str) -> None:
    with pytest.raises(ClusterError) as refusal:
        expand(expression)
    assert expression in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "expression", ["n[1-", "n1]", "a]b[", "n[1-]", "n[+1-2]", "", ",", "n[1, 2]"]
)
def test_what_scontrol_lets_pass_as_rubbish_is_refused_too(expression: str) -> None:
    with pytest.raises(ClusterError):
        expand(expression)


numbers = st.builds(str.zfill, st.integers(0, 120).map(str), st.integers(1, 4))
ranges = st.tuples(numbers, st.integers(0, 12)).map(lambda t: f"{t[0]}-{int(t[0]) + t[1]}")
brackets = st.lists(numbers | ranges, min_size=1, max_size=3).map(lambda p: f"[{','.join(p)}]")
words = st.text("abz019.-_", max_size=4)
bracketed = st.lists(st.tuples(words, brackets), min_size=1, max_size=4).map(
    lambda pairs: "".join(word + bracket for word, bracket in pairs)
)
plain = st.text("abz01.-_", min_size=1, max_size=6)
valid = st.lists(bracketed | plain, min_size=1, max_size=3).map(",".join)
anything = st.text("ab01[],- ", min_size=1, max_size=12)


@pytest.fixture(scope="module")
def slurm_conf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """scontrol expands without a controller, but not without a configuration."""
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed")
    path = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    path.write_text("ClusterName=t\nSlurmctldHost=localhost\nNodeName=localhost\n")
    return path


def show_hostnames(expression: str, conf: Path) -> list[str] | None:
    # A name in front, because scontrol takes an expression that begins with "-" as an option.
    done = subprocess.run(
        ["scontrol", "show", "hostnames", f"first,{expression}"],
        env={**os.environ, "SLURM_CONF": str(conf)},
        capture_output=True,
        text=True,
        check=False,
    )
    return None if "Invalid hostlist" in done.stderr else done.stdout.split()[1:]


relaxed = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.slurm
@relaxed
@given(expression=valid)
def test_valid_lists_equal_scontrols_answer(expression: str, slurm_conf: Path) -> None:
    # Kept below 64-bit numbers at the end of a name, where scontrol's answer saturates.
    assert expand(expression) == show_hostnames(expression, slurm_conf)


@pytest.mark.slurm
@relaxed
@given(expression=anything)
def test_no_list_that_scontrol_rejects_is_expanded(expression: str, slurm_conf: Path) -> None:
    try:
        hosts = expand(expression)
    except ClusterError:
        return
    assert hosts == show_hostnames(expression, slurm_conf)
