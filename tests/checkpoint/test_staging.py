"""The snapshot buffer: its size in host memory, and the release of page-locked memory."""

import ctypes
import gc
from types import SimpleNamespace

import pytest
import torch

from hpcrun.checkpoint.memory.buffers import KeptBuffers
from hpcrun.checkpoint.sharded.host_staging import Staging

MB = 1 << 20


class Driver:
    """Substitute for CUDA: knows which pages are locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def pin(self, address, size):
        self.locked[address] = size
        return lambda: self.locked.pop(address)


class Runtime:
    """Substitute for a CUDA runtime that locks no page: it keeps the last error until a call has read it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.calls, self._last = 0, 0
        shared = SimpleNamespace(**{name: self.last_error})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: shared)

    def cudaHostRegister(self, *_):
        self.calls, self._last = self.calls + 1, 1
        return self._last

    def last_error(self):
        found, self._last = self._last, 0
        return found

    def launch(self):
        """Launch a kernel as torch does, which then reads the last error, whatever call has set it."""
        if code := self.last_error():
            raise RuntimeError(f"CUDA error: {code}")


def test_pages_are_unlocked_before_new_pages_and_with_their_buffer():
    driver = Driver()
    staging = Staging(pinned=True, pin=driver.pin)
    staging.reserve(3 * MB)
    staging.reserve(1)
    assert list(driver.locked.values()) == [4 * MB]
    larger = staging.reserve(7 * MB)
    assert driver.locked == {larger.data_ptr(): 8 * MB}
    larger[:] = 7
    del staging, larger
    gc.collect()
    assert driver.locked == {}


def test_a_kept_snapshot_is_not_overwritten_by_the_next():
    driver, released = Driver(), []
    staging = Staging(limit=1 << 30, pinned=True, pin=driver.pin)
    buffers = KeptBuffers(lambda: released.append(True), staging)
    places = []
    for kept in (True, True, False, True):
        assert buffers.fits(3 * MB)
        places.append(buffers.reserve(3 * MB).data_ptr())
        if kept:
            buffers.keep()
    first, second = places[:2]
    # The third snapshot was not kept, so the fourth takes its place, and the second stays.
    assert places == [first, second, first, first]
    assert driver.locked == {first: 4 * MB, second: 4 * MB}
    assert not released
    buffers.end("a reason")
    gc.collect()
    assert driver.locked == {first: 4 * MB}
    buffers.keep()
    assert buffers.reserve(1).data_ptr() == first
    assert (released, buffers.refused) == ([True], "a reason")


@pytest.mark.parametrize("hip", [None, "6.4"])
def test_a_refused_page_lock_leaves_the_next_kernel_without_error(monkeypatch, capsys, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    runtime = Runtime(monkeypatch, "hipGetLastError" if hip else "cudaGetLastError")
    Staging(pinned=True).reserve(MB)
    runtime.launch()
    assert runtime.calls == 1
    assert "cannot be page-locked (CUDA error 1)" in capsys.readouterr().err
