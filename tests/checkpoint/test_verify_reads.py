"""`verify` reads the manifest once, so its work is linear in the number of files."""

from pathlib import Path

from hpcrun.checkpoint.storage.disk import FileSystem
from hpcrun.checkpoint.storage.manifest import MANIFEST
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.cli.commands.verify import verify


class Counting(FileSystem):
    def __init__(self) -> None:
        self.opened: list[str] = []

    def open(self, path):
        self.opened.append(path.name)
        return super().open(path)


def test_the_manifest_is_read_once_for_all_files(tmp_path: Path) -> None:
    fs = Counting()
    store = CheckpointStore(tmp_path / "checkpoints", "7-0", fs=fs, patience=0)
    draft, records = store.begin(1), []
    for rank in range(20):
        with store.open_file(draft, f"rank-{rank:05d}.bin") as stream:
            stream.write(b"state")
        records.append(stream.record)
    store.commit(draft, 1, records, 20, {}, lambda: None)
    fs.opened.clear()
    assert verify(store, [1], lambda *_: None) == []
    assert fs.opened.count(MANIFEST) == 1
    assert len(fs.opened) == 21
