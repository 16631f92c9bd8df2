"""Work on thousands of logs in turns of the loop, between which it answers requests.

The steps are an iterator that does one small piece each time. Invariant: the owner hears of the end of each round that
it has not given up, also after an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator


def go_on(
    loop: asyncio.AbstractEventLoop,
    steps: Iterator[None],
    turn_s: float,
    is_given_up: Callable[[], bool],
    on_end: Callable[[Exception | None], None],
) -> None:
    """Do the next steps, for `turn_s` and one step more in each turn of the loop, until all are done.

    Calls `on_end` after the last one, or with the error that has ended them. Without it if the round is given up.
    """
    if is_given_up():
        return
    ends_s = loop.time() + turn_s
    try:
        for _ in steps:
            if loop.time() > ends_s:
                loop.call_soon(go_on, loop, steps, turn_s, is_given_up, on_end)
                return
    except Exception as error:
        on_end(error)
    else:
        on_end(None)
