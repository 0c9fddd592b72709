"""The corpus is the same everywhere, complete or refused, and never causes a traceback."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from hpcrun.config import Config
from hpcrun.config.tasks.language_model import LanguageModelData
from hpcrun.errors import UserError
from hpcrun.tasks import corpus
from hpcrun.tasks.language_model import LanguageModel

SMALL = LanguageModelData(max_bytes=10**6, validation_fraction=0.3)


def texts(library: Path, max_bytes: int = 10**6) -> tuple[dict[str, bytes], dict[str, bytes]]:
    files, held_out = corpus.choose(library, max_bytes, 0.3)
    found = dict(files)
    return (
        {name: text for name, text in found.items() if name not in held_out},
        {name: text for name, text in found.items() if name in held_out},
    )


def task(folder: Path) -> LanguageModel:
    return LanguageModel(Config.model_validate({"data": {"path": str(folder)}}))


def test_every_source_is_in_exactly_one_split(library: Path, packed: Path):
    train, validation = texts(library)
    assert not train.keys() & validation.keys()
    assert {**train, **validation} == {
        path.relative_to(library).as_posix(): path.read_bytes() for path in library.rglob("*.py")
    }
    for split, wanted in (("train", train), ("validation", validation)):
        assert corpus.split_path(packed, split).read_bytes() == b"".join(wanted.values())


def test_packing_twice_gives_the_same_bytes(library: Path, packed: Path, tmp_path: Path):
    corpus.pack(library, tmp_path / "same", SMALL)
    for split in corpus.SPLITS:
        again = corpus.split_path(tmp_path / "same", split).read_bytes()
        assert again == corpus.split_path(packed, split).read_bytes()


def test_a_new_module_moves_no_other_file_between_the_splits(library: Path):
    _, before = texts(library)
    for number in range(10):
        (library / f"new{number}.py").write_text("pass\n")
    _, after = texts(library)
    assert {name for name in after if "new" not in name} == before.keys()


def test_the_cap_takes_a_beginning_of_the_sources(library: Path):
    few, everything = (corpus.choose(library, size, 0.3)[0] for size in (3000, 10**6))
    assert few == everything[: len(few)]
    assert 1000 < sum(len(text) for _, text in few) <= 3000


def test_tests_fixtures_and_installed_packages_are_left_out(library: Path):
    before = corpus.sources(library)
    for name in ("test", "lib2to3", "site-packages", "package/tests"):
        (library / name).mkdir()
        (library / name / "other.py").write_text("pass\n")
    (library / "_sysconfigdata__linux_.py").write_text("build = 1\n")
    (library / "notes.txt").write_text("no code\n")
    assert corpus.sources(library) == before == sorted(before)


def test_the_unigram_entropy_is_that_of_the_smoothed_counts():
    train = np.frombuffer(b"aaab", dtype=np.uint8)
    validation = np.frombuffer(b"ac", dtype=np.uint8)
    expected = -(np.log(4 / 260) + np.log(1 / 260)) / 2
    assert corpus.unigram_entropy(train, validation) == pytest.approx(expected, abs=1e-12)
    # Four equally frequent letters: ln 4 nats, minus the share that smoothing gives to the other 252.
    text = np.frombuffer(b"abcd" * 100_000, dtype=np.uint8)
    assert corpus.unigram_entropy(text, text) == pytest.approx(np.log(4), abs=1e-3)


def test_a_foreign_file_at_the_path_is_kept(tmp_path: Path):
    place = tmp_path / "thesis.bin"
    place.write_bytes(b"five years of work")
    with pytest.raises(UserError, match=r"thesis\.bin/train\.bin: cannot be read: "):
        task(place).train_dataset()
    assert place.read_bytes() == b"five years of work"


def test_a_chosen_corpus_is_used_or_packed_there(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(corpus, "standard_library", lambda: library)
    place = tmp_path / "new folder" / "text"
    task(place).prepare()
    monkeypatch.setattr(corpus, "standard_library", lambda: pytest.fail("packed again"))
    task(place).prepare()
    assert len(task(place).train_dataset()) > 0


def _pack(library: Path, place: Path) -> None:
    corpus.pack(library, place, SMALL)


def test_two_concurrent_packings_leave_one_complete_corpus(library: Path, tmp_path: Path):
    place = tmp_path / "shared" / "corpus"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_pack, args=(library, place)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    task(place).prepare()
    assert list(place.parent.iterdir()) == [place]


def test_a_place_that_cannot_be_written_is_one_line(library: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written.*XDG_CACHE_HOME") as caught:
        corpus.pack(library, tmp_path / "file" / "corpus", SMALL)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("files", [2, 5])
def test_each_split_has_a_file_with_text_whatever_the_fraction(
    tmp_path: Path, files: int, fraction: float
):
    for number in range(files):
        (tmp_path / f"module{number}.py").write_text("pass\n")
        (tmp_path / f"empty{number}.py").write_text("")
    taken, held_out = corpus.choose(tmp_path, 10**6, fraction)
    assert len(taken) == files
    assert len(held_out) == (1 if fraction < 0.5 else files - 1)


@pytest.mark.parametrize(("max_bytes", "fitting"), [(10, 0), (500, 1)])
def test_a_cap_without_two_files_is_refused(library: Path, max_bytes: int, fitting: int):
    with pytest.raises(UserError, match=rf"is enough for {fitting} of .*; raise data\.max_bytes"):
        corpus.choose(library, max_bytes, 0.3)


def test_a_python_without_sources_is_recognized(tmp_path: Path):
    with pytest.raises(UserError, match=r"no Python sources.*data\.path"):
        corpus.sources(tmp_path)


def test_the_cache_is_where_the_xdg_specification_says():
    def place(**environ: str) -> Path:
        return corpus.default_path(100, 0.5, environ).parent

    assert place(XDG_CACHE_HOME="/scratch/c", HOME="/home/u") == Path("/scratch/c/hpcrun")
    assert place(HOME="/home/u") == Path("/home/u/.cache/hpcrun")
    assert place(XDG_CACHE_HOME="relative", HOME="/home/u") == Path("/home/u/.cache/hpcrun")
    places = {corpus.default_path(*options) for options in ((1, 0.1), (2, 0.1), (1, 0.2))}
    assert len(places) == 3
