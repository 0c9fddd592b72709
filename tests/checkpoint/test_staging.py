"""What a snapshot's buffer takes of the host's memory, and when page-locked memory is given back."""

import gc

from hpcrun.checkpoint.sharded.host_staging import Staging

MB = 1 << 20


class Driver:
    """Stands for CUDA's: knows which pages are locked."""

    def __init__(self, refuses: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self._refuses = refuses

    def pin(self, address, size):
        if self._refuses:
            return None
        self.locked[address] = size
        return lambda: self.locked.pop(address)


def test_a_page_locked_buffer_takes_what_it_holds_and_no_power_of_two():
    driver = Driver()
    staging = Staging(limit=10 * MB, pinned=True, pin=driver.pin)
    assert staging.fits(9 * MB)
    assert staging.reserve(9 * MB).numel() == staging.size == 10 * MB
    assert list(driver.locked.values()) == [10 * MB]


def test_the_old_pages_are_unlocked_before_the_new_ones_come_and_with_the_buffer():
    driver = Driver()
    staging = Staging(pinned=True, pin=driver.pin)
    staging.reserve(3 * MB)
    staging.reserve(1)
    assert list(driver.locked.values()) == [4 * MB]
    larger = staging.reserve(7 * MB)
    assert driver.locked == {larger.data_ptr(): 8 * MB}
    staging.offer()
    larger[:] = 7
    del staging, larger
    gc.collect()
    assert driver.locked == {}


def test_where_the_driver_refuses_the_buffer_is_there_all_the_same():
    staging = Staging(pinned=True, pin=Driver(refuses=True).pin)
    assert staging.reserve(MB).numel() == 2 * MB
