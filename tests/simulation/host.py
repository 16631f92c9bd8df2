"""A simulated machine: a disk, ports, two clocks, and the process that runs on it, which may end and begin again.

`kill` ends the process and leaves the page cache; `lose_power` takes what was not synced with it. Both may also come in
the middle of a write, when the disk says so. Invariant: nothing of an ended process changes anything.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from tests.simulation.simulated_disk import Inode, SimulatedDisk
from tests.simulation.simulated_loop import SimulatedLoop
from tests.simulation.simulated_network import Network, SimulatedServer, SimulatedSocket
from tests.simulation.world import World

WALL_START_MS = 1_700_000_000_000


class _Nothing(Random):
    """Draws the fate of keeping nothing."""

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        return 0


class HostDisk(SimulatedDisk):
    """Says when it stops the machine, so that the rest of what was under way changes nothing."""

    def __init__(self, rng: Random, on_power_loss: Callable[[], None]) -> None:
        super().__init__(rng)
        self._on_power_loss = on_power_loss
        self.forgets = False
        """Whether the next loss of power takes everything that is not synced, not just some of it."""

    def lose_power(self) -> None:
        if self.forgets:
            self.forgets = False
            self._root.lose(_Nothing())
        super().lose_power()

    def operation(self, kind: str, path: str = "", inode: Inode | None = None) -> None:
        if self.operations + 1 >= self.fail_at:
            self._on_power_loss()
        super().operation(kind, path, inode)


class Host:
    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.rng = Random(world.rng.getrandbits(64))
        self.disk = HostDisk(Random(world.rng.getrandbits(64)), self._stopped_by_disk)
        self.ports: dict[int, SimulatedServer | None] = {}
        self.powered = True
        self.wall_offset_ms = 0
        self.disk.clock_ms = self.clock_ms
        self.rate = 1.0
        self.loop: SimulatedLoop | None = None
        self.starts = 0
        self.boots = 1
        network.hosts[name] = self

    # What a process is given

    def clock_ms(self) -> int:
        return WALL_START_MS + int(self.world.now * 1000) + self.wall_offset_ms

    def bind(self, host: str, port: int) -> Any:
        if port in self.ports:
            raise OSError(errno.EADDRINUSE, f"{self.name}:{port} is in use")
        self.ports[port] = None
        return SimulatedSocket(self, port)

    # Its life

    @property
    def running(self) -> bool:
        return self.loop is not None and self.loop.alive

    def start(self, main: Callable[[], Coroutine[Any, Any, None]]) -> SimulatedLoop:
        """Start a process; `main` is called on its loop."""
        assert not self.running, self.name
        self.powered = True
        self.starts += 1
        name = f"{self.name}.{self.starts}"
        loop = self.loop = SimulatedLoop(self.world, self, name, self.rate)  # type: ignore[abstract]

        def begin() -> None:
            task: asyncio.Task[None] = loop.create_task(main())
            task.add_done_callback(_retrieve)

        loop.call_soon(begin)
        return loop

    def kill(self) -> None:
        """kill -9: the system closes its connections and refuses new ones."""
        self._end(silently=False)
        self.disk.end_process()

    def lose_power(self) -> None:
        """Off until the next start; nobody is told."""
        self._end(silently=True)
        self._switch_off()
        self.disk.lose_power()

    @property
    def boot_id(self) -> str:
        """Another one whenever what was not on the device may be lost."""
        return f"{self.name}/{self.boots}"

    def _switch_off(self) -> None:
        self.powered = False
        self.boots += 1

    def _end(self, *, silently: bool) -> None:
        loop = self.loop
        self.ports.clear()
        if loop is None:
            return
        loop.kill()
        for transport in [each for each in self.network.transports if each.loop is loop]:
            transport.end_process(silently=silently)

    def _stopped_by_disk(self) -> None:
        """In the middle of a write. What it does to the files is decided when the stack has unwound."""
        self._end(silently=True)
        self._switch_off()
        self.world.after(0.0, self.disk.lose_power)


def _retrieve(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        error = task.exception()
        task.get_loop().call_exception_handler({"message": "the process ended", "exception": error})
