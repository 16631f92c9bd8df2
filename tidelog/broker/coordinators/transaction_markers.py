"""The sender of transaction markers: to the leaders of a transaction's partitions, again and again until each has one.

It knows no states of transactions; the transaction coordinator decides what a marker says. This node's own partitions
need no connection. Invariant: for every partition of a marker that is not cancelled, `on_done` is called once.
Deviation: Kafka gives up the whole marker when one partition refuses it for good, and the transaction stays prepared.
Source: Kafka's `TransactionMarkerChannelManager`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from tidelog.broker.coordinators.broker_queues import BrokerQueues
from tidelog.broker.coordinators.marker_writer import Marker, MarkerWriter, TopicPartition
from tidelog.broker.coordinators.peer_versions import PeerVersions
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from tidelog.replication.backoff import Backoff
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable

if TYPE_CHECKING:
    import random

    from tidelog.broker.coordinators.transaction_ports import MarkerToSend
    from tidelog.replication.controller.metadata.image import MetadataImage

logger = logging.getLogger("tidelog.transactions")

VERSION: Final = 2
OLDEST_VERSION: Final = 1  # Kafka's before 4.3; it lacks the transaction version
BACKOFF_MIN_MS: Final = 100
BACKOFF_MAX_MS: Final = 1000
# A marker counts once for each of its partitions.
MARKERS_PER_REQUEST_MAX: Final = 5000
# The other end answers within request.timeout.ms; its answer needs some time, too.
ANSWER_GRACE_MS: Final = 5000

OnDone = Callable[[frozenset[TopicPartition]], None]

# The partition needs no marker: a later epoch of the producer has ended its transaction there, as when an operator
# aborts it; or the partition is one of a topic without transactions.
_NOT_NEEDED: Final = frozenset((ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TOPIC_EXCEPTION))


class _PendingMarker:
    """One marker that is being sent. `waiting`: partitions that are tried again at `retry`."""

    __slots__ = ("backoff", "is_over", "marker", "on_done", "retry", "waiting")

    def __init__(self, marker: MarkerToSend, on_done: OnDone) -> None:
        self.marker = marker
        self.on_done = on_done
        self.is_over = False
        self.backoff = Backoff(BACKOFF_MIN_MS, BACKOFF_MAX_MS)
        self.waiting: set[TopicPartition] = set()
        self.retry: asyncio.TimerHandle | None = None

    def as_written(self) -> Marker:
        marker = self.marker
        return Marker(
            marker.producer_id,
            marker.producer_epoch,
            marker.is_commit,
            marker.coordinator_epoch,
            marker.transaction_version,
        )


# A marker, and those of its partitions that one broker leads.
_Piece = tuple[_PendingMarker, list[TopicPartition]]


class TransactionMarkers:
    """Implements `transaction_ports.MarkerSender`. `endpoint_of`: where a broker listens, None if unknown."""

    def __init__(
        self,
        node_id: int,
        writer: MarkerWriter,
        image: Callable[[], MetadataImage],
        endpoint_of: Callable[[int], Endpoint | None],
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        request_timeout_ms: int,
    ) -> None:
        self._node_id = node_id
        self._writer = writer
        self._image = image
        self._endpoint_of = endpoint_of
        self._peers = PeerVersions(exchange, OLDEST_VERSION, VERSION)
        self._loop = loop
        self._rng = rng
        self._answer_timeout_ms = request_timeout_ms + ANSWER_GRACE_MS
        self._pending: dict[_PendingMarker, set[TopicPartition]] = {}  # partitions that have no marker yet
        self._queues: BrokerQueues[_Piece] = BrokerQueues(loop, "markers", _take, self._send_request, self._send_later)
        self._to_try: deque[_PendingMarker] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        """Markers that some partition still lacks."""
        return len(self._pending)

    @property
    def waiting_partitions(self) -> int:
        """Partitions whose leader is unknown, or did not take the marker: they are tried again."""
        return sum(len(pending.waiting) for pending in self._pending)

    # -- MarkerSender ------------------------------------------------------------------------------------------------

    def send(self, marker: MarkerToSend, on_done: OnDone) -> None:
        if self._is_closed:
            return
        pending = _PendingMarker(marker, on_done)
        self._pending[pending] = set(marker.partitions)
        self._loop.call_soon(self._route, pending, sorted(marker.partitions))

    def cancel(self, log_partition: int) -> None:
        for pending in [each for each in self._pending if each.marker.log_partition == log_partition]:
            self._end(pending)

    def on_image(self) -> None:
        """The metadata has changed: what waits for a leader may have one."""
        if self._to_try:
            self._to_try.clear()  # its next piece is on its way
        else:
            self._loop.call_soon(self._try_piece)
        self._to_try.extend(pending for pending in self._pending if pending.waiting)

    def _try_piece(self) -> None:
        """Try some again, and the rest when others were served."""
        for _ in range(min(PIECE_ELEMENTS_MAX, len(self._to_try))):
            pending = self._to_try.popleft()
            if pending.waiting and not pending.is_over:
                self._try_again(pending)
        if self._to_try:
            self._loop.call_soon(self._try_piece)

    async def close(self) -> None:
        self._is_closed = True
        for pending in list(self._pending):
            self._end(pending)
        await self._queues.close()

    # -- sending -----------------------------------------------------------------------------------------------------

    def _route(self, pending: _PendingMarker, partitions: list[TopicPartition]) -> None:
        """Hand each partition's marker to its leader."""
        if pending.is_over:
            return
        image = self._image()
        partition_image = image.partition(*partitions[0]) if len(partitions) == 1 else None
        if partition_image is not None and partition_image.leader == self._node_id:
            self._write_here(pending, partitions)  # usual for a node alone
            return
        by_leader: dict[int, list[TopicPartition]] = {}
        deleted: list[TopicPartition] = []
        homeless: list[TopicPartition] = []
        for partition in partitions:
            assignment = image.partition(*partition)
            if assignment is None:
                deleted.append(partition)
            elif assignment.leader == self._node_id or (
                assignment.leader >= 0 and self._endpoint_of(assignment.leader) is not None
            ):
                by_leader.setdefault(assignment.leader, []).append(partition)
            else:
                homeless.append(partition)
        self._wait(pending, homeless)
        for leader, led in by_leader.items():
            if leader != self._node_id:
                self._queues.add(leader, (pending, led))
        if self._node_id in by_leader:
            self._write_here(pending, by_leader[self._node_id])
        if deleted:
            logger.info("no marker of producer %d is needed in %s: deleted", pending.marker.producer_id, deleted)
            self._settle(pending, dict.fromkeys(deleted, ErrorCode.NONE))

    def _write_here(self, pending: _PendingMarker, partitions: list[TopicPartition]) -> None:
        """Write a piece, and the rest when others were served."""
        piece, rest = partitions, partitions[PIECE_ELEMENTS_MAX:]
        if rest:
            piece = partitions[:PIECE_ELEMENTS_MAX]
        results: dict[TopicPartition, ErrorCode] = {}

        def on_written(partition: TopicPartition, error: ErrorCode) -> None:
            results[partition] = error
            if len(results) == len(piece):
                self._settle(pending, results)

        if not pending.is_over:
            self._writer.write(pending.as_written(), piece, on_written)
        if rest:
            self._loop.call_soon(self._write_here, pending, rest)

    async def _send_request(self, broker_id: int, pieces: list[_Piece], lane: str) -> None:
        endpoint = self._endpoint_of(broker_id)
        try:
            if endpoint is None:
                raise PeerUnreachable(f"broker {broker_id} is unknown")
            response = await self._peers.exchange(
                endpoint, _request(pieces), timeout_ms=self._answer_timeout_ms, lane=lane
            )
        except PeerUnreachable as error:
            logger.info("markers for broker %d are sent again: %s", broker_id, error)
            self._send_later(pieces)
            return
        results = _results(response)
        for pending, partitions in pieces:
            of_producer = results.get(pending.marker.producer_id, {})
            missing = ErrorCode.UNKNOWN_SERVER_ERROR
            self._settle(pending, {each: of_producer.get(each, missing) for each in partitions})

    def _send_later(self, pieces: list[_Piece]) -> None:
        """Send again what has no result yet: without its marker a transaction would stay prepared for ever."""
        for pending, partitions in pieces:
            left = self._pending.get(pending, ())
            self._wait(pending, [each for each in partitions if each in left])

    # -- results -----------------------------------------------------------------------------------------------------

    def _settle(self, pending: _PendingMarker, results: dict[TopicPartition, ErrorCode]) -> None:
        if pending.is_over:
            return
        if not any(results.values()):  # the usual result: no error
            self._done(pending, frozenset(results))
            return
        marker = pending.marker
        failed = {partition: error for partition, error in results.items() if error is not ErrorCode.NONE}
        for partition in [partition for partition, error in failed.items() if error in _NOT_NEEDED]:
            error = failed.pop(partition)
            logger.warning(
                "%s-%d refuses the marker of producer %d, epoch %d, with %s; its transaction ends without it",
                *partition, marker.producer_id, marker.producer_epoch, error.name,
            )  # fmt: skip
        done = frozenset(partition for partition in results if partition not in failed)
        if failed:
            logger.debug("the marker of producer %d is sent again: %s", marker.producer_id, failed)
            self._wait(pending, failed)
        if done:
            self._done(pending, done)

    def _done(self, pending: _PendingMarker, partitions: frozenset[TopicPartition]) -> None:
        left = self._pending[pending]
        left -= partitions
        if not left:
            self._end(pending)
        pending.on_done(partitions)

    def _wait(self, pending: _PendingMarker, partitions: Iterable[TopicPartition]) -> None:
        if pending.is_over:
            return
        pending.waiting.update(partitions)
        if pending.waiting and pending.retry is None:
            delay_s = pending.backoff.next_ms(self._rng) / 1000
            pending.retry = self._loop.call_later(delay_s, self._try_again, pending)

    def _try_again(self, pending: _PendingMarker) -> None:
        if pending.retry is not None:
            pending.retry.cancel()
            pending.retry = None
        waiting, pending.waiting = pending.waiting, set()
        self._route(pending, sorted(waiting))

    def _end(self, pending: _PendingMarker) -> None:
        pending.is_over = True
        del self._pending[pending]
        if pending.retry is not None:
            pending.retry.cancel()


