"""Differences between two copies of the code."""

from pathlib import Path

from hpcrun.api.submission.code import changes


def test_each_changed_program_file_is_listed(tmp_path: Path) -> None:
    before, after = tmp_path / "001", tmp_path / "002"
    for root in (before, after):
        (root / "src").mkdir(parents=True)
        (root / "src" / "same.py").write_text("same\n")
    (before / "img.py").write_text("a\nb\nc\nd\ne\n")
    (after / "img.py").write_text("a\nB\nC\nd\ne\nf\n")
    (before / "one.sh").write_text("a\nb\n")
    (after / "one.sh").write_text("a\nc\n")
    (before / "old.py").write_text("")
    (after / "src" / "new.py").write_text("")
    (before / "built.so").write_bytes(b"\0a")
    (after / "built.so").write_bytes(b"\0b")
    (before / "README.md").write_text("before")
    (after / "README.md").write_text("after")
    assert changes(before, after) == [
        *("built.so", "img.py", "old.py", "one.sh", "src/new.py"),
    ]
    assert changes(after, after) == []
