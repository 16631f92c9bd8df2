"""Timestamps of the records at given offsets, from the first batch at each offset.

Used for a group's lag in seconds; Kafka has no request for it. Stateless. Invariant: every round
settles at least one partition of each leader, or ends with that leader's error, so the rounds end.
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
from tidelog.protocol.errors import ErrorCode, KafkaError, counted
from tidelog.protocol.messages.fetch import (
    LAST_VERSION_WITH_NAMES,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)

_SESSIONLESS_EPOCH = -1
_PARTITION_BYTES = 64 * 1024
"""A larger batch arrives whole when it is the first of a response, which it is in a later round."""
_REQUEST_BYTES = 2 * 1024 * 1024
_PARTITIONS_PER_REQUEST = 200

Times = dict[TopicPartition, int | None]


async def first_record_times(cluster: Cluster, offsets: Mapping[TopicPartition, int], timeout_ms: float) -> Times:
    """For each partition, the timestamp in ms of the first record at or after the offset, or None.

    When the log starts later, it is the timestamp of the first record in the log. Raises
    KafkaError, at the latest REQUEST_TIMED_OUT after `timeout_ms`.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    cluster.track({partition.topic for partition in offsets})
    search = _Search(cluster, dict(offsets))
    failures = 0
    while search.offsets:
        last_error = await search.request_once()
        if search.deleted:
            await search.move_to_log_starts((deadline - loop.time()) * 1000)
        failures = 0 if last_error is None else failures + 1
        wait_s = cluster.retry_backoff.wait_ms(failures) / 1000 if failures else 0.0
        if search.offsets and loop.time() + wait_s >= deadline:
            missing = counted(len(search.offsets), "partition")
            text = f"the times of {missing} not found in {timeout_ms:.0f} ms: {last_error}"
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, text)
        if failures:
            cluster.request_refresh()
            await asyncio.sleep(wait_s)
    return search.times


class _Search:
    def __init__(self, cluster: Cluster, offsets: dict[TopicPartition, int]) -> None:
        self._cluster = cluster
        self.offsets = offsets
        self.times: Times = {}
        self.deleted: list[TopicPartition] = []

    async def request_once(self) -> KafkaError | None:
        """Send one request to each leader. Returns the last retriable error."""
        by_leader: dict[int, list[TopicPartition]] = {}
        for partition in self.offsets:
            by_leader.setdefault(self._cluster.metadata.leader(partition), []).append(partition)
        last_error: KafkaError | None = None
        leaderless = by_leader.pop(-1, None)
        if leaderless:
            last_error = KafkaError(ErrorCode.LEADER_NOT_AVAILABLE, str(leaderless[0]))
        calls = [
            self._request_from_leader(leader, part[:_PARTITIONS_PER_REQUEST]) for leader, part in by_leader.items()
        ]
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, KafkaError) and result.retriable:
                last_error = result
            elif isinstance(result, BaseException):
                raise result
        return last_error

    async def _request_from_leader(self, leader: int, partitions: list[TopicPartition]) -> KafkaError | None:
        metadata = self._cluster.metadata
        topics: dict[str, FetchTopic] = {}
        for partition in partitions:
            name = partition.topic
            topic = topics.setdefault(name, FetchTopic(topic=name, topic_id=metadata.topic_id(name)))
            topic.partitions.append(
                FetchPartition(
                    partition=partition.partition,
                    current_leader_epoch=metadata.leader_epoch(partition),
                    fetch_offset=self.offsets[partition],
                    partition_max_bytes=_PARTITION_BYTES,
                )
            )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_REQUEST_BYTES,
            session_epoch=_SESSIONLESS_EPOCH,
            topics=list(topics.values()),
        )
        by_name = any(topic.topic_id == NO_TOPIC_ID for topic in topics.values())
        max_version = LAST_VERSION_WITH_NAMES if by_name else 32767
        response = await self._cluster.call(leader, request, FetchResponse, max_version=max_version)
        if response.error_code:
            raise KafkaError(ErrorCode.of(response.error_code), "fetch of single records")
        names = {topic.topic_id: topic.topic for topic in topics.values()}
        last_error: KafkaError | None = None
        for topic_result in response.responses:
            for data in topic_result.partitions:
                partition = TopicPartition(topic_result.topic or names[topic_result.topic_id], data.partition_index)
                last_error = self._process(partition, data) or last_error
        return last_error

    def _process(self, partition: TopicPartition, data: PartitionData) -> KafkaError | None:
        code = ErrorCode.of(data.error_code)
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self.deleted.append(partition)
            return None
        if code is not ErrorCode.NONE:
            error = KafkaError(code, str(partition))
            if error.retriable:
                return error
            raise error
        offset = self.offsets[partition]
        buffer = memoryview(data.records or b"")
        for position, header in iter_headers(buffer):
            if header.next_offset <= offset:
                continue
            if not header.is_control:
                for record in decode_batch(buffer, position, header):
                    if record.offset >= offset:
                        self._set_time(partition, record.timestamp)
                        return None
            # The batch has no record at or after the offset, or it ends a transaction: continue
            # after it.
            self.offsets[partition] = header.next_offset
        if self.offsets[partition] >= data.high_watermark:
            self._set_time(partition, None)
        return None

    def _set_time(self, partition: TopicPartition, timestamp_ms: int | None) -> None:
        self.times[partition] = timestamp_ms
        del self.offsets[partition]

    async def move_to_log_starts(self, timeout_ms: float) -> None:
        """Retention deleted these offsets: continue at the log start, unless the offset lies beyond
        the log's end.
        """
        deleted, self.deleted = self.deleted, []
        starts = await list_offsets(
            self._cluster, dict.fromkeys(deleted, EARLIEST_TIMESTAMP), timeout_ms=max(timeout_ms, 0)
        )
        for partition in deleted:
            start = starts[partition]
            if start is None or start.offset <= self.offsets[partition]:
                self._set_time(partition, None)  # beyond the end of the log
            else:
                self.offsets[partition] = start.offset
