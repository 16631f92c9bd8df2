"""The blocking consumer: listeners in the caller's thread, and several threads at its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.unit.client.fake_broker import SILENCE, FakeCluster
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import FAST, T0, T1, fill
from tidelog.client import ConsumerRecord, OffsetAndMetadata, RebalanceListener, TopicPartition, sync
from tidelog.client.consuming.fetch_buffer import FetchBuffer
from tidelog.client.consuming.iteration_buffer import IterationBuffer
from tidelog.client.sync.loop_thread import LoopThread
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.messages.fetch import FetchRequest
from tidelog.protocol.messages.leave_group import LeaveGroupRequest
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest


class Recorded(RebalanceListener):
    def __init__(self, work: Callable[[str], Any] = lambda what: None) -> None:
        self.work = work
        self.events: list[tuple[str, set[TopicPartition], int]] = []

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self.events.append(("revoked", set(revoked), threading.get_ident()))
        self.work("revoked")

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        self.events.append(("assigned", set(assigned), threading.get_ident()))
        self.work("assigned")


def consumer(cluster: FakeCluster, **options: Any) -> sync.Consumer:
    return sync.Consumer(**{"bootstrap_servers": cluster.bootstrap, "group_id": "g", **FAST, **options})


def in_thread(work: Callable[[], Any]) -> Any:
    """What the work returned or raised, in a thread of its own that must end: a hang is a failure, not a wait."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


def poll_until(consuming: sync.Consumer, condition: Callable[[], Any]) -> list[int]:
    offsets: list[int] = []
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        for records in consuming.poll(20).values():
            offsets += [record.offset for record in records]
    return offsets


class TestListeners:
    def test_a_listener_seeks_and_commits_in_the_callers_thread(self):
        with served(t=2) as cluster:
            fill(cluster, "t", 0, 10)
            consuming = consumer(cluster, enable_auto_commit=False)
            threads: set[int] = set()

            def work(what: str) -> None:
                threads.add(threading.get_ident())
                if what == "assigned":
                    consuming.seek(T0, 7)
                    consuming.pause(T1)
                    assert consuming.position(T0) == 7
                else:
                    consuming.commit()

            listener = Recorded(work)

            def all_of_it() -> Any:
                with consuming:
                    consuming.subscribe(["t"], listener=listener)
                    read = poll_until(consuming, lambda: consuming.assignment() and consuming.position(T0) == 10)
                return read, threading.get_ident(), consuming.paused()

            read, caller, _ = in_thread(all_of_it)
            assert read == [7, 8, 9]
            assert threads == {caller}
            assert [what for what, _, _ in listener.events] == ["assigned", "revoked"]
            assert cluster.groups.group("g").offsets["t", 0][0] == 10, "committed by the listener, inside close"

    def test_what_a_listener_raises_is_raised_by_poll(self):
        with served(t=1) as cluster:
            raised: list[LookupError] = []

            def work(what: str) -> None:
                if not raised:
                    raised.append(LookupError("mine"))
                    raise raised[0]

            def all_of_it() -> None:
                with consumer(cluster) as consuming:
                    consuming.subscribe(["t"], listener=Recorded(work))
                    with pytest.raises(LookupError, match="mine"):
                        poll_until(consuming, lambda: False)
                    poll_until(consuming, lambda: consuming.assignment() == {T0})

            assert in_thread(all_of_it) is None

    @pytest.mark.parametrize("call", ["poll", "close", "unsubscribe"])
    def test_a_call_that_waits_for_the_listener_is_refused_in_it(self, call):
        with served(t=1) as cluster:

            def all_of_it() -> None:
                with consumer(cluster) as consuming:
                    refused: list[BaseException] = []

                    def work(what: str) -> None:
                        with pytest.raises(RuntimeError, match=rf"{call}\(\) cannot be called") as caught:
                            getattr(consuming, call)()
                        refused.append(caught.value)

                    consuming.subscribe(["t"], listener=Recorded(work))
                    poll_until(consuming, lambda: refused)
                    poll_until(consuming, lambda: consuming.assignment() == {T0})

            assert in_thread(all_of_it) is None

    def test_a_listener_that_is_asynchronous_still_runs(self):
        with served(t=1) as cluster:
            seen: list[str] = []

            class Asynchronous(RebalanceListener):
                async def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
                    seen.append("assigned")

            def all_of_it() -> None:
                with consumer(cluster) as consuming:
                    consuming.subscribe(["t"], listener=Asynchronous())
                    poll_until(consuming, lambda: seen)

            assert in_thread(all_of_it) is None

    def test_an_interrupt_in_a_listener_reaches_the_caller_and_the_consumer_goes_on(self):
        with served(t=1) as cluster:
            interrupted: list[bool] = []

            def work(what: str) -> None:
                if not interrupted:
                    interrupted.append(True)
                    raise KeyboardInterrupt

            def all_of_it() -> None:
                with consumer(cluster) as consuming:
                    consuming.subscribe(["t"], listener=Recorded(work))
                    with pytest.raises(KeyboardInterrupt):
                        poll_until(consuming, lambda: False)
                    with pytest.raises(RuntimeError, match="interrupted"):
                        poll_until(consuming, lambda: False)
                    poll_until(consuming, lambda: consuming.assignment() == {T0})

            assert in_thread(all_of_it) is None


