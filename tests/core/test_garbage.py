"""What a process of our own keeps out of garbage collections."""

import gc

import pytest

from minivllm.core.garbage import frozen


@pytest.fixture(autouse=True)
def thawed():
    """``heap.frozen_heap`` of other folders' tests may have come first in this process."""
    frozen_before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen_before:
        gc.freeze()


def test_what_was_there_is_left_out_until_the_end():
    assert not gc.get_freeze_count()
    with pytest.raises(ValueError, match="ends it, too"), frozen():
        assert gc.get_freeze_count() > 10_000
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1  # what came since is collected as ever
        raise ValueError("ends it, too")
    assert not gc.get_freeze_count()
