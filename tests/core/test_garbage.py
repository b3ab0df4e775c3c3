"""What is kept out of garbage collections, and when there are none."""

import gc
import weakref
from types import SimpleNamespace

import pytest

from minivllm.core import garbage
from minivllm.core.garbage import collect_engines, frozen, uncollected


@pytest.fixture(autouse=True)
def thawed(monkeypatch):
    """``heap.frozen_heap`` has come first."""
    monkeypatch.setattr(garbage, "gc", gc)
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


class Node:
    """In a cycle of its own."""

    def __init__(self) -> None:
        self.itself = self


def test_nothing_is_collected_while_an_engine_is_made():
    runs = []
    gc.callbacks.append(note := lambda phase, info: runs.append(info["generation"]))
    try:
        with uncollected():
            runs.clear()
            within = weakref.ref(Node())
            kept = [[] for _ in range(100_000)]
            with uncollected():
                assert not gc.isenabled()
            assert not runs and within() is not None and not gc.isenabled()
        assert gc.isenabled() and not gc.get_freeze_count() and gc.get_count()[0] < 1000
    finally:
        gc.callbacks.remove(note)
    assert len(gc.get_objects(generation=2)) > len(kept), "what was made is old"
    gc.collect()
    assert within() is None


def test_who_has_switched_it_off_or_frozen_objects_keeps_that():
    with pytest.raises(ValueError, match="on again"), uncollected():
        raise ValueError("on again")
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    mine = [Node()]
    gc.freeze()
    with uncollected():
        pass
    assert gc.get_freeze_count() > 10_000
    assert not any(its is mine for its in gc.get_objects()), "of which those that are frozen are none"
    gc.unfreeze()
    assert any(its is mine for its in gc.get_objects())


def test_before_torch_is_there_no_engine_can_have_left_anything(monkeypatch):
    before = weakref.ref(Node())
    with uncollected():
        for modules in {}, {"torch": None}:
            assert before() is not None
            monkeypatch.setattr(garbage, "sys", SimpleNamespace(modules=modules))
            collect_engines()
        assert before() is None, "garbage that was there goes first"
