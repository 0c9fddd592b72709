"""HDF5 and NPZ files of simulations: samples of several ranks become one table without loss."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpcrun.results.store import ResultsFile
from tests.results.test_mapping import mapped, metrics, write

MERGED = "metrics: 'rank*'\nstep: sample\nrows: samples\n"
RANKS = {"rank0_dot_csv": "sample,x\n4,4\n0,0\n2,2\n", "rank1_dot_csv": "sample,x\n1,1\n3,3\n5,5\n"}


def simulated(folder: Path, rank: int, **datasets: Any) -> Path:
    """Write the file of a rank of two, with three samples; ``datasets`` replace or add values."""
    path = folder / f"rank{rank}.h5"
    with h5py.File(path, "w") as file:
        file.attrs.update({"rank": rank, "viscosity": 1.5e-5, "total": 6})
        file.create_group("solver").attrs["name"] = "multigrid"
        values = {
            "out/sample": np.arange(rank, 6, 2),
            "out/energy": np.arange(3, dtype=">f4") + rank,
            "out/restart": [7, 8, 9],
            "out/velocity": np.arange(9.0).reshape(3, 3) + 10 * rank,
        }
        for name, value in (values | datasets).items():
            file[name] = value
        file["link"] = h5py.SoftLink("/out/restart")
        file["out/energy"].attrs.update({"units": b"J", "long_name": "kinetic energy"})
    return path


NAMED = (
    MERGED
    + """
datasets: {sample: out/sample, energy: /out/energy, velocity: out/velocity, restart: link, rank: "@rank"}
config: rank0.h5
samples: total
"""
)


def refused(folder: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the lines of an aggregation that writes nothing."""
    before = (folder / "results.h5").read_bytes() if (folder / "results.h5").exists() else None
    assert mapped(folder, text, "--fresh") == 2
    after = (folder / "results.h5").read_bytes() if (folder / "results.h5").exists() else None
    assert after == before
    return capsys.readouterr().err.replace(f"hpcrun: {folder.resolve()}", "")


def test_ranks_of_a_simulation_are_one_table(tmp_path: Path) -> None:
    run = write(tmp_path, "a")
    for rank in range(2):
        simulated(run, rank)
    assert mapped(tmp_path, NAMED) == 0
    found = metrics(tmp_path)
    assert found["step"].tolist() == list(range(6))
    assert found["energy"].tolist() == [0, 1, 1, 2, 2, 3]
    assert found["rank"].tolist() == [0, 1] * 3
    assert found["restart"].tolist() == [7, 7, 8, 8, 9, 9]
    assert found["velocity.2"].tolist() == [2, 12, 5, 15, 8, 18]
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.units()["energy"] == "J"
        assert store.config("a")["viscosity"] == 1.5e-5
        assert store.config("a")["solver.name"] == "multigrid"


def test_an_axis_complex_numbers_texts_and_records_are_columns(tmp_path: Path) -> None:
    run = write(tmp_path, "a")
    np.savez(run / "rank0.npz", sample=[[0, 1]], field=np.array([[1 + 2j, 3]]), seed=7)
    with h5py.File(run / "table.h5", "w") as file:
        file["cells"] = np.array([(0, 0.5), (1, 1.5)], [("sample", "u4"), ("mass", "f8")])
        file["label"] = ["a", "é"]
    text = "metrics: rank0.npz\nstep: sample.0\naxis: 1\nrows: samples\ndatasets: {%s}"
    assert mapped(tmp_path, text % "sample: sample, field: field, seed: seed") == 0
    found = metrics(tmp_path)
    assert found.dtype.names == ("step", "field.0.real", "field.0.imag", "seed")
    assert found.tolist() == [(0, 1, 2, 7), (1, 3, 0, 7)]
    assert mapped(tmp_path, "metrics: table.h5\nstep: cells.sample\nrows: samples", "--fresh") == 0
    assert metrics(tmp_path).tolist() == [(0, 0.5, b"a"), (1, 1.5, "é".encode())]


