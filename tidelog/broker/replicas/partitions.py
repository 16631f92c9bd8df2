"""The partitions that this node hosts, and the requests that wait for them.

Looks partitions up for the handlers, appends, and wakes parked produces and waiting fetches when a high watermark
moves. `hosting.py` adds and removes partitions, `flushes.py` syncs them, `replication/partition.py` decides on
replication, and `storage/log/partition_log.py` stores the bytes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

from tidelog.broker.network.counters import TopicTraffic
from tidelog.broker.replicas.deletions import Deletions
from tidelog.broker.replicas.fetching.fetch_sessions import FetchSessions, SessionPartition
from tidelog.broker.replicas.fetching.fetch_wakes import FetchWakes, WaitingFetches
from tidelog.broker.replicas.fetching.follower_answers import Tail
from tidelog.broker.replicas.fetching.follower_fetches import FollowerFetches
from tidelog.broker.replicas.fetching.follower_sessions import FollowerEntry
from tidelog.broker.replicas.flushes import Flushes, home_of
from tidelog.broker.scheduling.acknowledgements import Acknowledgements
from tidelog.broker.scheduling.callbacks import call_all
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.purgatory import OffsetWaiter, OffsetWaiters
from tidelog.broker.scheduling.timers import DeadlineTimer
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot_replication import INLINE_BYTES_MAX
from tidelog.replication.controller.decisions.topic_names import MAX_LENGTH
from tidelog.replication.partition import ACKS_ALL, Partition, ReplicaPorts
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.producers.refused_batches import sequenced_header
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords
from tidelog.storage.segments.inspection import NeedsInspection

if TYPE_CHECKING:
    import random
    from concurrent.futures import Executor

    from tidelog.protocol.hot import Buffer
    from tidelog.storage.log.partition_log import AppendInfo, PartitionLog
    from tidelog.storage.producers.verification import TransactionAppend
    from tidelog.storage.segments.append import Batch
    from tidelog.storage.segments.reader import ColdRead
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.partitions")

# The last appended records stay in memory up to this size, for the followers that wait for them.
TAIL_BYTES_MAX = INLINE_BYTES_MAX
# The bound of a repeated batch's wait while the ISR is too small, because all answers behind it wait too.
REPEATED_WAIT_MS_MAX = 1000

Committed = Callable[[Exception | None], None]


class _Watch(WaitingFetches):
    """The waiting requests of one partition. Fetch sessions register here (`fetch_sessions.WatchedPartition`)."""

    __slots__ = ("followers", "produces", "syncs", "tail", "traffic", "writes")

    def __init__(self, partition: Partition, traffic: TopicTraffic) -> None:
        super().__init__(lambda: partition.log.segments.active)
        self.followers: dict[FollowerEntry, None] = {}
        self.produces = OffsetWaiters()
        self.syncs = OffsetWaiters()  # produces with acks=1
        self.writes = OffsetWaiters()  # of coordinators
        self.tail = Tail()
        self.traffic = traffic  # of the topic


class Partitions:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        threads_of: Callable[[str], Executor | None],
        clock_ms: Callable[[], int],
        rng: random.Random,
        known_elsewhere: Callable[[str | bytes, int], bool],
        *,
        fetch_session_slots_max: int,
        fetch_bytes_max: int,
        replica: ReplicaPorts | None = None,
        tells_followers_high_watermark: bool = False,
        stopwatch: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`threads_of(path)`: the threads for the log directory with this path. `replica`: the node's functions that
        replicas call; None for a node without a cluster.
        """
        self.deadlines = DeadlineTimer(loop)
        self.callbacks = DeferredCallbacks(loop)
        self.acknowledgements = Acknowledgements(loop.call_soon)
        self.fetch_wakes = FetchWakes(loop.call_soon, self.callbacks)
        self.deletions = Deletions()
        self.follower_fetches = FollowerFetches(self, loop, rng, tells_high_watermark=tells_followers_high_watermark)
        self.on_disk_failure: Callable[[str, OSError], None] = lambda path, error: None
        """Called with every error of a device, and with the directory of the log that met it."""
        self.on_shortage: Callable[[], None] = lambda: None
        """Called where a log meets a shortage of file descriptors or memory."""
        self.on_damage: Callable[[Partition, DamagedRange | None], ErrorCode] = lambda *_: ErrorCode.CORRUPT_MESSAGE
        """Called when a read meets this damage, or when there is new damage. Returns the error code for the client."""
        self.replica_ports = replica or ReplicaPorts()
        self.fetch_sessions = FetchSessions(fetch_session_slots_max, rng)
        self.fetch_bytes_max = fetch_bytes_max
        self._loop = loop
        self._threads_of = threads_of
        self._clock_ms = clock_ms
        # By topic name and by topic id: the version of a request decides which of them it carries.
        self._hosted: dict[str | bytes, dict[int, Partition]] = {}
        self._unavailable: set[tuple[str | bytes, int]] = set()
        self.traffic: dict[str, TopicTraffic] = {}
        """The counters of each topic that has a replica here."""
        self._watches: dict[Partition, _Watch] = {}  # `Partition.watch` is the same object, without the look-up
        self._known_elsewhere = known_elsewhere
        # (segment, its generation) -> what to call when its examination has ended
        self._examinations: dict[tuple[Segment, int] | None, list[Callable[[], None]]] = {}
        is_hosted, settle = self._watches.__contains__, self.acknowledgements.settle
        self.flushes = Flushes(loop, threads_of, clock_ms, stopwatch, is_hosted, self._fail, settle)
        self.flushes.on_shortage = lambda: self.on_shortage()

    # ------------------------------------------------------------------------------------------------------ look-up

    def leader(self, topic: str | bytes, index: int) -> Partition:
        """The partition that this node leads, by topic name or 16-byte id. Raises the KafkaError for the client."""
        try:
            partition = self._hosted[topic][index]
        except KeyError:
            raise self._no_replica(topic, index) from None
        if partition.offline:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        if not partition.leads:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return partition

    def _no_replica(self, topic: str | bytes, index: int) -> KafkaError:
        if (topic, index) in self._unavailable:
            return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        if self._known_elsewhere(topic, index):
            return KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        unknown_id = topic not in self._hosted and isinstance(topic, bytes)
        return KafkaError(ErrorCode.UNKNOWN_TOPIC_ID if unknown_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)

    def readable(self, topic: str | bytes, index: int) -> Partition:
        """The replica on this node, leader or not, for a consumer that may read from followers (KIP-392)."""
        partition = self._hosted.get(topic, {}).get(index)
        return self.leader(topic, index) if partition is None or partition.offline else partition

    def find(self, topic: str | bytes, index: int) -> Partition | None:
        """The replica on this node, in any role."""
        return self._hosted.get(topic, {}).get(index)

    def is_known(self, topic: str | bytes, index: int) -> bool:
        """Whether the partition exists, here or on another node."""
        return self.find(topic, index) is not None or self._known_elsewhere(topic, index)

    @property
    def unavailable_count(self) -> int:
        """The number of replicas that belong here and whose logs cannot be opened."""
        return len(self._unavailable) // 2

    def wall_ms(self) -> int:
        """The wall clock, in milliseconds since 1970."""
        return self._clock_ms()

    def hosted(self) -> Iterable[Partition]:
        return self._watches.keys()

    # ------------------------------------------------------------------------------------------------ append, read

    def append(
        self,
        partition: Partition,
        batches: memoryview,
        now_ms: int,
        required_acks: int,
        from_client: bool = True,
        transaction: TransactionAppend | None = None,
    ) -> AppendInfo:
        """Append as leader. Raises KafkaError, or NeedsInspection for a batch that must be inspected first.

        A log that cannot be written takes its partition offline. The requests that wait for the high watermark are
        called last, because they may append again.
        """
        log = partition.log
        high_watermark = log.high_watermark
        try:
            info = partition.append_as_leader(batches, now_ms, required_acks, from_client, transaction)
        except KafkaError as error:
            partition.watch.traffic.refused(error.code, len(batches))
            raise
        except NeedsInspection:
            raise
        except Exception as error:
            refusal = self.refusal(partition, error)
            partition.watch.traffic.refused(refusal.code, len(batches))
            raise refusal from None
        first_offset, last_offset, _, _, _, written = info
        watch, durability = partition.watch, log.durability
        traffic = watch.traffic
        traffic.bytes_in += len(batches)
        traffic.records_in += last_offset + 1 - first_offset
        if (
            watch.followers
            or watch.fetches
            or watch.produces.waiting
            or watch.writes.waiting
            or watch.patient
            or durability.is_wanted
            or durability.blocked_from >= 0
        ):
            self._appended(partition, first_offset, last_offset + 1, written, high_watermark)
        return info

    def append_pipelined(
        self, partition: Partition, batches: Sequence[memoryview], now_ms: int, required_acks: int
    ) -> list[Batch]:
        """Append the batches of pipelined requests that can be written at once; `append` must take the others.

        Returns the appended batches: those at the start, or none.
        """
        high_watermark = partition.log.high_watermark
        data, appended = partition.append_pipelined_as_leader(batches, now_ms, required_acks)
        if appended:
            end_offset = appended[-1][3] + 1
            traffic = partition.watch.traffic
            traffic.bytes_in += len(data)
            traffic.records_in += end_offset - appended[0][2]
            self._appended(partition, appended[0][2], end_offset, data, high_watermark)
        return appended

    def _appended(
        self,
        partition: Partition,
        offset: int,
        end_offset: int,
        written: Buffer | None,
        old_high_watermark: int,
    ) -> None:
        """Hand appended records to the followers, wake the requests that wait for them, and start a flush that is due.

        `append` omits the call if there is nothing to do.
        """
        watch = partition.watch
        if watch.followers:
            if written is not None and len(written) <= TAIL_BYTES_MAX:
                watch.tail.appended(offset, end_offset, bytes(written))
            for entry in watch.followers:
                entry.appended()
        log = partition.log
        if log.high_watermark != old_high_watermark and (
            watch.fetches or watch.produces.waiting or watch.writes.waiting or watch.followers or watch.patient
        ):
            self._advanced(partition)
        durability = log.durability
        if durability.is_wanted or durability.blocked_from >= 0:
            self.flushes.flush_if_due(partition)

    def looks_inside(self, batches: Iterable[tuple[str | bytes, int, object]]) -> bool:
        """Whether the records of some of these (topic, partition, batch) are looked at before their append."""
        partitions = (self.find(topic, index) for topic, index, _ in batches)
        return any(each is not None and each.log.rules.looks_inside for each in partitions)

    def note_refused(self, topic: str | bytes, index: int, batches: memoryview | None, code: ErrorCode) -> None:
        """A handler has refused a client's batch. The batches that follow it are refused until it is sent again."""
        partition = self.find(topic, index)
        if partition is not None:
            partition.note_refused(batches, code, self._clock_ms())
        elif len(topic) <= MAX_LENGTH:
            header = sequenced_header(batches)
            if header is not None:
                self.replica_ports.refused.note(((topic, index),), header, code, None, self._clock_ms())

    def delete_records(self, partition: Partition, offset: int) -> int:
        """Move the leader's log start offset and notify the fetches. The resolved offset. Raises KafkaError."""
        log_start_offset = partition.log.log_start_offset
        try:
            resolved_offset = partition.delete_records_as_leader(offset)
        except Exception as error:
            raise self.refusal(partition, error) from None
        if partition.log.log_start_offset != log_start_offset:
            self.reported_values_changed(partition)
            for follower in partition.watch.followers:
                follower.appended()
        return resolved_offset

    async def close(self) -> None:
        """Start no more flushes, and wait for those that run."""
        self.follower_fetches.close()
        self.deadlines.close()
        await self.flushes.close()

    def run_cold(self, cold: ColdRead, done: Callable[[], None]) -> None:
        """Load the bytes that a read lacks into memory on a thread, then call `done`. The next read raises errors.

        A segment is examined once for all reads that meet the same damage meanwhile: it may have a gigabyte.
        """
        examined = cold.examined
        if examined in self._examinations:
            self._examinations[examined].append(done)
            return
        waiting = [done]
        if examined is not None:
            self._examinations[examined] = waiting
        cold.pin()

        def finished(future: asyncio.Future[None]) -> None:
            if examined is not None:
                del self._examinations[examined]
            try:
                cold.unpin()
            finally:  # the close of a file that has gone meanwhile may fail
                if not future.cancelled():
                    call_all(waiting)

        threads = self._threads_of(home_of(home_of(cold.path)))
        self._loop.run_in_executor(threads, cold.warm).add_done_callback(finished)

    # ------------------------------------------------------------------------------------------------------ waiting

    def when_committed(
        self, partition: Partition, required_offset: int, callback: Committed, *, for_client: bool = False
    ) -> OffsetWaiter | None:
        """Call back with None when the high watermark reaches `required_offset`, or with the error that prevents it.

        Only clients get NOT_ENOUGH_REPLICAS_AFTER_APPEND. A coordinator's records can still be committed after it.
        Returns what waits; None if it has called back.
        """
        if partition.offline or not partition.leads:
            code = ErrorCode.KAFKA_STORAGE_ERROR if partition.offline else ErrorCode.NOT_LEADER_OR_FOLLOWER
            callback(KafkaError(code))
        elif partition.log.high_watermark >= required_offset:
            callback(None)
        else:
            watch = partition.watch
            waiters: OffsetWaiters = watch.produces if for_client else watch.writes
            return waiters.add(required_offset, callback)
        return None

    def when_acknowledged(
        self, partition: Partition, required_offset: int, acks: int, callback: Committed, is_repeated: bool = False
    ) -> OffsetWaiter | None:
        """`when_committed` for a client: acks=1 waits only for the device (flush.messages), not for other replicas.

        While the ISR is too small for any acknowledgement, a repeated batch waits for a while, another one not at all:
        the ISR has become so since the append of a produce in steps.
        """
        if acks == ACKS_ALL or partition.offline or not partition.leads:
            is_led = partition.leads and not partition.offline
            if is_led and partition.is_under_min_isr and partition.log.high_watermark < required_offset:
                error = KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
                if not is_repeated:
                    callback(error)
                    return None
                self.deadlines.add(REPEATED_WAIT_MS_MAX, partial(callback, error))
            return self.when_committed(partition, required_offset, callback, for_client=True)
        if partition.log.committable_offset >= required_offset:
            callback(None)
            return None
        waiters: OffsetWaiters = partition.watch.syncs
        return waiters.add(required_offset, callback)

    def watch(self, entry: SessionPartition) -> None:
        """Notify this entry's session when its partition changes. Does nothing if this node does not host it."""
        topic, index = entry.key
        partition = self._hosted.get(topic, {}).get(index)
        if partition is not None:
            watch = self._watches[partition]
            watch.watch(entry)
            entry.watched, entry.known_as = watch, partition.topic

    def watch_as_follower(self, entry: FollowerEntry) -> Partition | None:
        """The partition of a follower's session entry. It notifies the entry of appends from now on."""
        partition = self.find(*entry.key)
        if partition is not None:
            partition.watch.followers[entry] = None
            entry.partition = partition
        return partition

    def _advanced(self, partition: Partition) -> None:
        """The high watermark of a partition has moved."""
        watch = partition.watch
        if watch.fetches or watch.patient:
            self.fetch_wakes.appended(watch)
        if self.follower_fetches.tells_high_watermark:
            for follower in watch.followers:
                follower.appended(news=0)
        if watch.produces.waiting:
            self.acknowledgements.settle(watch.produces.take_reached(partition.log.high_watermark), None)
        if watch.writes.waiting:
            call_all(watch.writes.take_reached(partition.log.high_watermark), None)

    # ------------------------------------------------------------------------------------------------- hosting's side

    def add(self, topic: str, index: int, topic_id: bytes, log: PartitionLog) -> Partition:
        """Host a replica, which has no role yet."""
        partition = Partition(topic, index, topic_id, log, self._advanced, self.replica_ports)
        self._hosted.setdefault(topic, {})[index] = partition
        self._hosted.setdefault(topic_id, {})[index] = partition
        traffic = self.traffic.get(topic)
        if traffic is None:
            traffic = self.traffic[topic] = TopicTraffic()
        partition.watch = self._watches[partition] = _Watch(partition, traffic)
        return partition

    def add_unavailable(self, topic: str, index: int, topic_id: bytes) -> None:
        """Note a replica that belongs here and whose log cannot be used."""
        self._unavailable.update(((topic, index), (topic_id, index)))

    def is_unavailable(self, topic: str, index: int) -> bool:
        return (topic, index) in self._unavailable

    def remove_unavailable(self, topic: str, index: int, topic_id: bytes) -> bool:
        """Whether the replica was unavailable."""
        is_unavailable = (topic_id, index) in self._unavailable
        self._unavailable.difference_update(((topic, index), (topic_id, index)))
        return is_unavailable

    def remove(self, partition: Partition, code: ErrorCode) -> None:
        """Forget a replica; its waiting requests fail. KAFKA_STORAGE_ERROR: its log exists but cannot be used."""
        if code == ErrorCode.KAFKA_STORAGE_ERROR:
            self.add_unavailable(partition.topic, partition.index, partition.topic_id)
        for key in (partition.topic, partition.topic_id):
            indexes = self._hosted[key]
            del indexes[partition.index]
            if not indexes:
                del self._hosted[key]
        if partition.topic not in self._hosted:
            del self.traffic[partition.topic]
        partition.leads = False
        gone = code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        self.deletions.give_up(partition, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if gone else code)
        self.fail_waiting_requests(partition, code)
        watch = self._watches.pop(partition)
        watch.leave()
        for entry in chain(watch.fetches, watch.patient):
            entry.watched = None
        for follower in watch.followers:
            follower.partition = None

    def reported_values_changed(self, partition: Partition) -> None:
        """A value that fetches report, such as the log start offset, has changed. Its fetches are answered anew."""
        watch = self._watches[partition]
        watch.tail.clear()  # the answer kept for the next follower says what was
        self.fetch_wakes.changed(watch)
        for follower in watch.followers:
            follower.session.unsettled[follower] = None
            follower.sent_high_watermark = -1

    def role_changed(self, partition: Partition) -> None:
        """The role, the leader epoch or the replicas have changed. All waiting fetches learn of it soon."""
        watch = self._watches[partition]
        watch.tail.clear()
        self.deletions.look(partition)
        self.fetch_wakes.changed(watch)
        for follower in list(watch.followers):
            self.follower_fetches.role_changed(follower)

    def observe_followers_outside_isr(self, partition: Partition) -> None:
        """Record the next fetch of each follower outside the ISR, even if it does not mention this partition."""
        in_sync = partition.in_sync
        if partition.leads and len(in_sync.isr) < len(in_sync.replicas):
            for follower in self._watches[partition].followers:
                follower.session.outside[follower] = None

    def fail_waiting_acks_all(self, partition: Partition) -> None:
        """The ISR has become too small while produces wait. Their records are in the log but may still be lost."""
        waiting = self._watches[partition].produces.take_all()
        self.acknowledgements.settle(waiting, KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND))

    def fail_waiting_requests(self, partition: Partition, code: ErrorCode) -> None:
        """This replica no longer leads: waiting fetches check again, waiting produces fail with `code`."""
        watch = self._watches[partition]
        self.deletions.give_up(partition, code)
        self.role_changed(partition)
        call_all(watch.writes.take_all(), KafkaError(code))
        self.acknowledgements.settle([*watch.produces.take_all(), *watch.syncs.take_all()], KafkaError(code))

    def refusal(self, partition: Partition | None, error: Exception) -> KafkaError:
        """The error for the client. A log that cannot be used takes its partition offline."""
        if isinstance(error, KafkaError):
            return error
        if isinstance(error, DamagedRecords) and partition is not None:
            return KafkaError(self.on_damage(partition, error.damage), str(error))
        if isinstance(error, (OSError, CorruptLog)) and partition is not None:
            if partition.log.can_retry(error):
                logger.error("%s-%d: %s", partition.topic, partition.index, error)
                self.on_shortage()
            else:
                self._fail(partition, error)
            return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        logger.error("%s failed", partition, exc_info=error)
        return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR)

    def failed(self, partition: Partition, error: Exception) -> None:
        """A follower could not append or truncate its log."""
        self._fail(partition, error)

    def _fail(self, partition: Partition, error: BaseException) -> None:
        if self._is_of_former_log(partition, error):
            logger.info("%s-%d was deleted or moved meanwhile: %s", partition.topic, partition.index, error)
            return
        if not partition.offline:
            logger.error("partition %s-%d goes offline: %s", partition.topic, partition.index, error)
            partition.offline = True
        if partition in self._watches:
            self.fail_waiting_requests(partition, ErrorCode.KAFKA_STORAGE_ERROR)
        # Other nodes can lead the partitions of this directory only after the controller learns of the failure.
        cause = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
        self.on_disk_failure(partition.log.directory, cause)

    def _is_of_former_log(self, partition: Partition, error: BaseException) -> bool:
        """Whether the error is that of a log that was deleted, or that a move to another directory has replaced.

        Tasks in many steps may still use such a log. What they miss there is no failure of the device.
        """
        is_hosted = partition in self._watches
        if isinstance(error, CorruptLog):
            return not is_hosted
        if not isinstance(error, FileNotFoundError):
            return False
        home = home_of(partition.log.directory)
        is_elsewhere = error.filename is not None and not f"{error.filename}/".startswith(f"{home}/")
        return not is_hosted or is_elsewhere
