"""tools/bench/gpu.py: its requirements, missing libraries, and failed parts."""

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
if str(BENCH) not in sys.path:
    sys.path.insert(0, str(BENCH))

import gpu  # noqa: E402
import libraries  # noqa: E402
from gpulib.sizes import BF16, FP32, SIZES, kept_in  # noqa: E402

TINY = ["--sizes", "tiny", "--device", "cpu", "--no-compile"]
SITE = Path(str(metadata.distribution("torch").locate_file("")))


def offline(folder: Path) -> dict[str, str]:
    """An environment with a pip that finds only wheels in ``folder``."""
    return os.environ | {
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }  # fmt: skip


def wheel(folder: Path) -> Path:
    """A wheel of the library ``benchmarked`` 1.5 in ``folder``."""
    path = folder / "benchmarked-1.5-py3-none-any.whl"
    record = "benchmarked-1.5.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("benchmarked.py", "HERE = True\n")
        archive.writestr(
            f"{record}/METADATA", "Metadata-Version: 2.1\nName: benchmarked\nVersion: 1.5\n"
        )
        archive.writestr(
            f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{record}/RECORD", "")
    return path


def test_a_python_without_libraries_or_network_gets_one_line(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("torch", "pip"):
        (bare / name).symlink_to(SITE / name)
    environ = {**offline(tmp_path), "PYTHONPATH": str(bare)}
    done = subprocess.run(
        [sys.executable, "-S", BENCH / "gpu.py", *TINY],
        env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    told = done.stderr.splitlines()
    assert told[0].startswith("installing numpy, orjson, pydantic, tqdm, xxhash, pyyaml into ")
    assert told[1:] == [told[-1]]
    assert re.fullmatch(
        r"gpu: numpy, orjson, pydantic, tqdm, xxhash, pyyaml cannot be installed into \S+ \(ERROR: .*\); "
        rf"where there is a network: {re.escape(sys.executable)} -m pip install 'numpy>=\S+' 'orjson>=.*",
        told[-1],
    )
    assert list((tmp_path / "cache" / "hpcrun" / "libraries").iterdir()) == []


def test_a_python_without_torch_gets_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-S", BENCH / "gpu.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == f"gpu: {sys.executable} has no torch; run this with a Python that has\n"


def test_missing_libraries_are_installed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in offline(tmp_path).items():
        monkeypatch.setenv(name, value)
    wanted = {"benchmarked": "benchmarked>=1.2", "numpy": "numpy>=1.26"}
    assert libraries.lacking(wanted) == ["benchmarked>=1.2"]
    library = wheel(tmp_path)
    folder = libraries.provide(wanted)
    assert folder is not None
    assert (folder / "benchmarked.py").is_file()
    assert "installing benchmarked into " in capsys.readouterr().err
    library.unlink()
    assert libraries.provide(wanted) == folder
    assert capsys.readouterr().err == ""
    monkeypatch.syspath_prepend(folder)
    assert libraries.provide(wanted) is None
    assert libraries.lacking({"benchmarked": "benchmarked>=1.6"}) == ["benchmarked>=1.6"]


def test_a_python_without_pip_makes_an_environment_with_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "find_spec", lambda _name: None)
    made: list[list[str]] = []
    monkeypatch.setattr(libraries, "run", made.append)
    pip = libraries.pip_command(tmp_path / "spare")
    assert made == [[sys.executable, "-m", "venv", str(tmp_path / "spare")]]
    assert pip == [str(tmp_path / "spare" / "bin" / "python"), "-m", "pip"]


def test_the_bounds_are_those_of_the_package() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{needs}",' in project for needs in libraries.TRAINING.values())
    assert libraries.lacking(libraries.TRAINING) == []


def test_the_parts_import_no_other_dependency_of_the_package() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:3]; "
        "sys.modules.update(dict.fromkeys(sys.argv[3:])); import gpulib.parts"
    )
    others = ["submitit", "h5py", "rich", "psutil", "matplotlib", "scipy", "safetensors"]
    subprocess.run([sys.executable, "-c", program, BENCH, ROOT, *others], check=True)


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, answer: Callable[..., Any]) -> int:
    """Run gpu.py's main with ``answer`` instead of the measuring processes."""
    monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
    monkeypatch.setattr(gpu, "run_part", answer)
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    return gpu.main()


MACHINE = {"device": "NVIDIA X", "gigabytes": 80.0, "torch": "2.13", "cuda": "13.0"}
PARITY = {"equal": True, "first_difference": None, "torch_repeats": True, "overflows": 6}
WORLD = {"backend": "nccl", "furthest": {"ddp": 0.0, "fsdp": 2e-7}}


def test_the_largest_model_comes_last() -> None:
    wanted = gpu.arguments().parse_args([])
    order = [(job["part"], job["size"], job["batch"]) for job in gpu.jobs(wanted)]
    assert order[-4:] == [
        *(("deterministic", "1b", 8), ("checkpoint", "1b", 8)),
        *(("speed", "7b", 4), ("deterministic", "7b", 4)),
    ]
    wanted = gpu.arguments().parse_args(["--parts", "speed", "--sizes", "7b"])
    assert [job["part"] for job in gpu.jobs(wanted)] == ["speed"]