class TestTheEnd:
    def test_an_iteration_ends_when_another_thread_closes_the_consumer(self):
        with served(t=1) as cluster:
            fill(cluster, "t", 0, 2)
            consuming = consumer(cluster)
            consuming.subscribe(["t"], listener=Recorded())
            seen: list[int] = []

            def work() -> list[int]:
                for record in consuming:
                    seen.append(record.offset)
                    if len(seen) == 2:
                        threading.Timer(0.05, consuming.close).start()
                return seen

            assert in_thread(work) == [0, 1]

    def test_two_threads_may_close_it(self):
        with served(t=1) as cluster:
            consuming = consumer(cluster)
            consuming.subscribe(["t"], listener=Recorded())
            in_thread(lambda: poll_until(consuming, consuming.assignment))
            others = [threading.Thread(target=consuming.close) for _ in range(3)]
            for each in others:
                each.start()
            in_thread(consuming.close)
            for each in others:
                each.join(PATIENCE_S)
                assert not each.is_alive()
            assert not cluster.groups.group("g").members

    def test_a_close_that_comes_when_another_thread_has_just_closed_it(self, monkeypatch: pytest.MonkeyPatch):
        with served(t=1) as cluster:
            consuming = consumer(cluster)
            consuming.start()
            run = consuming._run_with_listener

            def run_late(*arguments: Any) -> Any:
                monkeypatch.setattr(consuming, "_run_with_listener", run)
                in_thread(consuming.close)
                return run(*arguments)

            monkeypatch.setattr(consuming, "_run_with_listener", run_late)
            assert in_thread(consuming.close) is None


def test_a_call_that_comes_while_the_thread_ends_is_refused():
    """Its task would be left undone by the loop, and the caller would wait for ever."""
    thread = LoopThread()
    refused: list[str] = []
    begun = threading.Event()

    def come_late() -> None:
        try:
            thread.run(asyncio.sleep(0))
        except RuntimeError as error:
            refused.append(str(error))

    async def first() -> None:
        begun.set()
        try:
            await asyncio.sleep(PATIENCE_S)
        except asyncio.CancelledError:
            await asyncio.to_thread(come_late)
            raise

    waiting = threading.Thread(target=in_thread, args=(lambda: thread.run(first()),))
    waiting.start()
    begun.wait(PATIENCE_S)
    thread.stop()
    waiting.join(PATIENCE_S)
    assert refused == ["this client is closed"]


class TakingRecord(ConsumerRecord):
    """While it is looked at, an iterator in another thread takes the next record."""

    buffer: IterationBuffer

    @property
    def topic(self) -> str:
        if self.buffer.records:
            self.buffer.records.popleft()
        return "t"


