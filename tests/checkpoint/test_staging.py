"""The snapshot buffer: its size in host memory, and the release of page-locked memory."""

import gc

from hpcrun.checkpoint.sharded.host_staging import Staging

MB = 1 << 20


class Driver:
    """Stands for CUDA: knows which pages are locked."""

    def __init__(self, refuses: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self._refuses = refuses

    def pin(self, address, size):
        if self._refuses:
            return None
        self.locked[address] = size
        return lambda: self.locked.pop(address)


def test_a_page_locked_buffer_is_not_rounded_up_to_a_power_of_two():
    driver = Driver()
    staging = Staging(limit=10 * MB, pinned=True, pin=driver.pin)
    assert staging.fits(9 * MB)
    assert staging.reserve(9 * MB).numel() == staging.size == 10 * MB
    assert list(driver.locked.values()) == [10 * MB]


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


def test_if_the_driver_refuses_the_buffer_works_unlocked():
    staging = Staging(pinned=True, pin=Driver(refuses=True).pin)
    assert staging.reserve(MB).numel() == 2 * MB
