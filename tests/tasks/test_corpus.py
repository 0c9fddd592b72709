"""The corpus is the same everywhere, complete or refused, and never causes a traceback."""

import multiprocessing
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from hpcrun.tasks import language_model as corpus


def texts(library: Path, split: str, max_bytes: int = 10**6) -> dict[str, bytes]:
    return dict(corpus.choose(library, max_bytes, 0.3)[split])


def test_every_source_is_in_exactly_one_split_with_its_own_bytes(library: Path, packed):
    train, validation = texts(library, "train"), texts(library, "validation")
    assert not train.keys() & validation.keys()
    assert {**train, **validation} == {
        path.relative_to(library).as_posix(): path.read_bytes() for path in library.rglob("*.py")
    }
    assert packed.open("train").tobytes() == b"".join(train.values())
    assert packed.open("validation").tobytes() == b"".join(validation.values())


def test_packing_twice_gives_the_same_file(library: Path, packed, tmp_path: Path):
    again = corpus.pack(library, tmp_path / "again.bin", 10**6, 0.3)
    assert again.path.read_bytes() == packed.path.read_bytes()
    assert again.sha256 == packed.sha256


def test_a_changed_source_changes_the_hash(library: Path, packed, tmp_path: Path):
    (library / "module1.py").write_text("x = 1\n")
    assert corpus.pack(library, tmp_path / "b.bin", 10**6, 0.3).sha256 != packed.sha256


def test_a_new_module_moves_no_other_file_between_the_splits(library: Path):
    before = texts(library, "validation")
    for number in range(10):
        (library / f"new{number}.py").write_text("pass\n")
    after = texts(library, "validation")
    assert {name for name in after if "new" not in name} == before.keys()


def test_the_cap_is_kept_and_takes_a_beginning_of_what_there_is(library: Path, tmp_path: Path):
    capped = corpus.pack(library, tmp_path / "b.bin", 3000, 0.3)
    assert 1000 < capped.train_bytes + capped.validation_bytes <= 3000
    for split in corpus.SPLITS:
        few, all_of_them = texts(library, split, 3000), texts(library, split)
        assert list(few.items()) == list(all_of_them.items())[: len(few)]


def test_tests_fixtures_and_installed_packages_are_left_out(library: Path):
    before = corpus.sources(library)
    for name in ("test", "lib2to3", "site-packages", "package/tests"):
        (library / name).mkdir()
        (library / name / "other.py").write_text("pass\n")
    (library / "_sysconfigdata__linux_.py").write_text("build = 1\n")
    (library / "notes.txt").write_text("no code\n")
    assert corpus.sources(library) == before == sorted(before)


def test_this_pythons_own_library_gives_megabytes_of_text():
    root = corpus.standard_library()
    names = corpus.sources(root)
    assert "json/decoder.py" in names
    assert sum((root / name).stat().st_size for name in names) > 4_000_000


def test_the_unigram_entropy_is_that_of_the_smoothed_counts():
    train = np.frombuffer(b"aaab", dtype=np.uint8)
    validation = np.frombuffer(b"ac", dtype=np.uint8)
    expected = -(np.log(4 / 260) + np.log(1 / 260)) / 2
    assert corpus.unigram_entropy(train, validation) == pytest.approx(expected, abs=1e-12)


def test_the_entropy_of_text_from_the_same_source_is_its_shannon_entropy():
    # Four equally frequent letters: ln 4 nats, minus the share that smoothing gives to the other 252.
    text = np.frombuffer(b"abcd" * 100_000, dtype=np.uint8)
    assert corpus.unigram_entropy(text, text) == pytest.approx(np.log(4), abs=1e-3)


def test_any_flipped_or_missing_byte_is_noticed(packed, tmp_path: Path):
    whole, place = packed.path.read_bytes(), tmp_path / "damaged.bin"
    draw = random.Random(1)
    for case in range(400):
        damaged = bytearray(whole)
        at = draw.randrange(len(whole))
        damaged[at] ^= 1 << draw.randrange(8)
        place.write_bytes(damaged[:at] if case % 4 == 0 else damaged)
        with pytest.raises(corpus.CorpusError) as caught:
            corpus.verify(place)
        assert str(place) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_truncated_corpus_is_noticed_without_reading_its_text(packed):
    packed.path.write_bytes(packed.path.read_bytes()[:-1])
    with pytest.raises(corpus.CorpusError, match="damaged"):
        corpus.read_info(packed.path)


