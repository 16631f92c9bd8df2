"""An asyncio event loop of one simulated process: asyncio's own API on the World's time.

Everything a node does through its loop (callbacks, timers, tasks, connections, threads) becomes events of the World.
`kill` ends the process: nothing it has begun happens any more. `pause` is SIGSTOP: what is due waits. Invariant: an
exception nobody handles is a failure of the history, not a line in a log.
"""

from __future__ import annotations

import asyncio
import contextvars
import socket
import traceback
from asyncio import events
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.host import Host
    from tests.simulation.world import World

CALLBACKS_PER_TURN_MAX = 2_000
TURN_S = 100e-6
TICK_S = 1e-6
_set_running_loop = events._set_running_loop


class SimulatedTimer(asyncio.TimerHandle):
    """A handle or timer, made without what asyncio's own collects for debugging."""

    __slots__ = ()

    def __init__(
        self,
        when: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        context: contextvars.Context | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = context
        self._cancelled = False

    def __repr__(self) -> str:
        return f"<SimulatedTimer {self._callback!r}>"

    def cancel(self) -> None:
        self._cancelled = True
        self._callback = self._args = None  # type: ignore[assignment]


class SimulatedLoop(asyncio.AbstractEventLoop):
    """`rate`: how fast this machine's clock runs, 1.0 being true."""

    def __init__(self, world: World, host: Host, name: str, rate: float = 1.0) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.alive = True
        self.paused = False
        self.threads_slow = 1.0
        self._rate = rate
        self._fired_at = 0.0
        self._ready: deque[SimulatedTimer] = deque()
        self._turn_due = False
        self._is_running = False
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._waiting_threads: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        world.graveyard.append(self)

    def __repr__(self) -> str:
        return f"<SimulatedLoop {self.name}>"

    # Time and callbacks

    def time(self) -> float:
        """Never before a timer that has fired, whatever rounding makes of it."""
        now = self.world.now * self._rate
        return now if now > self._fired_at else self._fired_at

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = SimulatedTimer(0.0, callback, args, self, context)
        if self.alive:
            self._ready.append(handle)
            if not self._turn_due and not self._is_running:
                self._turn_due = True
                self.world.at(self.world.now, self._turn)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        now = self.world.now * self._rate
        when = (now if now > self._fired_at else self._fired_at) + delay
        return self.call_at(when, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        timer = SimulatedTimer(when, callback, args, self, context)
        if self.alive:
            # Time passes while a process runs: who sets a timer for now again and again must get past it.
            self.world.at(max(when / self._rate, self.world.now + TICK_S), self._fire, timer)
        return timer

    def _fire(self, timer: SimulatedTimer) -> None:
        if not timer._cancelled:
            if timer._when > self._fired_at:
                self._fired_at = timer._when
            self.enter(timer)

    def enter(self, handle: SimulatedTimer) -> None:
        """Run it now, or when this process runs again."""
        if self.alive:
            self._ready.append(handle)
            self._turn()

    def inject(self, callback: Callable[..., None], *args: Any) -> None:
        """What comes from outside (the network): run it now, or when this process runs again."""
        if self.alive:
            self._ready.append(SimulatedTimer(0.0, callback, args, self, None))
            self._turn()

    def _turn(self) -> None:
        self._turn_due = False
        if self.paused or not self.alive:
            return
        ready = self._ready
        count = 0
        self._is_running = True
        _set_running_loop(self)
        try:
            while ready and self.alive:
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                count += 1
                if count > CALLBACKS_PER_TURN_MAX:
                    ready.appendleft(handle)
                    self._turn_due = True
                    self.world.after(TURN_S, self._turn)
                    break
                try:
                    context = handle._context
                    if context is None:
                        handle._callback(*handle._args)
                    else:
                        context.run(handle._callback, *handle._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:
                    self.call_exception_handler({"message": f"exception in {handle!r}", "exception": error})
        finally:
            _set_running_loop(None)
            self._is_running = False
        on_step = self.world.on_step
        if on_step is not None and self.alive:
            on_step(self)

    # Futures, tasks, threads

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: object = None, context: Any = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=str(name or "task"), context=context)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """A thread of this process, which gets to it after a while; its effects come all at once."""
        future = self.create_future()
        if self.alive:
            draw = self.world.rng.random()
            delay_s = (0.0001 + 0.002 * draw * draw if draw < 0.98 else 0.03) * self.threads_slow
            self.world.after(delay_s, self._run_thread, func, args, future)
        return future

    def _run_thread(self, func: Callable[..., Any], args: tuple[Any, ...], future: asyncio.Future[Any]) -> None:
        if not self.alive:
            return
        if self.paused:
            self._waiting_threads.append((lambda: func(*args), future))
            return
        try:
            result = func(*args)
        except BaseException as error:
            self.inject(_settle, future, None, error)
        else:
            self.inject(_settle, future, result, None)

    # Network

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:
        return await self.host.network.connect(self, protocol_factory, str(host), int(port))

    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (host, port))]  # hosts are known by their names

    async def create_server(self, protocol_factory: Any, *args: Any, sock: Any = None, **options: Any) -> Any:
        assert sock is not None, "listen on a socket that the node was given"
        return self.host.network.listen(self, protocol_factory, sock)

    # What asyncio asks of a loop

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return not self.alive

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.alive:
            return
        error = context.get("exception")
        lines = "".join(traceback.format_exception(error)) if error is not None else ""
        self.world.fail(f"NoUnexpectedException: {self.name}: {context['message']}\n{lines}")

    # Faults

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        waiting, self._waiting_threads = self._waiting_threads, []
        for work, future in waiting:
            self._run_thread(work, (), future)
        if self.alive:
            self._turn()

    def kill(self) -> None:
        """Nothing of this process happens any more, not even what its coroutines would do at their end."""
        self.alive = False
        self._ready.clear()
        self._waiting_threads.clear()
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]

    def bury(self) -> None:
        """At the end of the world."""
        self.kill()
        tasks, self._tasks = list(self._tasks), {}
        _set_running_loop(self)
        try:
            for task in tasks:
                coroutine: Any = task.get_coro()
                try:
                    coroutine.close()
                except BaseException:
                    pass
        finally:
            _set_running_loop(None)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
