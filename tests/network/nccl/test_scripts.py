"""The settings that a job would get from a script, each with its line."""

from __future__ import annotations

import pytest

from hpcrun.network.nccl.files import export_findings, read_text


def values(text: str) -> list[tuple[str, str | None]]:
    """Return name and value of each setting in a script."""
    return [(setting.name, setting.value) for setting in read_text(text, "s").settings]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export NCCL_DEBUG=INFO", [("NCCL_DEBUG", "INFO")]),
        ("export NCCL_DEBUG=INFO  # for now", [("NCCL_DEBUG", "INFO")]),
        ("# export NCCL_DEBUG=INFO", []),
        ('export NCCL_NET="AWS Libfabric"', [("NCCL_NET", "AWS Libfabric")]),
        ("export NCCL_NET='AWS Libfabric' A=1", [("NCCL_NET", "AWS Libfabric"), ("A", "1")]),
        ("export NCCL_IB_HCA==mlx5_0,mlx5_1", [("NCCL_IB_HCA", "=mlx5_0,mlx5_1")]),
        ("NCCL_DEBUG=INFO srun python a.py --x=3", [("NCCL_DEBUG", "INFO")]),
        ("env NCCL_DEBUG=INFO B=2 python a.py", [("NCCL_DEBUG", "INFO"), ("B", "2")]),
        ("if true; then export A=1; fi", [("A", "1")]),
        ("echo NCCL_DEBUG=INFO", []),
        ("export A=${A:-18}", [("A", "18")]),
        ('export A="${A:-18}"', [("A", "18")]),
        ("export A=$(cat x y)", [("A", None)]),
        ("export B=`z w`", [("B", None)]),
        ("export A=pre$HOME", [("A", None)]),
        ("ENV NCCL_DEBUG=INFO", [("NCCL_DEBUG", "INFO")]),
        ("export A=1 \\\n  B=2", [("A", "1"), ("B", "2")]),
        ('os.environ["NCCL_DEBUG"] = "INFO"', [("NCCL_DEBUG", "INFO")]),
        ("os.environ.setdefault('A', '1')", [("A", "1")]),
        ('os.environ["A"] = str(3)', [("A", "3")]),
        ('os.environ["A"] = value', [("A", None)]),
        ('if os.environ["A"] == "1":', []),
        ("export A='not closed", []),
    ],
)
def test_what_a_line_sets(line: str, expected: list[tuple[str, str | None]]) -> None:
    assert values(line) == expected


def test_a_setting_names_its_line() -> None:
    text = "#!/bin/bash\n\nexport A=1 \\\n   B=2\nexport C=3\n"
    assert [setting.where for setting in read_text(text, "a.sh").settings] == [
        *("a.sh:3", "a.sh:3", "a.sh:5")
    ]


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("srun --export=ALL,NCCL_IB_HCA=mlx5_0,mlx5_1 python a.py", ["mlx5_1"]),
        ("#SBATCH --export=NCCL_SOCKET_IFNAME=eth0,eth1", ["eth1"]),
        ('srun --export="ALL,NCCL_IB_HCA==mlx5_0,mlx5_1,mlx5_2" a', ["mlx5_1"]),
        ("srun --export=ALL python a.py", []),
        ("srun --export=ALL,NCCL_DEBUG=WARN,PATH python a.py", []),
        ("srun --export ALL,NCCL_DEBUG=WARN python a.py", []),
        ("sbatch --export=NONE x.sh", []),
        ("# srun --export=ALL,NCCL_IB_HCA=mlx5_0,mlx5_1", []),
    ],
)
def test_export_lists_cut_values_at_commas(line: str, lost: list[str]) -> None:
    findings = export_findings(line, "a.sh")
    assert [one.level for one in findings] == ["error"] * len(lost)
    assert all(f"not '{word}'" in one.message for word, one in zip(lost, findings, strict=True))
