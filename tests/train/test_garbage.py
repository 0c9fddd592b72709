"""Garbage is collected at chosen steps only, and as before afterwards."""

import gc
import weakref

import pytest

from hpcrun.train.garbage import collecting_together


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.mark.parametrize(
    ("log_every", "collected"), [(1, [50, 100]), (20, [60, 120]), (1000, [50])]
)
def test_garbage_is_collected_at_chosen_steps_only(log_every, collected):
    found = []
    with collecting_together(log_every) as collection:
        assert not gc.isenabled()
        last = collected[-1]
        garbage = weakref.ref(Cycle())
        for step in range(1, last + 1):
            collection.after(step)
            if garbage() is None:
                found.append(step)
                garbage = weakref.ref(Cycle())
    assert found == collected
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_an_error_turns_the_automatic_collection_on_again():
    with pytest.raises(ZeroDivisionError), collecting_together(1):
        raise ZeroDivisionError
    assert gc.isenabled()


def test_a_program_without_collection_keeps_none():
    gc.disable()
    try:
        with collecting_together(1) as collection:
            garbage = weakref.ref(Cycle())
            collection.after(50)
            assert garbage() is not None
            with collection.automatic():
                assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_survives_the_first_collection_is_not_visited_again():
    with collecting_together(1) as collection:
        kept = [Cycle()]
        collection.after(50)
        assert not any(one is kept[0] for one in gc.get_objects())
        later = [Cycle()]
        collection.after(100)
        assert any(one is later[0] for one in gc.get_objects())