def test_a_failed_part_does_not_affect_the_other_parts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {
        "parity": {"machine": MACHINE, "figures": PARITY},
        "world": {"failed": "DistBackendError: NCCL error"},
    }
    wanted = ["--parts", "parity,world"]
    assert run(wanted, monkeypatch, lambda job, *_: told[job["part"]]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "NVIDIA X, 80 GB, torch 2.13, CUDA 13.0",
        "fp16 loss scaling equals torch's own loop, bit by bit, 6 overflows among 50 steps: yes",
    ]
    assert said.err.splitlines()[-1] == "gpu: 1 failed: world: DistBackendError: NCCL error"
    told["world"] = {"machine": MACHINE, "figures": WORLD}
    assert run([*wanted, "--json"], monkeypatch, lambda job, *_: told[job["part"]]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["part"] for line in lines] == ["parity", "world"]


def test_a_difference_is_a_failure_unless_torch_differs_from_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = {**PARITY, "equal": False, "first_difference": 3}
    for figures, code, line in (
        ({**differs, "wrong": "fp16 training differs"}, 1, "NO, from step 3 on"),
        ({**differs, "torch_repeats": False}, 0, "unknown: torch's own loop is not deterministic"),
    ):
        told = {"machine": MACHINE, "figures": figures}
        assert run(["--parts", "parity"], monkeypatch, lambda *_, told=told: told) == code
        assert line in capsys.readouterr().out


@pytest.mark.parametrize(("strict", "code", "said"), [(True, 0, "yes"), (False, 1, "NO")])
def test_different_bits_are_a_failure_only_in_deterministic_mode(
    strict: bool,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {
        "equal": {"true": strict, "warn": False, "false": False},
        "step_seconds": {"true": 0.012, "warn": 0.011, "false": 0.010},
        **({} if strict else {"wrong": "other bits"}),
    }
    told = {"machine": MACHINE, "figures": figures}
    assert run(["--parts", "repeat"], monkeypatch, lambda *_: told) == code
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"two equal trainings end with the same bits: {said} with train.deterministic=true, no with warn, "
        "no with false; a small model's step takes 1.20 x (true) and 1.10 x (warn) of what it does with false"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        ["--device", "gpu0"],
        ["--sizes", "70b"],
        ["--parts", "speed,all"],
        ["--steps", "0"],
        ["--dir", "/nowhere"],
    ],
)
def test_invalid_arguments_are_refused_before_any_part_runs(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(wrong, monkeypatch, lambda *_: pytest.fail("it ran"))
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.match(rf"gpu.py: error: (argument )?{wrong[0]}: ", last), last


def test_a_part_out_of_memory_repeats_with_half_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[int] = []

    def attempt(job: dict[str, Any], *_: Any) -> dict[str, Any]:
        batches.append(job["batch"])
        return {"failed": "OutOfMemoryError: CUDA out of memory.", "memory": True}

    assert run(["--parts", "speed", "--sizes", "1b"], monkeypatch, attempt) == 2
    assert batches == [8, 4, 2, 1]


def test_a_part_that_takes_too_long_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        [sys.executable, BENCH / "gpu.py", *TINY, "--parts", "parity", "--limit", "0.05"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "gpu: parity: not done after 0 s (see --limit and --no-compile)" in done.stderr


def test_the_precision_of_the_weights_fits_the_device() -> None:
    free = {"A100 40 GB": 42e9, "H100": 83.5e9, "H200": 149e9}
    assert {name: kept_in(SIZES["7b"], size) for name, size in free.items()} == {
        "A100 40 GB": None,
        "H100": "bf16",
        "H200": "fp32",
    }
    assert {kept_in(SIZES["1b"], size) for size in free.values()} == {"fp32"}
    assert SIZES["7b"].parameters * BF16 < 57e9 < 113e9 > SIZES["7b"].parameters * FP32


def only_torch(folder: Path) -> Path:
    """A folder with torch and the requirements of torch only."""
    folder.mkdir()
    found: set[str] = set()

    def link(name: str) -> None:
        if name in found:
            return
        found.add(name)
        distribution = metadata.distribution(name)
        for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(SITE / top)
        for needs in distribution.requires or ():
            required = re.match(r"[\w.-]+", needs)
            if "extra ==" not in needs and "platform_system" not in needs and required is not None:
                link(required.group().lower())

    link("torch")
    assert found.isdisjoint({"numpy", "orjson", "pydantic", "tqdm", "xxhash", "pyyaml"})
    return folder


@pytest.mark.slow
def test_a_python_with_only_torch_measures(tmp_path: Path) -> None:
    """Downloads missing libraries with pip's settings."""
    venv.create(tmp_path / "venv", with_pip=True)
    site = next((tmp_path / "venv" / "lib").glob("python3.*/site-packages"))
    (site / "torch.pth").write_text(f"{only_torch(tmp_path / 'torch')}\n")
    before = sorted(path.name for path in site.iterdir())
    environ = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": ""}

    def measure(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [tmp_path / "venv" / "bin" / "python", BENCH / "gpu.py", *TINY, "--steps", "2", *more],
            env=environ, capture_output=True, text=True, cwd=tmp_path, check=False,
        )  # fmt: skip

    done = measure()
    assert done.returncode == 0, done.stderr
    assert "installing numpy, orjson, pydantic, tqdm, xxhash, pyyaml into " in done.stderr
    assert len(done.stdout.splitlines()) == 7, done.stdout
    assert "NO" not in done.stdout
    again = measure("--parts", "parity", "--json")
    assert again.returncode == 0, again.stderr
    assert "installing" not in again.stderr
    assert json.loads(again.stdout)["figures"]["equal"] is True
    assert sorted(path.name for path in site.iterdir()) == before
