"""The runtime of all coordinators: the I/O and the timers around the pure coordinator of each
partition.

The runtime appends the records of a coordinator, replays them, loads partitions, and answers
requests; the coordinators decide on the answers. On each partition that this node leads, a request
runs at once, and each of its writes is appended as one batch. A batch is replayed after its commit,
and its answers leave after the replay. Invariants: records are replayed in log order, each once,
also when no request waits for them; deadlines and loads have one short step in a turn of the loop,
however many partitions have some. Source: Kafka's `CoordinatorRuntime`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from itertools import count
from typing import Any, Generic, TypeVar

from tidelog.broker.coordinators.loading import NOT_READY, STEP_DONE, LargeSections, replay_log
from tidelog.broker.coordinators.outcome import (
    Coordinator,
    Now,
    Outcome,
    TransactionEnd,
    Write,
    WriteTransaction,
)
from tidelog.broker.coordinators.ports import Ports, TimerHandle, error_for_members
from tidelog.broker.network.repeated_warnings import RepeatedWarnings
from tidelog.broker.network.request import Deferred
from tidelog.protocol.batches.records import (
    ControlRecordType,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
    encode_one,
)
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.storage.producers.verification import Verification

logger = logging.getLogger("tidelog.coordinator")

C = TypeVar("C", bound=Coordinator)

PENDING_WRITES_MAX = 10_000
PENDING_BYTES_MAX = 64 * 1024 * 1024
PENDING_BYTES_OF_NODE_MAX = 256 * 1024 * 1024
PARKED_REQUESTS_MAX = 100_000
# Steps that find nothing to do, in one turn of the loop. After a millisecond the others wait for the next turn.
IDLE_STEPS_MAX = 100
# Writes and records that are replayed at once when they are committed, and then in a step.
REPLAYED_PER_TURN = 500
# The pause of a load while it waits for a thread.
THREAD_RETRY_MS = 2
# A timer that is so late shows that the process stood still, as in a paused virtual machine. What clients and the
# controller have sent meanwhile is read before the deadlines count: heartbeats, or news that another node leads now.
LATE_MS = 500
CATCH_UP_MS = 1_000
# Refusals of one producer's append, which say nothing about the partition.
PRODUCER_ERRORS = frozenset(
    (ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE, ErrorCode.TRANSACTION_COORDINATOR_FENCED)
)


class _ShardState(Enum):
    LOADING = "loading"
    ACTIVE = "active"
    FAILED = "failed"  # the load failed, or the log was lost; ends with the next election
    CLOSED = "closed"


class _PendingWrite:
    """An uncommitted batch in the log, or (without records) an operation that waits for the batches
    before it.
    """

    __slots__ = ("deadline_ms", "is_answered", "next_offset", "operation", "size_bytes", "write")

    def __init__(self, write: Write, next_offset: int, deadline_ms: int, size_bytes: int) -> None:
        self.write = write
        self.operation: Callable[[], None] | None = None
        self.next_offset = next_offset
        self.deadline_ms = deadline_ms
        self.size_bytes = size_bytes
        self.is_answered = False  # its requests have timed out; the batch may still be committed


class _Shard(Generic[C]):
    """One partition's coordinator with its pending writes and parked requests."""

    def __init__(self, partition: int, leader_epoch: int, coordinator: C) -> None:
        self.partition = partition
        self.leader_epoch = leader_epoch
        self.coordinator = coordinator
        self.state = _ShardState.LOADING
        self.pending_writes: deque[_PendingWrite] = deque()
        self.pending_bytes = 0
        self.late_count = 0  # the first `late_count` of `pending_writes` are answered
        self.is_draining = False  # committed writes are being replayed, or wait for the next step of that
        self.committed_offset = 0
        self.writes_under_way = 0
        self.parked_requests: dict[int, tuple[Deferred, Callable[[Any], Any] | None]] = {}
        self.timer: TimerHandle | None = None
        self.timer_due_ms = 0
        self.timer_at_ms = 0  # when it is to run: deadlines that are overdue already make no timer late
        self.is_catching_up = False  # the timer was late and waits for CATCH_UP_MS
        self.append_error: ErrorCode | None = None
        self.operations_after_load: list[Callable[[C, int, Now], Outcome]] = []

    @property
    def end_offset(self) -> int:
        return self.pending_writes[-1].next_offset if self.pending_writes else self.committed_offset

    def is_active(self) -> bool:
        return self.state is _ShardState.ACTIVE

    def has_committed(self) -> bool:
        """Whether the first pending write is committed and may be replayed."""
        # An append may commit batches before its own, and their replay may lead to further writes. Its own must come
        # before those.
        return (
            bool(self.pending_writes)
            and self.pending_writes[0].next_offset <= self.committed_offset
            and not self.writes_under_way
        )


