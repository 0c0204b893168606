"""The garbage collector is paused while somebody writes a graph, and left as it was found."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from gradgraph.machine.garbage_collection import paused_collection


@pytest.fixture(params=[True, False], ids=["enabled", "disabled"], autouse=True)
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    enabled = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if enabled else gc.disable)()


def test_it_is_left_as_it_was(before: bool) -> None:
    @paused_collection()
    def work() -> bool:
        return gc.isenabled()

    assert not work()
    assert gc.isenabled() == before


def test_it_is_left_as_it_was_after_an_error(before: bool) -> None:
    with pytest.raises(ValueError, match="reason"), paused_collection():
        raise ValueError("reason")
    assert gc.isenabled() == before


def test_the_last_of_several_threads_starts_it_again(before: bool) -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with paused_collection():
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=work)
    with paused_collection():
        other.start()
        assert inside.wait(10)
    assert not gc.isenabled()  # the other one is not done
    leave.set()
    other.join(10)
    assert gc.isenabled() == before
