"""The end of accepting: asyncio's servers are closed so that each connection they have accepted is known to its owner.

asyncio's own loop accepts in one turn, makes the transport in the next, and calls the protocol in the one after. Where
a server is closed between the first two (Python 3.11 to 3.13), the accepted socket stays open without an owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

TIMER_S = 0.001
TURNS = 3


async def stop_accepting(servers: Iterable[asyncio.Server]) -> None:
    """Close them. When this returns, `connection_made` has been called for each connection that was accepted."""
    # A loop's turn looks at its timers last. A task that a timer wakes goes on in the next turn, after the transports
    # of all that was accepted in this one are made. The listening socket itself is looked at later in that turn.
    await asyncio.sleep(TIMER_S)
    for server in servers:
        server.close()
    for _ in range(TURNS):
        await asyncio.sleep(0)
