"""The one runtime of all coordinators: it serves, persists, replays, loads and times the coordinator of each
partition.

Here lives the I/O around the pure coordinators; what an answer says lives in them. For each partition that this node
leads: a request runs at once and its writes are appended as one batch each; once a batch is committed it is replayed,
and then its answers leave. The invariant: records are replayed in log order, each once, whether or not somebody still
waits for them. Source: Kafka's `CoordinatorRuntime`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import count
from typing import Any, Generic, TypeVar

from tidelog.broker.coordinators.loading import MORE_TO_COME, NOT_YET, replay_log
from tidelog.broker.coordinators.outcome import Coordinator, Now, Outcome, Write
from tidelog.broker.coordinators.ports import Ports, TimerHandle, told_to_members
from tidelog.broker.network.repeated_warnings import RepeatedWarnings
from tidelog.broker.network.request import Deferred
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage

logger = logging.getLogger("tidelog.coordinator")

C = TypeVar("C", bound=Coordinator)

PENDING_WRITES_MAX = 10_000
PENDING_BYTES_MAX = 64 * 1024 * 1024
PENDING_BYTES_OF_NODE_MAX = 256 * 1024 * 1024
PARKED_REQUESTS_MAX = 100_000
# While a thread brings what is to be loaded next.
READ_AGAIN_MS = 2


class _State(Enum):
    LOADING = "loading"
    ACTIVE = "active"
    FAILED = "failed"  # could not be loaded, or lost its log; serves again after the next election
    CLOSED = "closed"


class _Pending:
    """A batch in the log that is not committed yet, or (without records) an operation that waits for those before."""

    __slots__ = ("answered", "deadline_ms", "next_offset", "operation", "size_bytes", "write")

    def __init__(self, write: Write, next_offset: int, deadline_ms: int, size_bytes: int) -> None:
        self.write = write
        self.operation: Callable[[], None] | None = None
        self.next_offset = next_offset
        self.deadline_ms = deadline_ms
        self.size_bytes = size_bytes
        self.answered = False  # it took too long: who waited was told so, but it may yet be committed


class _Shard(Generic[C]):
    """One partition's coordinator and what is under way in it."""

    def __init__(self, partition: int, leader_epoch: int, coordinator: C) -> None:
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.coordinator = coordinator
        self.state = _State.LOADING
        self.pending: deque[_Pending] = deque()
        self.pending_bytes = 0
        self.late = 0  # so many of them, from the front, are `answered`
        self.committed_offset = 0
        self.writes_under_way = 0
        self.parked: dict[int, tuple[Deferred, Callable[[Any], Any] | None]] = {}
        self.timer: TimerHandle | None = None
        self.timer_due_ms = 0
        self.append_error: ErrorCode | None = None
        self.after_load: list[Callable[[C, Now], Outcome]] = []

    def is_active(self) -> bool:
        return self.state is _State.ACTIVE


