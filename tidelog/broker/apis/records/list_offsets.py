"""ListOffsets (key 2, versions 1-11): offsets by timestamp or by a special value from -1 to -6.

As in Kafka 4.3 without tiered storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.scheduling.inspections import Inspection
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from tidelog.replication.partition import Isolation
from tidelog.storage.segments.lookup import UNTRUE_HEADERS_MAX, LookupPause, LookupProgress, SlowLookup
from tidelog.storage.segments.reader import ColdRead

if TYPE_CHECKING:
    from tidelog.replication.partition import Partition

REQUEST = ListOffsetsRequest

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4
LATEST_TIERED = -5
EARLIEST_PENDING_UPLOAD = -6
# The first version of each special value; in older versions the partition gets UNSUPPORTED_VERSION, as in Kafka.
_SINCE = {MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}

_DEBUGGING_REPLICA_ID = -2  # the reader compares replicas: a follower answers for itself, too
_OFFSET_NOT_AVAILABLE_FROM = 5  # KIP-207
# The maximum of batches that a thread reads for one partition of a request. Only batches with wrong headers need more
# than one. Their results are dropped when too many requests run at once, and without a bound the reads could repeat
# for ever.
_SLOW_LOOKUPS_MAX = 2 * UNTRUE_HEADERS_MAX

# The partitions that are looked up in one turn of the loop: no more after this time, and PIECE_ELEMENTS_MAX at most.
PIECE_S = 0.001

_FoundOffset = tuple[int, int, int]  # timestamp, offset, leader epoch
_NOTHING: _FoundOffset = (-1, -1, -1)


def handle(services: Services, context: RequestContext, request: ListOffsetsRequest) -> ListOffsetsResponse | Deferred:
    listing = _Listing(services, context, request)
    if not listing.goes_on():
        listing.deferred = Deferred(exclusive=True)  # a connection may ask for very many: one waits at a time
        return listing.deferred
    return listing.response()


class _Listing:
    """One request. It handles partition after partition, and waits for a thread if records are not in memory."""

    def __init__(self, services: Services, context: RequestContext, request: ListOffsetsRequest) -> None:
        self._services, self._request = services, request
        self._version, self._host, self._client = context.api_version, context.client_host, context.connection
        requested = [(topic.name, partition) for topic in request.topics for partition in topic.partitions]
        times = Counter((name, partition.partition_index) for name, partition in requested)
        self._duplicates = {key for key, count in times.items() if count > 1}
        self._remaining = iter(requested)
        self._left_count = len(requested)
        self._topics: dict[str, dict[int, ListOffsetsPartitionResponse]] = {name: {} for name, _ in requested}
        self.deferred: Deferred | None = None
        self._slow_lookups: Counter[tuple[str, int]] = Counter()
        self._progress = LookupProgress()

    def goes_on(self) -> bool:
        """Handle the next partitions. Returns whether all are done; otherwise the request continues later by itself."""
        stopwatch = self._services.requests.stopwatch
        ends_s = stopwatch() + PIECE_S
        for name, partition in islice(self._remaining, PIECE_ELEMENTS_MAX):
            self._left_count -= 1
            if not self._answer(name, partition):
                return False
            if stopwatch() > ends_s:
                break
        if self._left_count:
            goes_on = partial(self._complete_if, self.goes_on)
            self._services.scheduler.wait(goes_on, is_first=False, for_records=False, host=self._host)
        return not self._left_count

    def _answer(self, name: str, partition: ListOffsetsPartition) -> bool:
        index = partition.partition_index
        try:
            if (name, index) in self._duplicates:
                raise KafkaError(ErrorCode.INVALID_REQUEST)
            timestamp, offset, epoch = _find(
                self._services, self._version, self._request, name, partition, self._progress
            )
            self._topics[name][index] = ListOffsetsPartitionResponse(
                partition_index=index,
                timestamp=timestamp,
                offset=offset,
                leader_epoch=epoch if self._version >= 4 else -1,
            )
        except ColdRead as cold:
            self._slow_lookups[name, index] += isinstance(cold, SlowLookup)
            if self._slow_lookups[name, index] > _SLOW_LOOKUPS_MAX:
                return self._failed(name, index, ErrorCode.INVALID_RECORD)
            again = partial(self._answer, name, partition)
            self._load(cold, lambda: self._complete_if(lambda: again() and self.goes_on()))
            return False
        except KafkaError as error:
            return self._failed(name, index, error.code)
        return True

    def _load(self, cold: ColdRead, done: Callable[[], None]) -> None:
        if isinstance(cold, LookupPause):
            if self._client is None or not self._client.is_gone:
                self._services.scheduler.wait(done, is_first=False, for_records=False, host=self._host)
            return
        if not isinstance(cold, SlowLookup):
            self._services.partitions.run_cold(cold, done)
            return
        # Not on the threads that wait for devices: hundreds of searches would take all of them for minutes.
        cold.pin()

        def searched(refusal: KafkaError | None) -> None:
            cold.unpin()
            if refusal is None:
                done()
            else:
                assert self.deferred is not None
                self.deferred.complete(refusal)

        self._services.inspections.begin(Inspection(cold, searched, 0, self._host, self._client))

    def _failed(self, name: str, index: int, code: ErrorCode) -> bool:
        self._topics[name][index] = ListOffsetsPartitionResponse(partition_index=index, error_code=code)
        return True

    def _complete_if(self, goes_on: Callable[[], bool]) -> None:
        assert self.deferred is not None
        try:
            response = self.response() if goes_on() else None
        except Exception as error:
            self.deferred.failed(error)
            return
        if response is not None:
            self.deferred.complete(response)

    def response(self) -> ListOffsetsResponse:
        return ListOffsetsResponse(
            topics=[
                ListOffsetsTopicResponse(name=name, partitions=list(answered.values()))
                for name, answered in self._topics.items()
            ]
        )


def refuse(request: ListOffsetsRequest, error: KafkaError, version: int) -> ListOffsetsResponse:
    return ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[
                    ListOffsetsPartitionResponse(partition_index=partition.partition_index, error_code=error.code)
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _find(
    services: Services, version: int, request: ListOffsetsRequest, topic: str, requested: ListOffsetsPartition,
    progress: LookupProgress,
) -> _FoundOffset:  # fmt: skip
    timestamp = requested.timestamp
    if timestamp < EARLIEST_PENDING_UPLOAD or version < _SINCE.get(timestamp, 0):
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION)
    partitions = services.partitions
    if request.replica_id == _DEBUGGING_REPLICA_ID:
        partition = partitions.readable(topic, requested.partition_index)
        partition.require_epoch(requested.current_leader_epoch, -1)
    else:
        partition = partitions.leader(topic, requested.partition_index)
        partition.require_leader(requested.current_leader_epoch, -1)
    if request.replica_id >= 0 or request.replica_id == _DEBUGGING_REPLICA_ID:
        isolation = Isolation.LOG_END
    else:
        isolation = Isolation.READ_COMMITTED if request.isolation_level == 1 else Isolation.READ_UNCOMMITTED
    bound = partition.read_bound(isolation)
    try:
        result = (
            (-1, bound, partition.leader_epoch)
            if timestamp == LATEST
            else _lookup(partition, timestamp, bound, progress)
        )
    except ColdRead:
        raise
    except Exception as error:
        raise partitions.refusal(partition, error) from None
    by_time = timestamp >= 0 or timestamp == MAX_TIMESTAMP
    if (timestamp == LATEST or (by_time and result == _NOTHING)) and isolation != Isolation.LOG_END:
        _refuse_what_may_go_back(partition, version)
    return result


def _refuse_what_may_go_back(partition: Partition, version: int) -> None:
    """Refuse the end offset while a new leader's high watermark may be below the one that the previous leader has
    reported.
    """
    if partition.in_sync.epoch_start_offset > partition.high_watermark:
        known = version >= _OFFSET_NOT_AVAILABLE_FROM
        raise KafkaError(ErrorCode.OFFSET_NOT_AVAILABLE if known else ErrorCode.LEADER_NOT_AVAILABLE)


def _lookup(partition: Partition, timestamp: int, bound: int, progress: LookupProgress) -> _FoundOffset:
    """`bound`: the offset below which the reader may read; the result is below it."""
    log = partition.log
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return -1, log.log_start_offset, log.leader_epochs.epoch_for_offset(log.log_start_offset)
    if timestamp in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return _NOTHING  # there is no tiered storage
    if timestamp == MAX_TIMESTAMP:
        result = log.max_timestamp_offset(wait=False)
    else:
        result = log.offset_for_timestamp(timestamp, wait=False, progress=progress)
    return result if result is not None and result[1] < bound else _NOTHING
