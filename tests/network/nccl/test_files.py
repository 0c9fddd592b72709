"""The variables that files of all kinds set: launchers, containers, YAML, Python and logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcrun.errors import UserError
from hpcrun.network.nccl.files import read_file
from hpcrun.network.nccl.lint import by_severity, lint


def checked(folder: Path, name: str, text: str) -> list[str]:
    """Return level, name and value of each error and warning in a file, with its line."""
    path = folder / name
    path.write_text(text)
    reading = read_file(path)
    findings = by_severity([*reading.findings, *lint(reading.settings, "2.30.7")])
    return [
        f"{one.setting.where.rpartition(':')[2]} {one.level} {one.setting.name}={one.setting.value}"
        for one in findings
        if one.level != "note"
    ]


LINES = [
    "mpirun -x NCCL_IB_TIMEOUT=50 -np 2 python x.py",
    "mpirun -np 2 -x NCCL_NET=Socket -x PATH -x NCCL_IB_TIMEOUT=50 ./a",
    "mpiexec -genv NCCL_IB_TIMEOUT 50 -n 2 ./a",
    "mpiexec -n 2 -env NCCL_IB_TIMEOUT 50 ./a",
    "srun env NCCL_IB_TIMEOUT=50 python x.py",
    "srun env -u PATH NCCL_IB_TIMEOUT=50 python x.py",
    "srun --export=ALL,NCCL_IB_TIMEOUT=50 python x.py",
    "srun bash -c 'export NCCL_IB_TIMEOUT=50; python x.py'",
    'srun sh -c "NCCL_IB_TIMEOUT=50 python x.py"',
    "sbatch --wrap='export NCCL_IB_TIMEOUT=50; srun python x.py'",
    "ssh node2 'cd /tmp && NCCL_IB_TIMEOUT=50 python x.py'",
    "docker run -e NCCL_IB_TIMEOUT=50 img python x.py",
    "podman run --rm --env=NCCL_IB_TIMEOUT=50 img python x.py",
    "docker run --env NCCL_IB_TIMEOUT=50 img python x.py",
    "docker exec -eNCCL_IB_TIMEOUT=50 box python x.py",
    "apptainer exec --nv --env NCCL_IB_TIMEOUT=50 img.sif python x.py",
    "singularity exec --env NCCL_DEBUG=WARN,NCCL_IB_TIMEOUT=50 img.sif python x.py",
    "apptainer run --env=NCCL_DEBUG=WARN,NCCL_IB_TIMEOUT=50 img.sif",
    "export APPTAINERENV_NCCL_IB_TIMEOUT=50",
    "export SINGULARITYENV_NCCL_IB_TIMEOUT=50",
    "APPTAINERENV_NCCL_IB_TIMEOUT=50 apptainer run x.sif",
    "setenv NCCL_IB_TIMEOUT 50",
    'setenv("NCCL_IB_TIMEOUT", "50")',
    "set -gx NCCL_IB_TIMEOUT 50",
    "conda env config vars set NCCL_IB_TIMEOUT=50",
    "jsrun -E NCCL_IB_TIMEOUT=50 ./a",
    "#PBS -v NCCL_DEBUG=WARN,NCCL_IB_TIMEOUT=50",
    "bsub -env 'all, NCCL_IB_TIMEOUT=50' ./a",
    "kubectl set env job/x NCCL_IB_TIMEOUT=50",
    "ENV NCCL_IB_TIMEOUT 50",
    "ENV A=1 NCCL_IB_TIMEOUT=50",
    "if true; then NCCL_IB_TIMEOUT=50 python x.py; fi",
    "for n in 1 2; do export NCCL_IB_TIMEOUT=50; done",
    "echo 'export NCCL_IB_TIMEOUT=50' >> ~/.bashrc",
    """ray job submit --runtime-env-json='{"env_vars": {"NCCL_IB_TIMEOUT": "50"}}'""",
    "os.environ['NCCL_IB_TIMEOUT'] = '50'",
    "node1:71:90 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 50.",
]


def test_every_form_of_a_line_is_read(tmp_path: Path) -> None:
    found = checked(tmp_path, "all.sh", "\n".join(LINES))
    wrong = {line.partition(" ")[0] for line in found if "error NCCL_IB_TIMEOUT=50" in line}
    # Each export replaces the one before; the other lines are of one command each.
    for number, line in enumerate(LINES, start=1):
        if str(number) not in wrong:
            assert checked(tmp_path, "one.sh", line) == ["1 error NCCL_IB_TIMEOUT=50"], line


FILES = {
    "pod.yaml": 'kind: Pod\nspec:\n  containers:\n  - env:\n    - name: NCCL_IB_TIMEOUT\n      value: "50"\n',
    "ray.yaml": "runtime_env:\n  env_vars:\n    NCCL_DEBUG: WARN\n    x: y\n    NCCL_IB_TIMEOUT: 50\n",
    "compose.yml": "services:\n  a:\n    image: b\n    environment:\n    - NCCL_IB_TIMEOUT=50\n",
    "sky.yaml": "envs: {a: b}\nrun: |\n  cd x\n\n  export NCCL_IB_TIMEOUT=50\n  python a.py\n",
    "args.yaml": "command:\n- bash\n- -c\n- a\n- export NCCL_IB_TIMEOUT=50; python x.py\n",
    "task.json": '{"a": 1,\n"b": 2,\n"c": 3,\n"environment": {\n"NCCL_IB_TIMEOUT": "50"}}',
    "list.env": "# of the site\nNCCL_DEBUG=WARN\nA=1\n\nNCCL_IB_TIMEOUT=50\n",
    "set.py": "import os\n\nA = 1\nB = 2\nos.environ['NCCL_IB_TIMEOUT'] = str(50)\n",
    "more.py": "import os\nos.environ.update(\n  {\n    'A': '1',\n    'NCCL_IB_TIMEOUT': '50',\n  }\n)\n",
    "call.py": "f(\n    a,\n    b,\n    c=1,\n    env=dict(NCCL_IB_TIMEOUT='50'),\n)\n",
    "Dockerfile": "FROM a\nENV A=1 \\\n    B=2\nRUN x\nENV NCCL_DEBUG=WARN \\\n  NCCL_IB_TIMEOUT=50\n",
    "node.log": "\n\n\n\nn1:1:2 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 50.\n" * 3,
    "job.slurm": "#!/bin/bash\n#SBATCH -N2\n\ncat <<EOF > env.sh\nexport NCCL_IB_TIMEOUT=50\nEOF\n",
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_all_kinds_are_read(tmp_path: Path, name: str) -> None:
    assert checked(tmp_path, name, FILES[name]) == ["5 error NCCL_IB_TIMEOUT=50"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NCCL_IB_TIMEOUT=22\npython a.py", ["1 warning NCCL_IB_TIMEOUT=22"]),
        ("#!/bin/sh\nGLOO_SOCKET_IFNAME=eth0; srun a", ["2 warning GLOO_SOCKET_IFNAME=eth0"]),
        ("NCCL_IB_TIMEOUT=22\nexport NCCL_IB_TIMEOUT\npython a.py", []),
        ("set -a\nNCCL_IB_TIMEOUT=22\nset +a\npython a.py", []),
        ("T=22\nNCCL_IB_TIMEOUT=22\nmpirun -x NCCL_IB_TIMEOUT a", []),
        ("NCCL_DEBUG=WARN\nsrun --export=ALL,NCCL_DEBUG=$NCCL_DEBUG a", []),
        ("NCCL_IB_TIMEOUT=22\nNCCL_DEBUG=WARN\n", []),
        ("nccl_tests=/opt/x\n$nccl_tests/all_reduce_perf", []),
        ("nccl_debug=WARN\nexport NCCL_DEBUG=$nccl_debug\npython a.py", []),
        ("export NCCL_IB_TIMEOUT = 22", ["1 error NCCL_IB_TIMEOUT=22"]),
        ("export NCCL_IB_HCA=mlx5_4, mlx5_5", ["1 error NCCL_IB_HCA=mlx5_4,"]),
        ("srun env NCCL_SOCKET_IFNAME=eth0, eth4 a", ["1 error NCCL_SOCKET_IFNAME=eth0,"]),
        ("export nccl_debug=WARN", ["1 error nccl_debug=WARN"]),
        ("grep NCCL_IB_TIMEOUT=50 log; echo NCCL_IB_TIMEOUT=50", []),
        ('if [ "$NCCL_IB_TIMEOUT" = 50 ]; then a; fi', []),
        ("export NCCL_MIN_CTAS=64 NCCL_MAX_CTAS=32", ["1 error NCCL_MIN_CTAS=64"]),
        ("export NCCL_DEBUG_SUBSYS=INITS NCCL_DEBUG=WARN", ["1 error NCCL_DEBUG_SUBSYS=INITS"]),
    ],
)
def test_what_a_shell_makes_of_a_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    about = {line.rpartition(" ")[2] for line in expected}
    found = [
        line
        for line in checked(tmp_path, "a.sh", text)
        if not expected or line in expected or line.rpartition(" ")[2] not in about
    ]
    tuning = ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_DEBUG_SUBSYS")
    assert [
        line for line in found if line in expected or not any(t in line for t in tuning)
    ] == expected


def test_the_file_of_a_container_has_no_quotes(tmp_path: Path) -> None:
    (tmp_path / "job.env").write_text('# a list\nNCCL_P2P_LEVEL="NVL"\nNCCL_IB_TIMEOUT=22\n')
    found = checked(tmp_path, "a.sh", "docker run --env-file=job.env img\n")
    assert found[0] == '2 error NCCL_P2P_LEVEL="NVL"'
    assert checked(tmp_path, "a.sh", "docker run --env-file absent.env img\n") == []


def test_what_is_no_yaml_is_read_as_text(tmp_path: Path) -> None:
    template = "{{- if x }}\nargs:\n- 'mpirun -x NCCL_DEBUG=WARN -x\n  NCCL_IB_TIMEOUT=50 a'\n"
    assert checked(tmp_path, "x.yaml", template) == ["4 error NCCL_IB_TIMEOUT=50"]
    chart = "{{- if .Values.x }}\nexport NCCL_IB_TIMEOUT=50\n{{- end }}\n"
    assert checked(tmp_path, "chart.yaml", chart) == ["2 error NCCL_IB_TIMEOUT=50"]
    deep = "- " * 2000 + "NCCL_IB_TIMEOUT=50\n"
    assert checked(tmp_path, "deep.yaml", deep) == []
    assert checked(tmp_path, "broken.py", "export NCCL_IB_TIMEOUT=50") == [
        "1 error NCCL_IB_TIMEOUT=50"
    ]


def test_a_large_file_is_refused_unless_it_is_a_log(tmp_path: Path) -> None:
    line = "n1:1:2 [0] NCCL INFO NCCL_IB_TIMEOUT set by environment to 50.\n"
    assert checked(tmp_path, "x.out", line + "x" * (1 << 20)) == ["1 error NCCL_IB_TIMEOUT=50"]
    with pytest.raises(UserError, match="larger than 1 MiB"):
        checked(tmp_path, "y.out", "x" * (1 << 21))