class CoordinatorRuntime(Generic[C]):
    """`create` makes the coordinator of a partition that this node was just elected for."""

    def __init__(
        self,
        name: str,
        ports: Ports,
        create: Callable[[int], C],
        *,
        write_timeout_ms: int,
        compression: int = 0,
    ) -> None:
        self._name = name
        self._ports = ports
        self._create = create
        self._write_timeout_ms = write_timeout_ms
        self._compression = compression
        self._shards: dict[int, _Shard[C]] = {}
        self._tokens = count(1)
        self._parked = 0
        self._pending_bytes = 0
        self._warnings = RepeatedWarnings(logger, lambda: ports.now_ms() / 1000)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        partition: int,
        operation: Callable[[C, int, Now], Outcome],
        finish: Callable[[Any], Any] | None = None,
        *,
        after_pending: bool = False,
        holds_nothing: bool = False,
    ) -> Any:
        """Run `operation(coordinator, token, now)` and return its answer, or a Deferred that will hold it.

        The answer is the response passed through `finish`, or a KafkaError (then unchanged). Raises KafkaError where
        the partition is not served (NOT_COORDINATOR), loads (COORDINATOR_LOAD_IN_PROGRESS) or is overloaded
        (COORDINATOR_NOT_AVAILABLE). `after_pending`: not before everything written so far is committed.
        `holds_nothing`: it is answered at once and writes nothing, so it is served under any load: what other groups
        have under way must not cost a member its session.
        """
        shard = self._active(partition)
        if not holds_nothing and (
            len(shard.pending) >= PENDING_WRITES_MAX
            or shard.pending_bytes >= PENDING_BYTES_MAX
            or self._pending_bytes >= PENDING_BYTES_OF_NODE_MAX
            or self._parked >= PARKED_REQUESTS_MAX
        ):
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "too many requests are under way")
        token = next(self._tokens)
        if after_pending and shard.pending:
            deferred = self._park(shard, token, finish)
            # A place in the queue of writes, without records of its own; it runs or times out like they do.
            deadline_ms = self._ports.now_ms() + self._write_timeout_ms
            waiting = _Pending(Write([], [(token, None)]), shard.pending[-1].next_offset, deadline_ms, 0)
            waiting.operation = lambda: self._apply(shard, operation(shard.coordinator, token, self._now()))
            shard.pending.append(waiting)
            self._arm(shard)
            return deferred
        outcome = operation(shard.coordinator, token, self._now())
        if len(outcome.replies) == 1 and not outcome.writes and outcome.replies[0][0] == token:
            # The usual case, a heartbeat say: answered, nothing to wait for.
            answer = outcome.replies[0][1]
            self._log(outcome)
            self._arm(shard)
            if isinstance(answer, KafkaError):
                raise answer
            return answer if finish is None else finish(answer)
        deferred = self._park(shard, token, finish)
        self._apply(shard, outcome)
        self._arm(shard)
        if isinstance(deferred.response, KafkaError):
            raise deferred.response
        return deferred if deferred.response is None else deferred.response

    def read(self, partition: int, operation: Callable[[C], Any]) -> Any:
        """Run a read of the committed state now; raises as `submit`."""
        return operation(self._active(partition).coordinator)

    def submit_to_all(self, operation: Callable[[C, Now], Outcome]) -> None:
        """Run `operation(coordinator, now)` on every partition served here, or being loaded; nobody waits for it."""
        for shard in list(self._shards.values()):
            if shard.is_active():
                self._apply(shard, operation(shard.coordinator, self._now()))
                self._arm(shard)
            elif shard.state is _State.LOADING:
                shard.after_load.append(operation)

    def active_partitions(self) -> list[int]:
        return [partition for partition, shard in self._shards.items() if shard.is_active()]

    def is_loading(self) -> bool:
        """Whether any partition is being loaded."""
        return any(shard.state is _State.LOADING for shard in self._shards.values())

    def _active(self, partition: int) -> _Shard[C]:
        shard = self._shards.get(partition)
        if shard is None or shard.state in (_State.FAILED, _State.CLOSED):
            raise KafkaError(ErrorCode.NOT_COORDINATOR)
        if shard.state is _State.LOADING:
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return shard

    def _park(self, shard: _Shard[C], token: int, finish: Callable[[Any], Any] | None) -> Deferred:
        deferred = Deferred()
        shard.parked[token] = (deferred, finish)
        self._parked += 1
        return deferred

    def _answer(self, shard: _Shard[C], token: int, response: Any) -> None:
        parked = shard.parked.pop(token, None)
        if parked is None:
            return  # it was told that its write takes too long
        self._parked -= 1
        deferred, finish = parked
        deferred.complete(response if finish is None or isinstance(response, KafkaError) else finish(response))

    # -- what an outcome asks for ------------------------------------------------------------------------------------

    def _apply(self, shard: _Shard[C], outcome: Outcome) -> None:
        self._log(outcome)
        for token, response in outcome.replies:
            self._answer(shard, token, response)
        for write in outcome.writes:
            self._write(shard, write, outcome)

    def _log(self, outcome: Outcome) -> None:
        for note in outcome.notes:
            logger.info("%s", note)
        for kind, text in outcome.warnings:
            self._warnings.warn(kind, text)

    def _write(self, shard: _Shard[C], write: Write, outcome: Outcome) -> None:
        try:
            encoded = [(outcome.wall_ms, *shard.coordinator.encode(record), ()) for record in write.records]
            batch = encode_batch(encoded, compression=self._compression)
            size_bytes = len(batch)
            shard.writes_under_way += 1
            try:
                next_offset = self._ports.append(shard.partition, batch)
            finally:
                shard.writes_under_way -= 1
        except KafkaError as error:
            if shard.append_error is not error.code:
                shard.append_error = error.code  # said once, however many requests meet it
                logger.warning("%s: appends to partition %d are refused: %s", self._name, shard.partition, error)
            self._fail(shard, write, told_to_members(error.code))
            self._drain(shard)
            return
        except ValueError as error:
            # A name from the request that the record's format cannot hold.
            logger.warning("%s: a record for partition %d cannot be encoded: %s", self._name, shard.partition, error)
            self._fail(shard, write, ErrorCode.INVALID_REQUEST)
            return
        shard.append_error = None
        if not shard.is_active():
            return  # the append itself brought to light that the log is lost; whoever waited was told
        shard.pending.append(_Pending(write, next_offset, outcome.now_ms + self._write_timeout_ms, size_bytes))
        shard.pending_bytes += size_bytes
        self._pending_bytes += size_bytes
        self._ports.when_committed(
            shard.partition, next_offset, lambda error: self._on_commit(shard, next_offset, error)
        )
        self._drain(shard)

    def _fail(self, shard: _Shard[C], write: Write, error: ErrorCode, in_log: bool = False) -> None:
        for token, _ in write.replies:
            self._answer(shard, token, KafkaError(error))
        if write.context is not None:
            self._apply(shard, shard.coordinator.on_failed(write.context, error, in_log, self._now()))

    def _on_commit(self, shard: _Shard[C], offset: int, error: Exception | None) -> None:
        if not shard.is_active():
            return
        if error is not None:
            # What the log holds is no longer ours to say; state made of it must not be served.
            logger.warning("%s: partition %d lost its log: %s", self._name, shard.partition, error)
            self._close(shard, _State.FAILED)
            return
        shard.committed_offset = max(shard.committed_offset, offset)
        self._drain(shard)
        self._arm(shard)

    def _drain(self, shard: _Shard[C]) -> None:
        """Replay and answer what is committed, in log order.

        An append may move the high watermark for batches before its own. Their answers can lead to further writes, so
        nothing is drained until the append is entered as pending itself.
        """
        while shard.pending and shard.pending[0].next_offset <= shard.committed_offset and not shard.writes_under_way:
            self._complete(shard, shard.pending.popleft())

    def _complete(self, shard: _Shard[C], pending: _Pending) -> None:
        shard.pending_bytes -= pending.size_bytes
        self._pending_bytes -= pending.size_bytes
        shard.late -= pending.answered
        if pending.operation is not None:
            if not pending.answered:
                pending.operation()
            return
        write = pending.write
        base_offset = pending.next_offset - len(write.records)
        for index, record in enumerate(write.records):
            shard.coordinator.replay(base_offset + index, record, -1)
        if pending.answered:
            return
        for token, response in write.replies:
            self._answer(shard, token, response)
        if write.context is not None:
            self._apply(shard, shard.coordinator.on_committed(write.context, self._now()))

    def _now(self) -> Now:
        return Now(self._ports.now_ms(), self._ports.wall_ms())

    # -- time --------------------------------------------------------------------------------------------------------

    def _arm(self, shard: _Shard[C]) -> None:
        """Have one timer per partition, due no later than its earliest deadline."""
        due_ms = shard.coordinator.next_deadline_ms()
        if shard.late < len(shard.pending):
            write_due_ms = shard.pending[shard.late].deadline_ms
            due_ms = write_due_ms if due_ms is None else min(due_ms, write_due_ms)
        if due_ms is None or not shard.is_active():
            return
        if shard.timer is not None:
            if shard.timer_due_ms <= due_ms:
                return
            shard.timer.cancel()
        shard.timer_due_ms = due_ms
        delay_ms = max(due_ms - self._ports.now_ms(), 0)
        shard.timer = self._ports.call_later(delay_ms, lambda: self._on_timer(shard))

    def _on_timer(self, shard: _Shard[C]) -> None:
        shard.timer = None
        if not shard.is_active():
            return
        now = self._now()
        try:
            while shard.late < len(shard.pending) and shard.pending[shard.late].deadline_ms <= now.steady_ms:
                pending = shard.pending[shard.late]
                pending.answered = True
                shard.late += 1
                self._fail(shard, pending.write, ErrorCode.COORDINATOR_NOT_AVAILABLE, in_log=True)
            self._apply(shard, shard.coordinator.on_deadline(now))
        finally:
            self._arm(shard)  # whatever went wrong with one member, time goes on for the others

    # -- elections ---------------------------------------------------------------------------------------------------

    def elected(self, partition: int, leader_epoch: int) -> None:
        """This node leads the partition from now on: load it, a step at a time."""
        current = self._shards.get(partition)
        if current is not None:
            if current.leader_epoch >= leader_epoch and current.state is not _State.FAILED:
                return
            self._close(current, _State.CLOSED)
        shard = self._shards[partition] = _Shard(partition, leader_epoch, self._create(partition))
        steps = replay_log(shard.coordinator, self._ports.read_log(partition))
        self._ports.call_later(0, lambda: self._load_step(shard, steps))

    def resigned(self, partition: int) -> None:
        """Another node leads the partition, or nobody: everybody who waits here looks for the coordinator again."""
        shard = self._shards.pop(partition, None)
        if shard is not None:
            self._close(shard, _State.CLOSED)

    def close(self) -> None:
        """The node stops."""
        for partition in list(self._shards):
            self.resigned(partition)

    def _close(self, shard: _Shard[C], state: _State) -> None:
        shard.state = state
        if shard.timer is not None:
            shard.timer.cancel()
            shard.timer = None
        shard.pending.clear()
        self._pending_bytes -= shard.pending_bytes
        shard.pending_bytes = shard.late = 0
        for token in list(shard.parked):
            self._answer(shard, token, KafkaError(ErrorCode.NOT_COORDINATOR))
        shard.coordinator.close()

    def _load_step(self, shard: _Shard[C], steps: Iterator[int]) -> None:
        """Replay some of the log, then let the loop do other things; at the end wait until all of it is committed."""
        if shard.state is not _State.LOADING:
            return
        try:
            end_offset = next(steps)
        except Exception as error:
            expected = isinstance(error, (KafkaError, MalformedMessage, OSError))
            logger.error(
                "%s: partition %d cannot be loaded: %s",
                self._name,
                shard.partition,
                error,
                exc_info=None if expected else error,
            )
            self._close(shard, _State.FAILED)
            return
        if end_offset in (MORE_TO_COME, NOT_YET):
            delay_ms = 0 if end_offset == MORE_TO_COME else READ_AGAIN_MS
            self._ports.call_later(delay_ms, lambda: self._load_step(shard, steps))
        elif end_offset == 0:
            self._activate(shard, None)
        else:
            self._ports.when_committed(shard.partition, end_offset, lambda error: self._activate(shard, error))

    def _activate(self, shard: _Shard[C], error: Exception | None) -> None:
        if shard.state is not _State.LOADING:
            return
        if error is not None:
            logger.error("%s: partition %d cannot be loaded: %s", self._name, shard.partition, error)
            self._close(shard, _State.FAILED)
            return
        shard.state = _State.ACTIVE
        now = self._now()
        self._apply(shard, shard.coordinator.on_loaded(now))
        for operation in shard.after_load:
            self._apply(shard, operation(shard.coordinator, now))
        shard.after_load.clear()
        self._arm(shard)