def test_what_is_not_consumed_is_found_while_another_thread_iterates():
    TakingRecord.buffer = buffer = IterationBuffer()
    buffer.fill({T0: [TakingRecord("t", 0, offset, 0, 0, None, None, (), 3) for offset in range(20)]})
    assert buffer.unconsumed_positions() == {T0: OffsetAndMetadata(0, "", 3)}


def test_close_waits_for_a_silent_broker_as_long_as_it_is_told():
    with served(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        consuming = consumer(cluster, request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        consuming.subscribe(["t"])
        poll_until(consuming, lambda: consuming.position(T0) == 2 if consuming.assignment() else False)
        cluster.script(OffsetCommitRequest, lambda request, node: SILENCE)
        assert in_thread(lambda: consuming.close(timeout_ms=100)) is None


def test_a_close_that_is_interrupted_calls_the_listener_in_the_callers_thread():
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with served(t=1) as cluster:
            fill(cluster, "t", 0, 2)
            # Without heartbeats: after SILENCE an answer would be out of turn.
            intervals = {"heartbeat_interval_ms": 600_000, "session_timeout_ms": 900_000}
            consuming = consumer(cluster, request_timeout_ms=600_000, auto_commit_interval_ms=600_000, **intervals)
            listener = Recorded()
            consuming.subscribe(["t"], listener=listener)
            poll_until(consuming, lambda: consuming.position(T0) == 2 if consuming.assignment() else False)

            def interrupt_when_it_commits(request: Any, node: Any) -> Any:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return SILENCE

            cluster.script(OffsetCommitRequest, interrupt_when_it_commits)
            begun_s = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                consuming.close()
            assert listener.events[-1] == ("revoked", {T0}, threading.get_ident())
            while not cluster.sent(LeaveGroupRequest):
                time.sleep(0.001)
                assert time.monotonic() - begun_s < PATIENCE_S
    finally:
        signal.signal(signal.SIGINT, before)


def test_commits_in_the_background_take_the_positions_of_their_calls():
    with served(t=1) as fake:
        fill(fake, "t", 0, 10)
        with consumer(fake, enable_auto_commit=False, auto_offset_reset="earliest") as consuming:
            consuming.subscribe(["t"])
            outcomes = []
            for record in consuming:
                outcomes.append(consuming.commit_async())
                if record.offset == 9:
                    break
            for outcome in outcomes:
                assert outcome.result(PATIENCE_S) is None
            assert consuming.lag(T0) == 0
            assert consuming.committed(T0) == {T0: OffsetAndMetadata(10, "", 0)}
        sent = [each.topics[0].partitions[0].committed_offset for each in fake.sent(OffsetCommitRequest)]
        assert sent == sorted(sent)


@pytest.mark.parametrize("end", [sync.Consumer.commit, sync.Consumer.close], ids=lambda end: end.__name__)
def test_a_signal_handler_inside_a_wait_for_a_commit_may_wait_for_the_consumer(end):
    """`concurrent.futures.wait` has what it takes for the locks of its futures while it looks at them."""
    with served(t=1) as fake:
        fill(fake, "t", 0, 2)
        with consumer(fake, enable_auto_commit=False, auto_offset_reset="earliest") as consuming:
            consuming.subscribe(["t"])
            poll_until(consuming, lambda: consuming.position(T0) == 2 if consuming.assignment() else False)
            outcome: Any = consuming.commit_async()
            called = threading.Event()
            outcome.add_done_callback(lambda _: called.set())

            def handle() -> None:
                with outcome._condition:
                    end(consuming)

            assert in_thread(handle) is None
            assert called.wait(PATIENCE_S)


@pytest.mark.parametrize("call", ["poll", "batches", "poll_arrow"])
def test_records_that_an_interrupted_poll_takes_are_not_consumed(call, monkeypatch):
    """Ctrl-C while the loop decodes: the records reach nobody, and `close` must not commit them."""
    main = threading.main_thread().ident
    assert main is not None
    interrupted, handled = threading.Event(), threading.Event()

    def interrupt(*_: Any) -> None:
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def interrupts() -> bool:
        # A signal in the moment before the main thread waits does not wake it: Python would handle it only after that.
        signal.pthread_kill(main, signal.SIGINT)
        return handled.wait(0.1)

    taken = FetchBuffer.take if call != "poll_arrow" else FetchBuffer.take_columns

    def take(*arguments: Any) -> Any:
        result = taken(*arguments)
        if result and not interrupted.is_set():
            interrupted.set()
            wait_until(interrupts)
        return result

    monkeypatch.setattr(FetchBuffer, taken.__name__, take)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        _read_interrupted(call)
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted.is_set()


def _read_interrupted(call: str) -> None:
    with served(t=1) as fake:
        fill(fake, "t", 0, 10)
        options = {"auto_offset_reset": "earliest"}
        with consumer(fake, **options) as consuming:
            consuming.subscribe(["t"])
            reads = {
                "poll": lambda: poll_until(consuming, lambda: False),
                "batches": lambda: list(consuming.batches()),
                "poll_arrow": lambda: [consuming.poll_arrow(1_000) for _ in range(100)],
            }
            with pytest.raises(KeyboardInterrupt):
                reads[call]()
            assert consuming.position(T0) == 0
        assert all(
            partition.committed_offset == 0
            for commit in fake.sent(OffsetCommitRequest)
            for topic in commit.topics
            for partition in topic.partitions
        )


def test_a_second_close_waits_for_the_first_as_long_as_its_own_limit_says():
    with served(t=1) as cluster:
        fill(cluster, "t", 0, 2)
        consuming = consumer(cluster, request_timeout_ms=600_000, auto_commit_interval_ms=600_000)
        consuming.subscribe(["t"])
        poll_until(consuming, lambda: consuming.position(T0) == 2 if consuming.assignment() else False)
        answer = threading.Event()

        async def late(request: Any, node: Any) -> Any:
            await asyncio.to_thread(answer.wait, PATIENCE_S)
            return node.on_group(request)

        cluster.script(LeaveGroupRequest, late)
        ended: list[str] = []

        def close_first() -> None:
            consuming.close(timeout_ms=600_000)
            ended.append("well")

        first = threading.Thread(target=close_first)
        first.start()
        while not cluster.sent(LeaveGroupRequest):
            time.sleep(0.001)
        assert in_thread(lambda: consuming.close(timeout_ms=10)) is None
        assert first.is_alive()
        answer.set()
        first.join(PATIENCE_S)
        assert ended == ["well"], "the second call did not end the first"
        assert not cluster.groups.group("g").members


@pytest.mark.parametrize("call", ["poll", "batches", "poll_arrow"])
def test_a_poll_that_is_interrupted_before_it_begins_returns_no_records_of_the_one_before(call):
    with served(t=1) as fake:
        fill(fake, "t", 0, 10)
        with consumer(fake, auto_offset_reset="earliest", enable_auto_commit=False) as consuming:
            consuming.subscribe(["t"])
            batches = consuming.batches()
            reads = {
                "poll": lambda: consuming.poll(1_000),
                "batches": lambda: next(batches),
                "poll_arrow": lambda: consuming.poll_arrow(1_000).num_rows,
            }
            poll_until(consuming, lambda: consuming.assignment())
            consuming.seek(T0, 0)
            while not reads[call]():
                pass
            assert consuming.position(T0) == 10
            _interrupt_before_it_begins(consuming, reads[call])
            assert consuming.position(T0) == 10


@pytest.mark.parametrize("is_interrupted", [True, False], ids=["interrupted", "refused"])
def test_a_poll_that_does_not_begin_returns_no_records_of_an_iteration_before_it(is_interrupted: bool) -> None:
    """It went back to where the last records of the iteration began, and so did the next commit."""
    wrong: Any = "soon"
    with served(t=1) as fake:
        fill(fake, "t", 0, 10)
        with consumer(fake, auto_offset_reset="earliest", enable_auto_commit=False) as consuming:
            consuming.subscribe(["t"])
            assert [next(consuming).offset for _ in range(10)] == list(range(10))
            if is_interrupted:
                _interrupt_before_it_begins(consuming, lambda: consuming.poll(1_000))
            else:
                with pytest.raises(TypeError):
                    consuming.poll(wrong)
            assert consuming.position(T0) == 10


def test_a_poll_that_raises_leaves_the_records_of_other_partitions() -> None:
    """They were fetched again behind each error, and only after the wait of the fetch under way."""

    def deserialized(value: bytes) -> bytes:
        if value == b"bad":
            raise ValueError
        return value

    with served(t=2) as fake:
        fake.topics["t"][0].append(bytes(encode_batch([(0, None, b"bad", ())])))
        fill(fake, "t", 1, 20)
        with consumer(
            fake, auto_offset_reset="earliest", value_deserializer=deserialized, max_poll_records=4
        ) as reading:
            reading.assign([T0, T1])
            read_of = errors = 0
            while read_of < 20:
                try:
                    read_of += sum(map(len, reading.poll(1_000).values()))
                except ValueError:
                    errors += 1
            assert errors
        partitions = [each for fetch in fake.sent(FetchRequest) for topic in fetch.topics for each in topic.partitions]
        assert {each.fetch_offset for each in partitions if each.partition == 1} <= {0, 20}


def test_a_record_that_a_deserializer_refuses_for_a_time_is_read_by_a_later_poll() -> None:
    """Each later poll raised what the first one had, until a seek."""
    answers = iter([False, True, False, False])

    def deserialized(value: bytes) -> bytes:
        if value == b"3" and not next(answers, True):
            raise ConnectionError
        return value

    with served(t=2) as fake:
        fill(fake, "t", 0, 5)
        fill(fake, "t", 1, 3)
        with consumer(fake, auto_offset_reset="earliest", value_deserializer=deserialized) as reading:
            reading.assign([T0, T1])
            offsets: dict[TopicPartition, list[int]] = {T0: [], T1: []}
            deadline = time.monotonic() + PATIENCE_S
            while sum(map(len, offsets.values())) < 8 and time.monotonic() < deadline:
                with contextlib.suppress(ConnectionError):
                    for partition, records in reading.poll(100).items():
                        offsets[partition] += [record.offset for record in records]
            assert offsets == {T0: [0, 1, 2, 3, 4], T1: [0, 1, 2]}


def test_a_seek_skips_a_record_that_a_deserializer_refuses_behind_removed_ones() -> None:
    with served(t=1) as fake:
        fake.topics["t"][0].end_offset = 20
        fill(fake, "t", 0, 3)
        with consumer(
            fake, auto_offset_reset="earliest", value_deserializer=lambda value: 1 // (int(value) - 20)
        ) as reading:
            reading.assign([T0])
            reading.seek(T0, 0)
            with pytest.raises(ZeroDivisionError):
                reading.poll(PATIENCE_S * 1000)
            assert reading.position(T0) == 20
            reading.seek(T0, reading.position(T0) + 1)
            assert [record.offset for record in reading.poll(PATIENCE_S * 1000)[T0]] == [21, 22]


def _interrupt_before_it_begins(consuming: sync.Consumer, call: Callable[[], object]) -> None:
    """Interrupt the main thread while the consumer's loop is busy."""

    def interrupt(*_: Any) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def be_busy() -> None:
        time.sleep(0.2)  # the caller waits by now
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        assert is_interrupted.wait(PATIENCE_S)

    main, is_interrupted = threading.main_thread().ident, threading.Event()
    assert consuming._thread is not None
    consuming._thread.loop.call_soon_threadsafe(be_busy)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        signal.signal(signal.SIGINT, before)
