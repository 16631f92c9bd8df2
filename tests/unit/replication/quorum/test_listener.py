"""The queue of calls of the metadata log's listener: in order, with others between the steps of a long one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from tidelog.replication.quorum.listener import ListenerCalls


class Listener:
    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, what: str) -> None:
        self.told.append(what)

    def tell_in_steps(self, count: int) -> Iterator[None]:
        self.told.append("step 0")
        return self._steps(count)

    def _steps(self, count: int) -> Iterator[None]:
        for number in range(1, count):
            self.told.append(f"step {number}")
            yield
        self.told.append("last step")


async def test_calls_wait_for_all_steps_of_the_one_before_and_others_run_between_them() -> None:
    loop, listener = asyncio.get_running_loop(), Listener()
    calls = ListenerCalls(loop)
    calls.add(partial(listener.tell, "first"))
    calls.add(partial(listener.tell_in_steps, 3))
    calls.add(partial(listener.tell, "this node leads"))
    assert listener.told == []
    for number in range(6):
        await asyncio.sleep(0)
        listener.tell(f"turn {number}")
        if number == 1:
            calls.add(partial(listener.tell, "the last call"))
    expected = ["first", "step 0", "turn 0", "step 1", "turn 1", "step 2", "turn 2", "last step"]
    assert listener.told == [*expected, "this node leads", "the last call", "turn 3", "turn 4", "turn 5"]


async def test_a_close_runs_the_calls_that_wait() -> None:
    listener = Listener()
    calls = ListenerCalls(asyncio.get_running_loop())
    calls.add(partial(listener.tell, "this node leads"))
    calls.add(partial(listener.tell, "it does no longer"))
    calls.close()
    await asyncio.sleep(0)
    assert listener.told == ["this node leads", "it does no longer"]


async def test_a_close_drops_what_is_behind_a_call_with_steps_left() -> None:
    """The records are not read to their end, and a controller that began to lead would not know them."""
    listener = Listener()
    calls = ListenerCalls(asyncio.get_running_loop())
    calls.add(partial(listener.tell_in_steps, 5))
    calls.add(partial(listener.tell, "this node leads"))
    await asyncio.sleep(0)
    calls.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert listener.told == ["step 0"]
