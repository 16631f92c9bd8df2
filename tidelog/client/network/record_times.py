"""When the records at given offsets were written: the first batch at each is fetched and looked into.

Used to tell a group's lag in seconds, which Kafka has no request for. Nothing is kept here. Invariant: every round ends
with an answer for at least one partition of each leader, or with its error, so that rounds end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from tidelog.client.model import EARLIEST_TIMESTAMP, TopicPartition
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.client.network.offsets import list_offsets
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import decode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic, PartitionData

_NEWEST_BY_NAME = 12
_WITHOUT_SESSION = -1
# A batch that is larger comes whole too, if it is the first of an answer; so it will be, in a later round.
_PARTITION_BYTES = 64 * 1024
_REQUEST_BYTES = 2 * 1024 * 1024
_PARTITIONS_PER_REQUEST = 200

Times = dict[TopicPartition, int | None]


async def first_record_times(cluster: Cluster, offsets: Mapping[TopicPartition, int], timeout_ms: float) -> Times:
    """For each partition the timestamp in ms of the first record at or after the offset, None where there is none.

    Where the log starts later, of its first record. Raises KafkaError, REQUEST_TIMED_OUT at the latest.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    cluster.track({partition.topic for partition in offsets})
    search = _Search(cluster, dict(offsets))
    failures = 0
    while search.wanted:
        problem = await search.ask()
        if search.gone:
            await search.begin_at_log_starts((deadline - loop.time()) * 1000)
        failures = 0 if problem is None else failures + 1
        wait_s = cluster.retry_backoff.wait_ms(failures) / 1000 if failures else 0.0
        if search.wanted and loop.time() + wait_s >= deadline:
            text = f"the times of {len(search.wanted)} partitions not found in {timeout_ms:.0f} ms: {problem}"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
        if failures:
            cluster.request_refresh()
            await asyncio.sleep(wait_s)
    return search.found


class _Search:
    def __init__(self, cluster: Cluster, wanted: dict[TopicPartition, int]) -> None:
        self._cluster = cluster
        self.wanted = wanted
        self.found: Times = {}
        self.gone: list[TopicPartition] = []

    async def ask(self) -> KafkaError | None:
        """One request to each leader; the last of the errors that may pass."""
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in self.wanted:
            by_leader.setdefault(self._cluster.metadata.leader(partition), []).append(partition)
        problem: KafkaError | None = None
        unled = by_leader.pop(-1, None)
        if unled:
            problem = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(unled[0]))
        calls = [self._ask_leader(leader, part[:_PARTITIONS_PER_REQUEST]) for leader, part in by_leader.items()]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, KafkaError) and outcome.retriable:
                problem = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
        return problem

    async def _ask_leader(self, leader: int, partitions: list[TopicPartition]) -> KafkaError | None:
        metadata = self._cluster.metadata
        topics: dict[str, FetchTopic] = {}
        for partition in partitions:
            name = partition.topic
            topic = topics.setdefault(name, FetchTopic(topic=name, topic_id=metadata.topic_id(name)))
            topic.partitions.append(
                FetchPartition(
                    partition=partition.partition,
                    current_leader_epoch=metadata.leader_epoch(partition),
                    fetch_offset=self.wanted[partition],
                    partition_max_bytes=_PARTITION_BYTES,
                )
            )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_REQUEST_BYTES,
            session_epoch=_WITHOUT_SESSION,
            topics=list(topics.values()),
        )
        by_name = any(topic.topic_id == NO_TOPIC_ID for topic in topics.values())
        newest = _NEWEST_BY_NAME if by_name else 32767
        response = await self._cluster.call(leader, request, FetchResponse, newest=newest)
        if response.error_code:
            raise KafkaError(ErrorCode.of(response.error_code), "fetch of single records")
        names = {topic.topic_id: topic.topic for topic in topics.values()}
        problem: KafkaError | None = None
        for told in response.responses:
            for data in told.partitions:
                partition = TopicPartition(told.topic or names[told.topic_id], data.partition_index)
                problem = self._take(partition, data) or problem
        return problem

    def _take(self, partition: TopicPartition, data: PartitionData) -> KafkaError | None:
        code = ErrorCode.of(data.error_code)
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self.gone.append(partition)
            return None
        if code is not ErrorCode.NONE:
            error = KafkaError(code, str(partition))
            if error.retriable:
                return error
            raise error
        offset = self.wanted[partition]
        buffer = memoryview(data.records or b"")
        for position, header in iter_headers(buffer):
            if header.next_offset <= offset:
                continue
            if not header.is_control:
                for record in decode_batch(buffer, position, header):
                    if record.offset >= offset:
                        self._answer(partition, record.timestamp)
                        return None
            # Nothing is left of it at or behind the offset, or it is a transaction's end: look behind it.
            self.wanted[partition] = header.next_offset
        if self.wanted[partition] >= data.high_watermark:
            self._answer(partition, None)
        return None

    def _answer(self, partition: TopicPartition, timestamp_ms: int | None) -> None:
        self.found[partition] = timestamp_ms
        del self.wanted[partition]

    async def begin_at_log_starts(self, timeout_ms: float) -> None:
        """Retention was faster than whoever reads: go on where the log begins now, unless that is before."""
        gone, self.gone = self.gone, []
        starts = await list_offsets(
            self._cluster, dict.fromkeys(gone, EARLIEST_TIMESTAMP), timeout_ms=max(timeout_ms, 0)
        )
        for partition in gone:
            start = starts[partition]
            if start is None or start.offset <= self.wanted[partition]:
                self._answer(partition, None)  # beyond the end of the log
            else:
                self.wanted[partition] = start.offset
