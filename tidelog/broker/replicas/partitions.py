"""The partitions this node hosts, and everyone who waits for one of them.

Looks partitions up for the handlers, appends, and wakes parked produces and waiting fetches when a high watermark
moves. Which partitions there are is `hosting`'s business, their syncs are `flushes.py`'s; nothing is decided here about
replication (`replication/partition.py`) or bytes (`storage/log/partition_log.py`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tidelog.broker.network.counters import TopicTraffic
from tidelog.broker.replicas.deletions import Deletions
from tidelog.broker.replicas.fetching.fetch_sessions import FetchSessions, SessionPartition
from tidelog.broker.replicas.fetching.follower_answers import Tail
from tidelog.broker.replicas.fetching.follower_fetches import FollowerFetches
from tidelog.broker.replicas.fetching.follower_sessions import FollowerEntry
from tidelog.broker.replicas.flushes import Flushes
from tidelog.broker.scheduling.callbacks import call_all
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.purgatory import OffsetWaiters
from tidelog.broker.scheduling.timers import DeadlineTimer
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.hot_replication import INLINE_BYTES_MAX
from tidelog.replication.controller.decisions.topic_names import MAX_LENGTH
from tidelog.replication.partition import ACKS_ALL, Partition, ReplicaPorts
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.producers.refused_batches import sequenced_header
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.inspection import NeedsInspection

if TYPE_CHECKING:
    import random
    from concurrent.futures import Executor

    from tidelog.storage.log.partition_log import AppendInfo, PartitionLog
    from tidelog.storage.producers.verification import TransactionAppend
    from tidelog.storage.segments.reader import ColdRead

logger = logging.getLogger("tidelog.partitions")

# The last records appended are kept for the followers that wait for them, up to this size.
TAIL_BYTES_MAX = INLINE_BYTES_MAX

Committed = Callable[[Exception | None], None]


class _Watch:
    """Who waits for one partition; also what a fetch session holds to leave again (`fetch_sessions.Watched`)."""

    __slots__ = ("fetches", "followers", "produces", "syncs", "tail", "traffic", "writes")

    def __init__(self, traffic: TopicTraffic) -> None:
        self.fetches: dict[SessionPartition, None] = {}
        self.followers: dict[FollowerEntry, None] = {}
        self.produces = OffsetWaiters()
        self.syncs = OffsetWaiters()  # produces with acks=1
        self.writes = OffsetWaiters()  # of coordinators
        self.tail = Tail()
        self.traffic = traffic  # of the topic

    def watch(self, entry: SessionPartition) -> None:
        self.fetches[entry] = None

    def unwatch(self, entry: SessionPartition) -> None:
        self.fetches.pop(entry, None)


class Partitions:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        executor: Executor | None,
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
        """`replica`: what replicas ask of the node; None for a node that is alone."""
        self.deadlines = DeadlineTimer(loop)
        self.wakes = DeferredCallbacks(loop)
        self.deletions = Deletions()
        self.follower_fetches = FollowerFetches(self, loop, rng, tells_high_watermark=tells_followers_high_watermark)
        self.on_disk_failure: Callable[[str, OSError], None] = lambda path, error: None
        """Told of every error of the device, with the path of what met it."""
        self.on_damage: Callable[[Partition], ErrorCode] = lambda partition: ErrorCode.CORRUPT_MESSAGE
        """Told where damaged records were asked for; what the client is answered."""
        self.replica_ports = replica or ReplicaPorts()
        self.fetch_sessions = FetchSessions(fetch_session_slots_max, rng)
        self.fetch_bytes_max = fetch_bytes_max
        self._loop = loop
        self._executor = executor
        self._clock_ms = clock_ms
        # By topic name and by topic id: a handler looks up whichever its version carries.
        self._hosted: dict[str | bytes, dict[int, Partition]] = {}
        self._unavailable: set[tuple[str | bytes, int]] = set()
        self.traffic: dict[str, TopicTraffic] = {}
        """Of each topic hosted here, for as long as it is."""
        self._watches: dict[Partition, _Watch] = {}  # also kept by the partition, for whoever is in a hurry
        self._known_elsewhere = known_elsewhere
        self.flushes = Flushes(loop, executor, clock_ms, stopwatch, self._watches.__contains__, self._fail)

    # ------------------------------------------------------------------------------------------------------ look-up

    def leader(self, topic: str | bytes, index: int) -> Partition:
        """The partition this node leads, by topic name or 16-byte id. Raises the error a client understands."""
        indexes = self._hosted.get(topic)
        partition = indexes.get(index) if indexes is not None else None
        if partition is None:
            if (topic, index) in self._unavailable:
                raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
            if self._known_elsewhere(topic, index):
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
            unknown_id = indexes is None and isinstance(topic, bytes)
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_ID if unknown_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if partition.offline:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        if not partition.leads:
            raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        return partition

    def readable(self, topic: str | bytes, index: int) -> Partition:
        """The replica hosted here, leader or not, for a consumer that may read from followers (KIP-392)."""
        partition = self._hosted.get(topic, {}).get(index)
        return self.leader(topic, index) if partition is None or partition.offline else partition

    def find(self, topic: str | bytes, index: int) -> Partition | None:
        """The replica hosted here, whatever its role."""
        return self._hosted.get(topic, {}).get(index)

    def is_known(self, topic: str | bytes, index: int) -> bool:
        """Whether there is such a partition, here or elsewhere."""
        return self.find(topic, index) is not None or self._known_elsewhere(topic, index)

    @property
    def unavailable_count(self) -> int:
        """Replicas that belong here and whose logs cannot be opened."""
        return len(self._unavailable) // 2

    def wall_ms(self) -> int:
        """Now, since 1970."""
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
        """Append as leader; raises KafkaError, or NeedsInspection for a batch to be looked at first.

        A log that cannot be written takes its partition offline. Those who wait for the high watermark are told when
        all else is done: what they do next may append again.
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
        watch = partition.watch
        traffic = watch.traffic
        traffic.bytes_in += len(batches)
        traffic.records_in += info.last_offset - info.first_offset + 1
        if watch.followers:
            written = info.written
            if written is not None and len(written) <= TAIL_BYTES_MAX:
                watch.tail.appended(info.first_offset, info.last_offset + 1, bytes(written))
            for entry in watch.followers:
                entry.appended()
        if log.high_watermark != high_watermark and (
            watch.fetches or watch.produces.waiting or watch.writes.waiting or watch.followers
        ):
            self._advanced(partition)
        durability = partition.log.durability
        if durability.is_wanted or durability.blocked_from >= 0:
            self.flushes.flush_if_due(partition)
        return info

    def note_refused(self, topic: str | bytes, index: int, batches: memoryview | None, code: ErrorCode) -> None:
        """A client's batch was refused, wherever on its way: what follows it is refused, too, until it comes again."""
        partition = self.find(topic, index)
        if partition is not None:
            partition.note_refused(batches, code, self._clock_ms())
        elif len(topic) <= MAX_LENGTH:
            header = sequenced_header(batches)
            if header is not None:
                self.replica_ports.refused.note(((topic, index),), header, code, None, self._clock_ms())

    def delete_records(self, partition: Partition, offset: int) -> int:
        """Move the leader's log start; the offset meant. Raises KafkaError. Whoever fetches is told."""
        log_start_offset = partition.log.log_start_offset
        try:
            meant = partition.delete_records_as_leader(offset)
        except Exception as error:
            raise self.refusal(partition, error) from None
        if partition.log.log_start_offset != log_start_offset:
            self.touch(partition)
            for follower in partition.watch.followers:
                follower.appended()
        return meant

    async def close(self) -> None:
        """Wait for the flushes under way; no more is begun."""
        self.follower_fetches.close()
        self.deadlines.close()
        await self.flushes.close()

    def run_cold(self, cold: ColdRead, done: Callable[[], None]) -> None:
        """Bring what a read missed into memory, on a thread; then `done`. The next read tells whether it succeeded."""
        cold.pin()

        def finished(future: asyncio.Future[None]) -> None:
            cold.unpin()
            if not future.cancelled():
                done()

        self._loop.run_in_executor(self._executor, cold.warm).add_done_callback(finished)

    # ------------------------------------------------------------------------------------------------------ waiting

    def when_committed(
        self, partition: Partition, required_offset: int, callback: Committed, *, for_client: bool = False
    ) -> None:
        """Call back with None once the high watermark is at `required_offset`, or with what prevents it.

        Only clients are told NOT_ENOUGH_REPLICAS_AFTER_APPEND: for what a coordinator wrote it prevents nothing.
        """
        if partition.offline or not partition.leads:
            code = ErrorCode.KAFKA_STORAGE_ERROR if partition.offline else ErrorCode.NOT_LEADER_OR_FOLLOWER
            callback(KafkaError(code))
        elif partition.high_watermark >= required_offset:
            callback(None)
        else:
            watch = partition.watch
            (watch.produces if for_client else watch.writes).add(required_offset, callback)

    def when_acknowledged(self, partition: Partition, required_offset: int, acks: int, callback: Committed) -> None:
        """The same for a client: with acks=1 it waits for the device alone (flush.messages), not for other replicas."""
        if acks == ACKS_ALL or partition.offline or not partition.leads:
            self.when_committed(partition, required_offset, callback, for_client=True)
        elif partition.log.committable_offset >= required_offset:
            callback(None)
        else:
            partition.watch.syncs.add(required_offset, callback)

    def watch(self, entry: SessionPartition) -> None:
        """Tell this entry's session when its partition changes; nothing to tell where it is not hosted."""
        topic, index = entry.key
        partition = self._hosted.get(topic, {}).get(index)
        if partition is not None:
            watch = self._watches[partition]
            watch.watch(entry)
            entry.watched = watch

    def watch_as_follower(self, entry: FollowerEntry) -> Partition | None:
        """The partition of an entry of a follower's session, which hears of its appends from now on."""
        partition = self.find(*entry.key)
        if partition is not None:
            partition.watch.followers[entry] = None
            entry.partition = partition
        return partition

    def _advanced(self, partition: Partition) -> None:
        """The high watermark, the log start or the leader of a partition has changed."""
        watch = partition.watch
        if watch.fetches:
            call_all([entry.changed for entry in watch.fetches])
        if self.follower_fetches.tells_high_watermark:
            for follower in watch.followers:
                follower.appended()
        if watch.produces.waiting:
            call_all(watch.produces.reached(partition.high_watermark), None)
        if watch.writes.waiting:
            call_all(watch.writes.reached(partition.high_watermark), None)

    # ------------------------------------------------------------------------------------------------- hosting's side

    def add(self, topic: str, index: int, topic_id: bytes, log: PartitionLog) -> Partition:
        """Host a replica, with no role yet."""
        partition = Partition(topic, index, topic_id, log, self._advanced, self.replica_ports)
        self._hosted.setdefault(topic, {})[index] = partition
        self._hosted.setdefault(topic_id, {})[index] = partition
        traffic = self.traffic.get(topic)
        if traffic is None:
            traffic = self.traffic[topic] = TopicTraffic()
        partition.watch = self._watches[partition] = _Watch(traffic)
        return partition

    def add_unavailable(self, topic: str, index: int, topic_id: bytes) -> None:
        """A replica that belongs here and whose log is out of reach."""
        self._unavailable.update(((topic, index), (topic_id, index)))

    def is_unavailable(self, topic: str, index: int) -> bool:
        return (topic, index) in self._unavailable

    def remove_unavailable(self, topic: str, index: int, topic_id: bytes) -> bool:
        """Whether there was one."""
        found = (topic_id, index) in self._unavailable
        self._unavailable.difference_update(((topic, index), (topic_id, index)))
        return found

    def remove(self, partition: Partition, code: ErrorCode) -> None:
        """Forget a replica: whoever waits for it is told so. KAFKA_STORAGE_ERROR: it is there, but out of reach."""
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
        self.give_up(partition, code)
        watch = self._watches.pop(partition)
        for entry in watch.fetches:
            entry.watched = None
        for follower in watch.followers:
            follower.partition = None

    def touch(self, partition: Partition) -> None:
        """Something a fetch reports has changed besides the high watermark."""
        watch = self._watches[partition]
        call_all([entry.changed for entry in watch.fetches])
        for follower in watch.followers:
            follower.session.unsettled[follower] = None
            follower.sent_high_watermark = -1

    def role_changed(self, partition: Partition) -> None:
        """It leads in another epoch, or other replicas follow it: whoever fetches is to know at once."""
        watch = self._watches[partition]
        watch.tail.clear()
        self.deletions.look(partition)
        call_all([entry.changed for entry in watch.fetches])
        for follower in list(watch.followers):
            self.follower_fetches.look_again(follower)

    def look_for_followers(self, partition: Partition) -> None:
        """Whoever was left out and follows quietly is booked with its next fetch, though that does not mention it."""
        book = partition.in_sync
        if partition.leads and len(book.isr) < len(book.replicas):
            for follower in self._watches[partition].followers:
                follower.session.outside[follower] = None

    def give_up_acks_all(self, partition: Partition) -> None:
        """The ISR has become too small while produces wait: they are in the log, and may be lost all the same."""
        waiting = self._watches[partition].produces.take_all()
        call_all(waiting, KafkaError(ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND))

    def give_up(self, partition: Partition, code: ErrorCode) -> None:
        """This replica no longer leads: waiting fetches look again, waiting produces fail with `code`."""
        watch = self._watches[partition]
        self.deletions.give_up(partition, code)
        self.role_changed(partition)
        waiting = [*watch.produces.take_all(), *watch.syncs.take_all(), *watch.writes.take_all()]
        call_all(waiting, KafkaError(code))

    def refusal(self, partition: Partition | None, error: Exception) -> KafkaError:
        """What the client is told of a failure. A log that cannot be used takes its partition offline."""
        if isinstance(error, KafkaError):
            return error
        if isinstance(error, DamagedRecords) and partition is not None:
            return KafkaError(self.on_damage(partition), str(error))
        if isinstance(error, (OSError, CorruptLog)) and partition is not None:
            if partition.log.can_retry(error):
                logger.error("%s-%d: %s", partition.topic, partition.index, error)
            else:
                self._fail(partition, error)
            return KafkaError(ErrorCode.KAFKA_STORAGE_ERROR)
        logger.error("%s failed", partition, exc_info=error)
        return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR)

    def failed(self, partition: Partition, error: Exception) -> None:
        """A follower could not write what it fetched, or cut what it should."""
        self._fail(partition, error)

    def _fail(self, partition: Partition, error: BaseException) -> None:
        if not partition.offline:
            logger.error("partition %s-%d goes offline: %s", partition.topic, partition.index, error)
            partition.offline = True
        if partition in self._watches:
            self.give_up(partition, ErrorCode.KAFKA_STORAGE_ERROR)
        # Others can lead what is in this directory only if the controller hears that it has failed.
        cause = error if isinstance(error, OSError) else OSError(errno.EIO, str(error))
        self.on_disk_failure(partition.log.directory, cause)