def test_jobs_of_one_folder_merge_into_one_run(tmp_path: Path) -> None:
    for job in range(2):
        folder = write(tmp_path, f"job{job}")
        simulated(folder, job)
    text = NAMED.replace("rank*", "job*/rank*.h5").replace("config: rank0", "config: job0/rank0")
    assert mapped(tmp_path, "runs: .\n" + text) == 0
    assert metrics(tmp_path, "runs")["step"].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("datasets", "told"),
    [
        ({"out/sample": [1, 3, 4]}, "rank0.h5 and rank1.h5: 1 samples are there twice, such as 4; repair"),
        ({"out/sample": [1, 1, 5]}, "rank1.h5: 1 samples are there twice, such as 1; repair"),
        ({"out/sample": [1, 3, 6]}, "a: has 6 samples from 0 to 6, without 5"),
        ({"out/energy": [1.0]}, "rank1.h5: cannot be parsed: has datasets of different lengths"),
        ({"out/energy": ["?"] * 3}, 'energy: "?" in row 4 is no number, and read as NaN; also rows 5, 6'),
        ({"out/sample": [1.0, np.nan, 5]}, "has a row without a number in sample; see `step`"),
        ({"out/velocity": np.zeros((3, 700))}, "out/velocity has 700 values for each row"),
        ({"out/velocity": np.zeros(3, "V4")}, "has out/velocity of type |V4"),
    ],
)  # fmt: skip
def test_samples_that_are_lost_or_twice_write_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], datasets: dict[str, Any], told: str
) -> None:
    run = write(tmp_path, "a")
    simulated(run, 0)
    simulated(run, 1, **datasets)
    text = NAMED.replace("samples: total", "") if "a: has" in told else NAMED
    said = refused(tmp_path, text, capsys).splitlines()
    assert told in said[0]
    # Without this file, its samples are lost.
    assert [line for line in said[1:] if "a: has 3 samples from 0 to 4" not in line] == []


def test_each_loss_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(tmp_path, "a")
    simulated(run, 0)
    assert refused(tmp_path, NAMED, capsys) == (
        "/runs/a: has 3 samples from 0 to 4, without 1, and should have 6; repair the files, or leave the "
        "run out with `runs`, or correct `samples`\n"
    )
    assert "should have None" in refused(tmp_path, NAMED.replace("total", "totl"), capsys)
    assert mapped(tmp_path, NAMED + "\nstate: unfinished") == 0
    (run / "rank1.h5").write_bytes(simulated(run, 1).read_bytes()[:700])
    said = refused(tmp_path, NAMED, capsys)

    first, second = said.splitlines()
    assert first.startswith("/runs/a/rank1.h5: cannot be read: Unable to")
    assert "should have 6" in second
    with h5py.File(simulated(run, 1), "r+") as file:
        file["out/energy"].attrs["units"] = "eV"
    assert refused(tmp_path, NAMED, capsys) == (
        "/runs/a/rank1.h5: energy has the unit eV, and J in rank0.h5 /out/energy; convert one, or declare "
        "the unit in `units`\n"
    )
    assert mapped(tmp_path, NAMED + "\nunits: {energy: eV}") == 0
    missing = NAMED.replace("/out/energy", "/out/enrgy")
    assert "has no /out/enrgy, which `datasets` names; it has out/energy, out/restart" in refused(
        tmp_path, missing, capsys
    )


def test_a_virtual_dataset_without_its_files_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path, "a")
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource("gone.h5", "x", (3,))
    with h5py.File(run / "merged.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
        file["sample"] = range(3)
    text = "metrics: merged.h5\nstep: sample\nrows: samples"
    assert "x needs gone.h5, which is missing" in refused(tmp_path, text, capsys)


def test_samples_of_csv_files_are_all_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path, "a", **RANKS)
    assert mapped(tmp_path, MERGED) == 0
    found = metrics(tmp_path)
    assert found["step"].tolist() == found["x"].tolist() == list(range(6))
    assert "two columns for one name" in refused(tmp_path, MERGED + "rename: {x: step}", capsys)
    (run / "rank2.csv").write_text("sample,x\n7,")
    assert "rank2.csv: torn last line (2 bytes); repair" in refused(tmp_path, MERGED, capsys)
    (run / "rank2.csv").write_text("sample,x\n7,1\n")
    assert "from 0 to 7, without 6, and should have 8" in refused(tmp_path, MERGED, capsys)
    assert mapped(tmp_path, MERGED + "samples: 7") == 0


def test_shuffled_samples_need_their_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(tmp_path, "a")
    with h5py.File(run / "all.h5", "w") as file:
        file["sample"], file["x"] = [2, 0, 1], [2.0, 0.0, 1.0]
    text = "metrics: all.h5\nstep: sample\n"
    assert "all.h5: goes back to an earlier step" in refused(tmp_path, text, capsys)
    assert mapped(tmp_path, text + "rows: samples\n") == 0
    assert metrics(tmp_path)["x"].tolist() == [0.0, 1.0, 2.0]


def test_samples_are_compared_over_files_with_other_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {"rank0_dot_csv": "sample,e,p\n0,1,1\n", "rank1_dot_csv": "sample,e,q\n0,1,1\n"}
    write(tmp_path, "a", **ranks)
    assert "1 samples are there twice" in refused(tmp_path, MERGED, capsys)