def _take(queue: deque[_Piece]) -> list[_Piece]:
    """What one request carries: each producer once, because its answer names producers alone."""
    taken: list[_Piece] = []
    later: list[_Piece] = []
    producers: set[int] = set()
    count = 0
    while queue and count < MARKERS_PER_REQUEST_MAX:
        pending, partitions = queue.popleft()
        if pending.is_over:
            continue
        if pending.marker.producer_id in producers:
            later.append((pending, partitions))
            continue
        room = MARKERS_PER_REQUEST_MAX - count
        if len(partitions) > room:
            later.append((pending, partitions[room:]))
            partitions = partitions[:room]
        producers.add(pending.marker.producer_id)
        count += len(partitions)
        taken.append((pending, partitions))
    queue.extendleft(reversed(later))
    return taken


def _request(pieces: list[_Piece]) -> WriteTxnMarkersRequest:
    markers = []
    for pending, partitions in pieces:
        topics: dict[str, WritableTxnMarkerTopic] = {}
        for name, index in partitions:
            topic = topics.get(name)
            if topic is None:
                topic = topics[name] = WritableTxnMarkerTopic(name=name)
            topic.partition_indexes.append(index)
        marker = pending.marker
        markers.append(
            WritableTxnMarker(
                producer_id=marker.producer_id,
                producer_epoch=marker.producer_epoch,
                transaction_result=marker.is_commit,
                topics=list(topics.values()),
                coordinator_epoch=marker.coordinator_epoch,
                transaction_version=marker.transaction_version,
            )
        )
    return WriteTxnMarkersRequest(markers=markers)


def _results(response: WriteTxnMarkersResponse) -> dict[int, dict[TopicPartition, ErrorCode]]:
    results: dict[int, dict[TopicPartition, ErrorCode]] = {}
    for marker in response.markers:
        of_producer = results.setdefault(marker.producer_id, {})
        for topic in marker.topics:
            for each in topic.partitions:
                of_producer[topic.name, each.partition_index] = ErrorCode.of(each.error_code)
    return results
