"""The thread of the blocking clients: interrupted callers."""

from __future__ import annotations

import asyncio
import dis
import errno
import gc
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, partial
from itertools import count, pairwise
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.patience import PATIENCE_S, join
from tests.unit.client.test_admin import served
from tidelog.client import sync
from tidelog.client.sync import loop_thread
from tidelog.client.sync import producer as sync_producer
from tidelog.client.sync.caller_thread import CallerThread
from tidelog.client.sync.loop_call import CLOSED, CLOSED_AT_WORK, LoopCall, SharedCall
from tidelog.client.sync.loop_thread import BlockingClient, LoopThread
from tidelog.client.sync.record_future import record_future_class
from tidelog.client.sync.waiting_threads import WaitingThreads

WAITING_MODULES = ("loop_thread.py", "caller_thread.py", "waiting_threads.py", "record_future.py", "threading.py")


class Interrupt(BaseException):
    pass


async def number(value: int) -> int:
    await asyncio.sleep(0.01)
    return value


async def running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def interrupted(call: Callable[[], Any]) -> None:
    """Call, and interrupt where the caller has taken the lock of a condition and not begun its `with` block.

    As Ctrl-C, or a signal handler that raises, would do it there.
    """

    def interrupt(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            raise Interrupt
        return interrupt

    sys.settrace(interrupt)
    try:
        call()
    except Interrupt:
        pass
    finally:
        sys.settrace(None)


@cache
def interruptible_offsets(code: CodeType) -> frozenset[int]:
    """The instructions before which a signal handler may run: those behind the begin of a function and behind a call.

    Python looks for signals there, and at the begin of another round of a loop.
    """
    instructions = list(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in pairwise(instructions)
        if before.opname == "RESUME" or before.opname.startswith("CALL")
    )


def interrupted_at(step: int, call: Callable[[], Any], modules: tuple[str, ...] = WAITING_MODULES) -> bool:
    """As `handled_at`, with an interrupt."""

    def interrupt() -> None:
        raise Interrupt

    with suppress(Interrupt):
        return handled_at(step, call, interrupt, modules)
    return True


def handled_at(step: int, call: Callable[[], Any], handle: Callable[[], None], modules: tuple[str, ...]) -> bool:
    """Call, and `handle` where a signal handler may run for the time `step`, in the modules that wait for the loop.

    Whether that place was reached. Since Python 3.14 a signal handler may run behind the `__enter__` of a lock.
    Where `Thread.start` has the lock of all threads, such a handler can start none: that is no place to try.
    """
    of_all_threads: Any = threading._active_limbo_lock  # type: ignore[attr-defined]
    remaining = step

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal remaining
        if not frame.f_code.co_filename.endswith(modules):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti in interruptible_offsets(frame.f_code):
            remaining -= not of_all_threads._is_owned()
            if remaining < 0:
                sys.settrace(None)
                handle()
                return None
        return trace

    # Python 3.12 tells of single instructions only where a frame has asked for them before `settrace`.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return remaining < 0


def run_in_threads(*works: Callable[[], Any]) -> None:
    """One after the other; a work that does not end is left behind."""
    for work in works:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(PATIENCE_S)


def test_an_interrupt_between_two_instructions_of_a_caller_does_not_hold_the_loop():
    thread = LoopThread()
    results: list[int] = []
    run_in_threads(
        lambda: interrupted(lambda: thread.run(number(1))),
        lambda: results.append(thread.run(number(2))),
    )
    assert results == [2]
    thread.stop()


def test_an_interrupt_of_a_thread_that_waits_for_a_record_does_not_hold_the_loop():
    future = record_future_class(lambda: None)()
    settled: list[bool] = []

    def wait() -> None:
        with suppress(TimeoutError):
            future.exception(0.01)

    def settle() -> None:
        future.set_exception(ValueError())
        settled.append(future.done())

    run_in_threads(lambda: interrupted(wait), settle)
    assert settled == [True]


@pytest.mark.parametrize("with_callback", [False, True])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of a call that had not begun
def test_no_interrupt_of_a_caller_stops_the_loop(with_callback: bool):
    thread, caller = LoopThread(), CallerThread()

    async def work() -> int:
        return await caller.run(int, "1") if with_callback else 1

    for step in count():
        was_interrupted = interrupted_at(step, lambda: thread.run(work(), caller if with_callback else None))
        results: list[int] = []
        run_in_threads(lambda: results.append(thread.run(work(), caller if with_callback else None)))  # noqa: B023
        assert results == [1], f"step {step}"
        if not was_interrupted:
            break
    assert step > 20
    thread.stop()


def test_no_interrupt_of_a_thread_that_waits_for_a_record_stops_others():
    kind = record_future_class(lambda: None)
    for step in count():
        future = kind()

        def wait(future: Future[Any] = future) -> None:
            with suppress(TimeoutError):
                future.result(0.0)

        was_interrupted = interrupted_at(step, wait)
        found: list[int] = []
        other = threading.Thread(target=lambda: found.append(future.result(PATIENCE_S)), daemon=True)  # noqa: B023
        other.start()
        run_in_threads(lambda: future.set_result(1))  # noqa: B023
        other.join(PATIENCE_S)
        assert found == [1], f"step {step}"
        if not was_interrupted:
            break
    assert step > 10


def test_an_interrupted_wait_for_room_does_not_hold_the_loop(monkeypatch):
    monkeypatch.setattr(sync_producer, "_QUEUE_MAX", 1)
    producer = sync_producer.Producer()
    for step in count():
        producer._queue.append(object())
        timer = threading.Timer(0.01, producer._queue.clear)
        timer.start()
        was_interrupted = interrupted_at(step, lambda: producer._wait_for_space("t"))
        join(timer)
        woken: list[int] = []

        def wake(step: int = step, woken: list[int] = woken) -> None:
            producer._space_waiters.wake()
            woken.append(step)

        run_in_threads(wake)
        assert woken == [step]
        if not was_interrupted:
            break
    assert step > 10
    producer.close()


def test_threads_wait_until_it_is_so_or_their_time_is_over():
    threads = WaitingThreads()
    is_so: list[int] = []
    ended: list[bool] = []
    waiting = [
        threading.Thread(target=lambda: ended.append(threads.wait(lambda: bool(is_so), PATIENCE_S))) for _ in range(3)
    ]
    for each in waiting:
        each.start()
    threads.wake()
    assert not threads.wait(lambda: bool(is_so), 0.01)
    assert not threads.wait(lambda: bool(is_so), -1.0)
    assert not ended
    is_so.append(1)
    threads.wake()
    for each in waiting:
        each.join(PATIENCE_S)
    assert ended == [True] * 3
    assert threads.wait(lambda: True, float("inf"))
    assert not threads._locks


def test_a_thread_does_not_miss_what_comes_about_right_after_its_look():
    threads = WaitingThreads()
    looks: list[bool] = []

    def is_met() -> bool:
        looks.append(bool(looks))
        threads.wake()
        return looks[-1]

    run_in_threads(lambda: threads.wait(is_met))
    assert looks == [False, True]


def test_all_threads_that_wait_for_a_record_go_on():
    future = record_future_class(lambda: None)()
    errors: list[BaseException | None] = []
    threads = [threading.Thread(target=lambda: errors.append(future.exception(PATIENCE_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    with pytest.raises(TimeoutError):
        future.result(0.01)
    error = ValueError()
    future.set_exception(error)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert errors == [error] * 4


def test_an_interrupted_caller_cancels_its_call():
    thread = LoopThread()
    ended: list[str] = []

    async def wait() -> None:
        try:
            interrupter.start()
            await asyncio.sleep(10 * PATIENCE_S)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    def handle(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.main_thread().ident
    assert main is not None
    interrupter = threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGUSR1))
    try:
        with pytest.raises(Interrupt):
            thread.run(wait())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert thread.run(number(3)) == 3
    assert ended == ["cancelled"]
    thread.stop()


class Client(BlockingClient):
    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return self.work

    async def work(self) -> None:
        pass


class DroppedClient(Client):
    def _final_call(self) -> Callable[[], Coroutine[Any, Any, None]]:
        return partial(asyncio.sleep, 0)


def start_a_call(client: Client, errors: list[BaseException]) -> threading.Thread:
    """Begin a call in another thread. It takes 10 ms to end when it is cancelled."""
    began = threading.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.sleep(10 * PATIENCE_S)
        finally:
            await asyncio.sleep(0.01)

    def call() -> None:
        try:
            client._run(wait)
        except RuntimeError as error:
            errors.append(error)

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    assert began.wait(PATIENCE_S)
    return calling


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="garbage is not collected inside an allocation any more")
def test_a_client_has_a_dict_before_a_second_thread_has_the_client():
    """CPython 3.11 may collect garbage while it makes a `__dict__`, and a second thread then gets another one."""
    client = BlockingClient()
    referents = gc.get_referents(client)
    assert any(each is client.__dict__ for each in referents)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of a close that had not begun
def test_no_interrupt_of_a_close_leaves_another_call_without_an_end():
    for step in count():
        client = Client()
        errors: list[BaseException] = []
        calling = start_a_call(client, errors)
        thread = client._thread
        assert thread is not None
        was_interrupted = interrupted_at(step, lambda: client._close_with(client.work))  # noqa: B023
        if not client._closed:  # an interrupt at the first lines
            client._close_with(client.work)
        join(calling)
        assert [str(error) for error in errors] == ["this client was closed while it was at work"], f"step {step}"
        join(thread._thread)
        if not was_interrupted:
            break
    assert step > 50


def test_an_interrupt_while_the_thread_starts_leaves_no_thread(monkeypatch):
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def start_and_note(thread: threading.Thread) -> None:
        start(thread)
        started.append(thread)

    def start_and_interrupt(function: Callable[[], None], arguments: tuple[()]) -> None:
        run_in_threads(partial(function, *arguments))
        raise Interrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_note)
    monkeypatch.setattr(loop_thread, "start_new_thread", start_and_interrupt)
    with pytest.raises(Interrupt):
        LoopThread()
    (thread,) = [each for each in started if each.name == "tidelog-client"]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("client", [sync.Producer, sync.Consumer, sync.Admin])
def test_a_client_that_is_closed_by_a_finalizer_at_the_end_of_the_interpreter_does_not_wait(client, monkeypatch):
    """Daemon threads do not run any more: `close` in the `__del__` of a global object hung, and the process with it."""
    with served(t=1) as fake:
        closing = client(bootstrap_servers=fake.bootstrap)
        closing.start()
        sent = closing.send("t", b"x") if client is sync.Producer else None
        monkeypatch.setattr(loop_thread, "is_finalizing", lambda: True)
        with pytest.raises(RuntimeError, match="the interpreter is ending"):
            closing.close()
        if sent is not None:
            with pytest.raises(RuntimeError, match="the interpreter is ending"):
                sent.result(0)
        monkeypatch.undo()
        closing.close()
        closing.close()


def drop(clients: list[Any]) -> None:
    """Drop the last reference to the one client, and wait for the end of its thread."""
    thread = clients[0]._thread._thread
    clients.clear()
    deadline_s = time.monotonic() + PATIENCE_S
    while thread.is_alive() and time.monotonic() < deadline_s:
        gc.collect()
        thread.join(0.05)
    assert not thread.is_alive()


@pytest.mark.parametrize("client", [sync.Producer, sync.Consumer, sync.Admin, sync.RawReader])
def test_a_client_that_is_dropped_ends_its_thread_and_says_so(client):
    """Each one left a thread and some seven descriptors, for as long as the program ran."""
    with served(t=1) as fake:
        clients = [client(bootstrap_servers=fake.bootstrap)]
        clients[0].start()
        with pytest.warns(ResourceWarning, match=f"a blocking {client.__name__} was dropped without close"):
            drop(clients)


def test_a_producer_that_is_dropped_delivers_what_was_sent():
    with served(t=1) as fake:
        producers = [sync.Producer(bootstrap_servers=fake.bootstrap)]
        errors: list[BaseException | None] = []
        for _ in range(100):
            producers[0].send("t", b"x", on_delivery=lambda metadata, error: errors.append(error))
        with pytest.warns(ResourceWarning, match="a blocking Producer was dropped"):
            drop(producers)
        assert errors == [None] * 100


def test_a_client_that_is_closed_is_no_dropped_one():
    with served(t=1) as fake, warnings.catch_warnings():
        warnings.simplefilter("error")
        for client in (sync.Producer, sync.Consumer, sync.Admin, sync.RawReader):
            with client(bootstrap_servers=fake.bootstrap) as closed:
                assert closed._thread is not None
            del closed
            gc.collect()


def test_a_shared_call_is_on_its_way_for_all_but_a_signal_handler_inside_the_thread_that_asks():
    """The handler may wait for the loop, and its thread makes the call after that."""
    seen: list[bool] = []
    handled: list[str] = []

    class Loop:
        def call_soon_threadsafe(self, function: Callable[[], object]) -> None:
            if not handled:
                handled.append("once")
                run_in_threads(lambda: seen.append(call.is_on_its_way()))
                seen.append(call.is_on_its_way())
                call.ask(loop)
                seen.append(call.is_on_its_way())
            function()

    loop: Any = Loop()
    call = SharedCall(lambda: call.has_begun())
    call.ask(loop)
    assert seen == [True, False, False]
    assert not call.is_on_its_way()


def test_a_second_signal_handler_inside_the_same_ask_counts_on_no_call_either():
    seen: list[bool] = []
    handled: list[str] = []

    class Asking(set[int]):
        def add(self, caller: int) -> None:
            super().add(caller)
            if not handled:
                handled.append("once")
                call.ask(loop)  # the first handler, and the loop makes its call

    class Loop:
        def call_soon_threadsafe(self, function: Callable[[], object]) -> None:
            seen.append(call.is_on_its_way())
            function()

    loop: Any = Loop()
    call = SharedCall(lambda: call.has_begun())
    call._asking = Asking()
    call.ask(loop)
    assert seen == [False, False]
    assert not call._asking


def test_a_call_takes_no_lock_once_the_client_has_its_thread():
    """A signal handler that joins a thread of another call may run where this thread has the lock."""
    client = Client()
    client._run(lambda: number(0))
    results: list[int] = []
    using = threading.Thread(target=lambda: results.append(client._run(lambda: number(1))), daemon=True)
    with client._thread_lock:
        using.start()
        join(using)
    assert results == [1]
    client._close_with(client.work)


def test_a_signal_handler_at_any_step_of_a_call_may_wait_for_a_thread_that_uses_the_client():
    client = Client()
    client._run(lambda: number(0))
    for step in count():
        results: list[int] = []

        def use(results: list[int] = results) -> None:
            results.append(client._run(lambda: number(1)))

        def handle(use: Callable[[], None] = use) -> None:
            using = threading.Thread(target=use, daemon=True)
            using.start()
            join(using)

        reached: list[bool] = []

        def call(
            step: int = step,
            reached: list[bool] = reached,
            use: Callable[[], None] = use,
            handle: Callable[[], None] = handle,
        ) -> None:
            reached.append(handled_at(step, use, handle, (*WAITING_MODULES, "loop_call.py")))

        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        join(calling)
        assert results == [1] * (1 + reached[0]), f"step {step}"
        if not reached[0]:
            break
    assert step > 10
    client._close_with(client.work)


@pytest.mark.parametrize("is_closing", [False, True], ids=["call", "close"])
def test_a_signal_handler_at_any_step_of_the_first_call_may_use_the_client(monkeypatch, is_closing: bool):
    """All calls run on one loop: the asynchronous client works on no other. And no thread stays behind."""
    made: list[LoopThread] = []

    class Counted(LoopThread):
        def __init__(self, publish: Callable[[LoopThread], bool]) -> None:
            super().__init__(publish)
            made.append(self)

    monkeypatch.setattr(loop_thread, "LoopThread", Counted)
    for step in count():
        client = Client()
        loops: list[object] = []

        def use(client: Client = client, loops: list[object] = loops) -> None:
            loops.append(client._run(running_loop))

        def close(client: Client = client) -> None:
            client._close_with(client.work)

        def call(
            step: int = step, use: Callable[[], None] = use, handle: Callable[[], None] = close if is_closing else use
        ) -> bool:
            with suppress(RuntimeError):  # closed
                return handled_at(step, use, handle, (*WAITING_MODULES, "loop_call.py"))
            return True

        reached = call()
        close()
        for thread in made:
            join(thread._thread)
        made.clear()
        if not is_closing:
            assert loops == loops[:1] * (1 + reached), f"step {step}"
        if not reached:
            break
    assert step > 50


def test_a_signal_handler_at_any_step_of_the_first_call_may_wait_for_a_thread_that_uses_the_client():
    for step in count():
        client = Client()
        results: list[int] = []
        reached: list[bool] = []

        def use(client: Client = client, results: list[int] = results) -> None:
            results.append(client._run(lambda: asyncio.sleep(0, 1)))

        def handle(use: Callable[[], None] = use) -> None:
            using = threading.Thread(target=use, daemon=True)
            using.start()
            join(using)

        def call(step: int = step, reached: list[bool] = reached, use: Callable[[], None] = use) -> None:
            reached.append(handled_at(step, use, handle, (*WAITING_MODULES, "loop_call.py")))

        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        join(calling)
        assert results == [1] * (1 + reached[0]), f"step {step}"
        client._close_with(client.work)
        if not reached[0]:
            break
    assert step > 50


def note_loops(monkeypatch) -> list[asyncio.AbstractEventLoop]:
    """The loops that clients make from now on."""
    loops: list[asyncio.AbstractEventLoop] = []

    def new_loop() -> asyncio.AbstractEventLoop:
        loops.append(asyncio.new_event_loop())
        return loops[-1]

    monkeypatch.setattr(loop_thread, "new_loop", new_loop)
    return loops


def await_closed(loops: list[asyncio.AbstractEventLoop], step: int) -> None:
    """`step`: of the interrupt before."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(loop.is_closed() for loop in loops) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert all(loop.is_closed() for loop in loops), f"step {step}"


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of a call that had not begun
@pytest.mark.filterwarnings("ignore:a blocking DroppedClient was dropped")
@pytest.mark.parametrize("is_dropped", [False, True], ids=["closed", "dropped"])
def test_no_interrupt_of_the_first_call_leaves_a_loop(monkeypatch, is_dropped: bool):
    loops = note_loops(monkeypatch)
    # Not in threading.py: an interrupt may leave the lock there that a new thread needs for its first step.
    for step in count():
        client = DroppedClient()
        reached = interrupted_at(step, partial(client._run, partial(asyncio.sleep, 0)), WAITING_MODULES[:-1])
        if not is_dropped:
            client._close_with(client.work)
        del client
        gc.collect()
        await_closed(loops, step)
        if not reached:
            break
    assert step > 20


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # of a call that had not begun
def test_an_interrupt_of_the_first_call_is_raised_as_it_is(monkeypatch):
    """Between two lines of `Thread.start` it became "release unlocked lock", or left a thread that never ran."""
    loops = note_loops(monkeypatch)
    for step in count():
        client = Client()
        reached = interrupted_at(step, partial(client._run, partial(asyncio.sleep, 0)))
        client._close_with(client.work)
        await_closed(loops, step)
        if not reached:
            break
    assert step > 20


def test_an_interrupt_of_a_close_is_raised_where_the_thread_ends_at_that_moment(monkeypatch):
    """`Thread.join` then releases a lock that the end of the thread has released."""
    join_thread = threading.Thread.join

    def join_and_interrupt(thread: threading.Thread, timeout: float | None = None) -> None:
        join_thread(thread, timeout)
        try:
            raise Interrupt
        finally:
            threading.Lock().release()

    thread = LoopThread()
    monkeypatch.setattr(threading.Thread, "join", join_and_interrupt)
    with pytest.raises(Interrupt):
        thread.stop()


def test_what_keeps_the_thread_from_being_made_is_raised_by_the_call_and_not_kept(monkeypatch):
    client = Client()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            client._run(lambda: number(1))
    assert client._run(lambda: number(2)) == 2
    client._close_with(client.work)


def test_what_keeps_a_loop_from_being_made_is_raised_by_the_call_and_not_kept(monkeypatch):
    client = Client()

    def fail() -> asyncio.AbstractEventLoop:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as context:
        context.setattr(loop_thread, "new_loop", fail)
        with pytest.raises(OSError, match="too many open files"):
            client._run(lambda: number(1))
    assert client._run(lambda: number(2)) == 2
    client._close_with(client.work)


@pytest.mark.parametrize("seed", range(5))
def test_first_calls_that_race_with_each_other_and_the_close_share_one_loop(monkeypatch, seed: int):
    loops = note_loops(monkeypatch)
    rng = random.Random(seed)
    for _ in range(40):
        client = Client()
        used: list[object] = []
        barrier = threading.Barrier(5)

        def use(client: Client = client, used: list[object] = used, barrier: threading.Barrier = barrier) -> None:
            barrier.wait(PATIENCE_S)
            with suppress(RuntimeError):  # closed
                used.append(client._run(running_loop))

        users = [threading.Thread(target=use, daemon=True) for _ in range(4)]
        for user in users:
            user.start()
        barrier.wait(PATIENCE_S)
        time.sleep(rng.choice([0.0, 0.0003, 0.001, 0.003]))
        client._close_with(client.work)
        for user in users:
            join(user)
        assert len(set(used)) <= 1
        assert client._finalizer is None or not client._finalizer.alive
        deadline_s = time.monotonic() + PATIENCE_S
        while not all(loop.is_closed() for loop in loops) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert all(loop.is_closed() for loop in loops)


@pytest.mark.parametrize("seed", range(5))
def test_calls_that_race_with_the_close_end_all(seed: int):
    rng = random.Random(seed)
    for _ in range(40):
        client = Client()
        outcomes: list[object] = []

        def use(client: Client = client, outcomes: list[object] = outcomes) -> None:
            while True:
                try:
                    outcomes.append(client._run(lambda: asyncio.sleep(0, 1)))
                except RuntimeError as error:
                    outcomes.append(str(error))
                    return

        users = [threading.Thread(target=use, daemon=True) for _ in range(3)]
        for user in users:
            user.start()
        time.sleep(rng.choice([0.0, 0.001, 0.003]))
        client._close_with(client.work)
        for user in users:
            join(user)
        assert set(outcomes) <= {1, CLOSED, CLOSED_AT_WORK}


def test_a_call_that_reaches_the_loop_after_its_end_began_is_refused():
    thread = LoopThread()
    thread.end_soon(lambda: asyncio.sleep(0.05))
    with pytest.raises(RuntimeError, match=CLOSED):
        thread.run(number(1))
    join(thread._thread)


def test_a_call_that_comes_when_the_loop_runs_no_more_is_given_up(monkeypatch):
    thread = LoopThread()
    monkeypatch.setattr(LoopCall, "begin", lambda _: thread.stop_soon(Client().work))  # the loop does not come to it
    errors: list[str] = []

    def call() -> None:
        try:
            thread.run(number(1))
        except RuntimeError as error:
            errors.append(str(error))

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    join(calling)
    assert errors == [CLOSED]
    join(thread._thread)