def test_a_damaged_corpus_is_refused_with_the_remedy(packed):
    packed.path.write_bytes(packed.path.read_bytes()[:-9])
    with pytest.raises(corpus.CorpusError, match=r"damaged: .*; remove it, or name another file"):
        corpus.ensure(packed.path, 10**6, 0.3)


def test_a_foreign_file_at_the_chosen_path_is_refused_and_kept(tmp_path: Path):
    place = tmp_path / "thesis.bin"
    place.write_bytes(b"five years of work")
    with pytest.raises(corpus.CorpusError, match=r"thesis\.bin: not a corpus.*data\.path"):
        corpus.ensure(place, 10**6, 0.3)
    assert place.read_bytes() == b"five years of work"


def test_a_corpus_at_a_place_the_user_chose_is_used_as_it_is(
    packed, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpus, "standard_library", lambda: pytest.fail("packed again"))
    assert corpus.ensure(packed.path, 5, 0.9) == packed


def test_a_missing_corpus_is_packed_where_the_user_wants_it(
    library: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(corpus, "standard_library", lambda: library)
    place = tmp_path / "new folder" / "text.bin"
    assert corpus.ensure(place, 10**6, 0.3) == corpus.verify(place)
    assert place.stat().st_mode & 0o077 == 0


def _pack(library: Path, place: Path) -> None:
    for _ in range(4):
        corpus.pack(library, place, 10**6, 0.3)


def test_two_concurrent_packings_leave_one_complete_corpus(library: Path, packed, tmp_path: Path):
    place = tmp_path / "shared" / "corpus.bin"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_pack, args=(library, place)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert corpus.verify(place).sha256 == packed.sha256
    assert list(place.parent.iterdir()) == [place]


def test_a_place_that_cannot_be_written_is_answered_in_one_line(library: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        corpus.CorpusError, match=r"cannot write the corpus.*XDG_CACHE_HOME"
    ) as caught:
        corpus.pack(library, tmp_path / "file" / "corpus.bin", 10**6, 0.3)
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_corpus_and_no_leftover(
    library: Path, packed, monkeypatch: pytest.MonkeyPatch
):
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(corpus.CorpusError, match="No space left on device"):
        corpus.pack(library, packed.path, 2000, 0.3)
    assert corpus.verify(packed.path) == packed
    assert list(packed.path.parent.iterdir()) == [packed.path]


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("files", [2, 5])
def test_each_split_has_a_file_with_text_whatever_the_fraction(
    tmp_path: Path, files: int, fraction: float
):
    root = tmp_path / "library"
    root.mkdir()
    for number in range(files):
        (root / f"module{number}.py").write_text("pass\n")
        (root / f"empty{number}.py").write_text("")
    info = corpus.pack(root, tmp_path / "b.bin", 10**6, fraction)
    assert sorted([info.train_bytes, info.validation_bytes]) == [5, 5 * (files - 1)]


@pytest.mark.parametrize(("max_bytes", "fitting"), [(10, 0), (500, 1)])
def test_a_cap_that_leaves_no_two_files_is_refused_with_the_remedy(
    library: Path, tmp_path: Path, max_bytes: int, fitting: int
):
    with pytest.raises(
        corpus.CorpusError, match=rf"is enough for {fitting} of .*; raise data\.max_bytes"
    ):
        corpus.pack(library, tmp_path / "b.bin", max_bytes, 0.3)
    assert not (tmp_path / "b.bin").exists()


def test_a_python_without_sources_is_recognized(tmp_path: Path):
    with pytest.raises(corpus.CorpusError, match=r"no Python sources.*data\.path"):
        corpus.pack(tmp_path, tmp_path / "b.bin", 10**6, 0.3)


def test_a_rank_without_rank_0s_corpus_learns_what_to_share(packed):
    shutil.rmtree(packed.path.parent)
    with pytest.raises(corpus.CorpusError, match=r"data\.path to a file that every node can read"):
        corpus.read_info(packed.path)


def test_the_cache_is_where_the_xdg_specification_says():
    def place(**environ: str) -> Path:
        return corpus.default_path(100, 0.5, environ).parent

    assert place(XDG_CACHE_HOME="/scratch/c", HOME="/home/u") == Path("/scratch/c/hpcrun")
    assert place(HOME="/home/u") == Path("/home/u/.cache/hpcrun")
    assert place(XDG_CACHE_HOME="relative", HOME="/home/u") == Path("/home/u/.cache/hpcrun")


def test_other_options_have_another_place_in_the_cache():
    places = {corpus.default_path(*options) for options in ((1, 0.1), (2, 0.1), (1, 0.2))}
    assert len(places) == 3