def _send_nothing(partition: int, leader_epoch: int, message: Any) -> None:
    raise AssertionError(f"this coordinator sends no messages: {message}")


class CoordinatorRuntime(Generic[C]):
    """`create` makes the coordinator of a partition that this node begins to lead. `send` is called
    with the partition, its leader epoch and each message of an outcome.
    """

    def __init__(
        self,
        name: str,
        ports: Ports,
        create: Callable[[int], C],
        *,
        write_timeout_ms: int,
        compression: int = 0,
        send: Callable[[int, int, Any], None] = _send_nothing,
    ) -> None:
        self._name = name
        self._ports = ports
        self._create = create
        self._write_timeout_ms = write_timeout_ms
        self._compression = compression
        self._send = send
        self._shards: dict[int, _Shard[C]] = {}
        self._tokens = count(1)
        self._parked_count = 0
        self._pending_bytes = 0
        self._steps: deque[Callable[[], bool]] = deque()  # wait for a turn of the loop
        self._has_stepped = False  # in this turn of the loop, or in the one before
        self._replayed_count = 0  # in this turn of the loop, other than in steps
        self._large_sections = LargeSections(ports.on_thread)
        self._warnings = RepeatedWarnings(logger, lambda: ports.now_ms() / 1000)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        partition: int,
        operation: Callable[[C, int, Now], Outcome],
        finish: Callable[[Any], Any] | None = None,
        *,
        after_pending_writes: bool = False,
        bypasses_limits: bool = False,
    ) -> Any:
        """Run `operation(coordinator, token, now)` and return its answer, or a Deferred of the
        answer.

        The answer is the response after `finish`, or a KafkaError without `finish`. Raises
        KafkaError when another node leads the partition (NOT_COORDINATOR), when it loads
        (COORDINATOR_LOAD_IN_PROGRESS), or when it is overloaded (COORDINATOR_NOT_AVAILABLE).
        `after_pending_writes`: the operation runs after all present writes are committed.
        `bypasses_limits`: the operation is answered at once and writes nothing, so it runs under
        any load. Heartbeats need it: the load of other groups must not end a member's session.
        """
        shard = self._active(partition)
        if not bypasses_limits and (
            len(shard.pending_writes) >= PENDING_WRITES_MAX
            or shard.pending_bytes >= PENDING_BYTES_MAX
            or self._pending_bytes >= PENDING_BYTES_OF_NODE_MAX
            or self._parked_count >= PARKED_REQUESTS_MAX
        ):
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "too many requests are under way")
        token = next(self._tokens)
        if after_pending_writes and shard.pending_writes:
            deferred = self._park(shard, token, finish)
            # An entry without records in the queue of writes; it runs or times out as the writes
            # do.
            deadline_ms = self._ports.now_ms() + self._write_timeout_ms
            entry = _PendingWrite(Write([], [(token, None)]), shard.pending_writes[-1].next_offset, deadline_ms, 0)
            entry.operation = lambda: self._apply(shard, operation(shard.coordinator, token, self._now()))
            shard.pending_writes.append(entry)
            self._arm_timer(shard)
            return deferred
        outcome = operation(shard.coordinator, token, self._now())
        if len(outcome.replies) == 1 and not (outcome.writes or outcome.messages) and outcome.replies[0][0] == token:
            # The usual case, for instance a heartbeat: the answer is complete.
            answer = outcome.replies[0][1]
            if outcome.notes or outcome.warnings:
                self._log(outcome)
            self._arm_timer(shard)
            if isinstance(answer, KafkaError):
                raise answer
            return answer if finish is None else finish(answer)
        deferred = self._park(shard, token, finish)
        self._apply(shard, outcome)
        self._arm_timer(shard)
        if isinstance(deferred.response, KafkaError):
            raise deferred.response
        return deferred if deferred.response is None else deferred.response

    def begin_verification(
        self, partition: int, producer_id: int, producer_epoch: int, adds: bool
    ) -> Verification | None:
        """For a transactional write that is to follow; see `Ports`. Raises as `submit` does."""
        self._active(partition)
        return self._ports.begin_verification(partition, producer_id, producer_epoch, adds)

    def end_transaction(self, partition: int, transaction: WriteTransaction, end: TransactionEnd) -> Any:
        """Append a marker behind all writes so far, and replay it; returns True, or a Deferred.

        Raises as `submit` does.
        """

        def write_marker(coordinator: C, token: int, now: Now) -> Outcome:
            outcome = Outcome(now)
            outcome.writes.append(Write([], [(token, True)], transaction=transaction, end=end))
            return outcome

        return self.submit(partition, write_marker)

    def read(self, partition: int, operation: Callable[[C], Any]) -> Any:
        """Run a read of the committed state; raises as `submit` does."""
        return operation(self._active(partition).coordinator)

    def run(self, partition: int, leader_epoch: int, operation: Callable[[C, Now], Outcome]) -> None:
        """Run `operation(coordinator, now)`, unless this leader epoch of the partition is over."""
        shard = self._shards.get(partition)
        if shard is not None and shard.is_active() and shard.leader_epoch == leader_epoch:
            self._apply(shard, operation(shard.coordinator, self._now()))
            self._arm_timer(shard)

    def submit_to_all(self, operation: Callable[[C, int, Now], Outcome]) -> None:
        """Run `operation(coordinator, end_offset, now)` soon on every active partition, and on a
        loading one after its load. `end_offset`: the end of what the partition's coordinator had
        written at this call.
        """
        for shard in list(self._shards.values()):
            if shard.is_active():
                self._step(partial(self._run_step, shard, operation, shard.end_offset))
            elif shard.state is _ShardState.LOADING:
                shard.operations_after_load.append(operation)

    def _run_step(self, shard: _Shard[C], operation: Callable[[C, int, Now], Outcome], end_offset: int) -> bool:
        if not shard.is_active():
            return False
        outcome = operation(shard.coordinator, end_offset, self._now())
        self._apply(shard, outcome)
        self._arm_timer(shard)
        return bool(outcome.writes)

    def active_partitions(self) -> list[int]:
        return [partition for partition, shard in self._shards.items() if shard.is_active()]

    def is_loading(self) -> bool:
        """Whether any partition is being loaded."""
        return any(shard.state is _ShardState.LOADING for shard in self._shards.values())

    def _active(self, partition: int) -> _Shard[C]:
        shard = self._shards.get(partition)
        if shard is not None and shard.state is _ShardState.ACTIVE:
            return shard
        if shard is None or shard.state in (_ShardState.FAILED, _ShardState.CLOSED):
            raise KafkaError(ErrorCode.NOT_COORDINATOR)
        raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)

    def _park(self, shard: _Shard[C], token: int, finish: Callable[[Any], Any] | None) -> Deferred:
        deferred = Deferred()
        shard.parked_requests[token] = (deferred, finish)
        self._parked_count += 1
        return deferred

    def _answer(self, shard: _Shard[C], token: int, response: Any) -> None:
        parked = shard.parked_requests.pop(token, None)
        if parked is None:
            return  # the request has timed out
        self._parked_count -= 1
        deferred, finish = parked
        deferred.complete(response if finish is None or isinstance(response, KafkaError) else finish(response))

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _apply(self, shard: _Shard[C], outcome: Outcome) -> None:
        if outcome.notes or outcome.warnings:
            self._log(outcome)
        for token, response in outcome.replies:
            self._answer(shard, token, response)
        for write in outcome.writes:
            self._write(shard, write, outcome)
        for message in outcome.messages:
            self._send(shard.partition, shard.leader_epoch, message)

    def _log(self, outcome: Outcome) -> None:
        for note in outcome.notes:
            logger.info("%s", note)
        for kind, text in outcome.warnings:
            self._warnings.warn(kind, text)

    def _write(self, shard: _Shard[C], write: Write, outcome: Outcome) -> None:
        try:
            transaction = write.transaction
            batch = self._encode(shard, write, outcome.wall_ms)
            size_bytes = len(batch)
            shard.writes_under_way += 1
            try:
                append = transaction.append if transaction is not None else None
                next_offset = self._ports.append(shard.partition, batch, append)
            finally:
                shard.writes_under_way -= 1
        except KafkaError as error:
            if shard.append_error is not error.code and error.code not in PRODUCER_ERRORS:
                shard.append_error = error.code  # logged once, not once a request
                logger.warning("%s: appends to partition %d are refused: %s", self._name, shard.partition, error)
            self._fail(shard, write, error_for_members(error.code))
            self._drain(shard)
            return
        except ValueError as error:
            # The record's format cannot hold a name from the request.
            logger.warning("%s: a record for partition %d cannot be encoded: %s", self._name, shard.partition, error)
            self._fail(shard, write, ErrorCode.INVALID_REQUEST)
            return
        shard.append_error = None
        if shard.state is not _ShardState.ACTIVE:
            return  # the append found the log lost and closed the shard, which answered its requests
        if (
            not shard.pending_writes
            and not shard.writes_under_way
            and write.end is None
            and self._ports.is_committed(shard.partition, next_offset)
        ):
            # Usual for a partition with one replica. The caller arms the timer.
            shard.committed_offset = next_offset
            self._replay(shard, write, next_offset)
            self._answer_write(shard, write, Now(outcome.now_ms, outcome.wall_ms))
            return
        shard.pending_writes.append(
            _PendingWrite(write, next_offset, outcome.now_ms + self._write_timeout_ms, size_bytes)
        )
        shard.pending_bytes += size_bytes
        self._pending_bytes += size_bytes
        self._ports.when_committed(
            shard.partition, next_offset, lambda error: self._on_commit(shard, next_offset, error)
        )
        self._drain(shard)

    def _encode(self, shard: _Shard[C], write: Write, wall_ms: int) -> bytearray:
        """The batch of a write. Raises ValueError."""
        transaction = write.transaction
        if write.end is not None:
            assert transaction is not None
            return encode_control_batch(
                ControlRecordType.COMMIT if write.end.is_commit else ControlRecordType.ABORT,
                encode_end_txn_value(write.end.coordinator_epoch),
                timestamp=wall_ms,
                producer_id=transaction.producer_id,
                producer_epoch=transaction.producer_epoch,
            )
        if write.batch is not None:
            return (
                write.batch.build()
                if transaction is None
                else write.batch.build(transaction.producer_id, transaction.producer_epoch)
            )
        if transaction is None and len(write.records) == 1 and not self._compression:
            return encode_one(wall_ms, *shard.coordinator.encode(write.records[0]))  # the usual write
        records = [(wall_ms, *shard.coordinator.encode(record), ()) for record in write.records]
        if transaction is None:
            return encode_batch(records, compression=self._compression)
        return encode_batch(
            records,
            compression=self._compression,
            producer_id=transaction.producer_id,
            producer_epoch=transaction.producer_epoch,
            transactional=True,
        )

    def _fail(self, shard: _Shard[C], write: Write, error: ErrorCode, in_log: bool = False) -> None:
        for token, _ in write.replies:
            self._answer(shard, token, KafkaError(error))
        if write.context is not None:
            self._apply(shard, shard.coordinator.on_failed(write.context, error, in_log, self._now()))

    def _on_commit(self, shard: _Shard[C], offset: int, error: Exception | None) -> None:
        if not shard.is_active():
            return
        if error is not None:
            # The coordinator's state may differ from the lost log, so it must not serve requests.
            # A leader that hands over does so with every stop.
            logger.log(
                logging.INFO if _has_moved(error) else logging.WARNING,
                "%s: partition %d lost its log: %s",
                self._name,
                shard.partition,
                error,
            )
            self._close(shard, _ShardState.FAILED)
            return
        shard.committed_offset = max(shard.committed_offset, offset)
        if not shard.is_draining:
            self._drain(shard)
            self._arm_timer(shard)

    def _drain(self, shard: _Shard[C]) -> None:
        """Replay and answer the committed writes, in log order; what is too much for a turn of the loop, in steps."""
        if shard.is_draining or not shard.has_committed():
            return  # a drain under way goes on by itself
        if not self._replayed_count:
            self._ports.call_later(0, self._begin_turn)
        self._replayed_count += self._drain_some(shard, REPLAYED_PER_TURN - self._replayed_count)
        self._drain_later(shard)

    def _begin_turn(self) -> None:
        self._replayed_count = 0

    def _drain_later(self, shard: _Shard[C]) -> None:
        if shard.has_committed():
            shard.is_draining = True
            self._step(partial(self._drain_step, shard))

    def _drain_step(self, shard: _Shard[C]) -> bool:
        if not shard.is_active():
            return False
        try:
            self._drain_some(shard, REPLAYED_PER_TURN)
        finally:
            self._drain_later(shard)
            self._arm_timer(shard)
        return True

    def _drain_some(self, shard: _Shard[C], count_max: int) -> int:
        """Replay at least `count_max` writes and records, if there are as many; returns how many."""
        shard.is_draining = True
        count = 0
        try:
            while count < count_max and shard.has_committed():
                write = shard.pending_writes[0].write
                if write.end is not None:
                    # It stays the first until its whole transaction is replayed: no other record comes between.
                    assert write.transaction is not None
                    count += shard.coordinator.replay_end_transaction(
                        write.transaction.producer_id, write.end.is_commit, count_max - count
                    )
                    if count >= count_max:
                        break
                count += 1 + len(write.records)
                self._complete(shard, shard.pending_writes.popleft())
        finally:
            shard.is_draining = False
        return count

    def _complete(self, shard: _Shard[C], pending: _PendingWrite) -> None:
        shard.pending_bytes -= pending.size_bytes
        self._pending_bytes -= pending.size_bytes
        shard.late_count -= pending.is_answered
        if pending.operation is not None:
            if not pending.is_answered:
                pending.operation()
            return
        self._replay(shard, pending.write, pending.next_offset)
        self._answer_write(shard, pending.write, self._now())

    def _replay(self, shard: _Shard[C], write: Write, next_offset: int) -> None:
        offset = next_offset - len(write.records)
        producer_id = -1 if write.transaction is None else write.transaction.producer_id
        for record in write.records:
            shard.coordinator.replay(offset, record, producer_id)
            offset += 1

    def _answer_write(self, shard: _Shard[C], write: Write, now: Now) -> None:
        # An answer may let the next request of its connection in at once: it must find the write at its end.
        outcome = None if write.context is None else shard.coordinator.on_committed(write.context, now)
        try:
            for token, response in write.replies:
                self._answer(shard, token, response)
        finally:
            if outcome is not None:
                self._apply(shard, outcome)

    def _now(self) -> Now:
        return Now(self._ports.now_ms(), self._ports.wall_ms())

    # -- time --------------------------------------------------------------------------------------------------------

    def _arm_timer(self, shard: _Shard[C]) -> None:
        """Keep one timer per partition, due at its earliest deadline or before."""
        due_ms = shard.coordinator.next_deadline_ms()
        if shard.late_count < len(shard.pending_writes):
            write_due_ms = shard.pending_writes[shard.late_count].deadline_ms
            due_ms = write_due_ms if due_ms is None else min(due_ms, write_due_ms)
        if due_ms is None or (shard.timer is not None and shard.timer_due_ms <= due_ms) or not shard.is_active():
            return
        if shard.timer is not None:
            shard.timer.cancel()
        shard.timer_due_ms = due_ms
        now_ms = self._ports.now_ms()
        shard.timer_at_ms = max(due_ms, now_ms)
        shard.timer = self._ports.call_later(shard.timer_at_ms - now_ms, lambda: self._on_due(shard))

    def _on_due(self, shard: _Shard[C]) -> None:
        is_late = not shard.is_catching_up and self._ports.now_ms() - shard.timer_at_ms > LATE_MS
        shard.timer_due_ms = 0  # no other timer meanwhile
        shard.is_catching_up = is_late
        if is_late:
            shard.timer = self._ports.call_later(CATCH_UP_MS, lambda: self._on_due(shard))
        else:
            self._step(lambda: self._on_timer(shard))

    def _step(self, step: Callable[[], bool]) -> None:
        """Take the step now if none was taken in this turn of the loop, otherwise after those that wait.

        It returns whether it was work: of those that were none, such as the load of an empty log, a turn takes many.
        """
        if self._has_stepped:
            self._steps.append(step)
            return
        self._has_stepped = True
        self._ports.call_later(0, self._next_step)
        step()

    def _next_step(self) -> None:
        if not self._steps:
            self._has_stepped = False
            return
        self._ports.call_later(0, self._next_step)
        began_ms = self._ports.now_ms()
        for _ in range(min(IDLE_STEPS_MAX, len(self._steps))):
            if self._steps.popleft()() or self._ports.now_ms() > began_ms:
                return

    def _on_timer(self, shard: _Shard[C]) -> bool:
        shard.timer = None
        if not shard.is_active():
            return False
        now = self._now()
        try:
            while (
                shard.late_count < len(shard.pending_writes)
                and shard.pending_writes[shard.late_count].deadline_ms <= now.steady_ms
            ):
                pending = shard.pending_writes[shard.late_count]
                pending.is_answered = True
                shard.late_count += 1
                self._fail(shard, pending.write, ErrorCode.COORDINATOR_NOT_AVAILABLE, in_log=True)
            outcome = shard.coordinator.on_deadline(now)
            self._apply(shard, outcome)
            return bool(outcome.writes)
        finally:
            self._arm_timer(shard)  # an error with one member must not stop the deadlines of the others

    # -- elections ---------------------------------------------------------------------------------------------------

    def on_elected(self, partition: int, leader_epoch: int) -> None:
        """This node leads the partition from now on: load it in steps."""
        old_shard = self._shards.get(partition)
        if old_shard is not None:
            if old_shard.leader_epoch >= leader_epoch and old_shard.state is not _ShardState.FAILED:
                return
            self._close(old_shard, _ShardState.CLOSED)
        shard = self._shards[partition] = _Shard(partition, leader_epoch, self._create(partition))
        chunks = self._ports.read_log(partition)
        steps = replay_log(shard.coordinator, chunks, large_sections=self._large_sections)
        self._ports.call_later(0, lambda: self._step(lambda: self._load_step(shard, steps)))

    def on_resigned(self, partition: int) -> None:
        """This node no longer leads the partition: answer its parked requests with NOT_COORDINATOR."""
        shard = self._shards.pop(partition, None)
        if shard is not None:
            self._close(shard, _ShardState.CLOSED)

    def close(self) -> None:
        """The node stops."""
        for partition in list(self._shards):
            self.on_resigned(partition)

    def _close(self, shard: _Shard[C], state: _ShardState) -> None:
        shard.state = state
        if shard.timer is not None:
            shard.timer.cancel()
            shard.timer = None
        shard.pending_writes.clear()
        self._pending_bytes -= shard.pending_bytes
        shard.pending_bytes = shard.late_count = 0
        for token in list(shard.parked_requests):
            self._answer(shard, token, KafkaError(ErrorCode.NOT_COORDINATOR))
        shard.coordinator.close()

    def _load_step(self, shard: _Shard[C], steps: Iterator[int]) -> bool:
        """Replay one step of the log and schedule the next; after the last step wait until the log
        is committed.
        """
        if shard.state is not _ShardState.LOADING:
            return False
        try:
            end_offset = next(steps)
        except Exception as error:
            self._fail_load(shard, error)
            return False
        if end_offset in (STEP_DONE, NOT_READY):
            delay_ms = 0 if end_offset == STEP_DONE else THREAD_RETRY_MS
            self._ports.call_later(delay_ms, lambda: self._step(lambda: self._load_step(shard, steps)))
        elif end_offset == 0:
            self._activate(shard, 0, None)
        else:
            # One fetch of a follower may commit the logs of many partitions.
            self._ports.when_committed(
                shard.partition,
                end_offset,
                lambda error: self._step(lambda: self._activate(shard, end_offset, error)),
            )
        return end_offset not in (0, NOT_READY)

    def _fail_load(self, shard: _Shard[C], error: Exception) -> None:
        logger.log(
            logging.INFO if _has_moved(error) else logging.ERROR,
            "%s: partition %d cannot be loaded: %s",
            self._name,
            shard.partition,
            error,
            exc_info=None if isinstance(error, (KafkaError, MalformedMessage, OSError)) else error,
        )
        self._close(shard, _ShardState.FAILED)

    def _activate(self, shard: _Shard[C], end_offset: int, error: Exception | None) -> bool:
        if shard.state is not _ShardState.LOADING:
            return False
        if error is not None:
            self._fail_load(shard, error)
            return False
        now = self._now()
        try:
            if shard.coordinator.restore_some(now):
                self._ports.call_later(0, lambda: self._step(lambda: self._activate(shard, end_offset, None)))
                return True
        except Exception as failure:
            self._fail_load(shard, failure)
            return False
        shard.state = _ShardState.ACTIVE
        shard.committed_offset = end_offset
        self._apply(shard, shard.coordinator.on_loaded(now))
        for operation in shard.operations_after_load:
            self._apply(shard, operation(shard.coordinator, shard.end_offset, now))
        shard.operations_after_load.clear()
        self._arm_timer(shard)
        return True


def _has_moved(error: Exception) -> bool:
    """Whether another broker leads the partition by now, and loads it. This one learns of it in a moment."""
    return isinstance(error, KafkaError) and error.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
