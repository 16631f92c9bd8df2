"""Repairs over a slow link: what brings no answer in time is asked for with half the size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tidelog.broker.replicas.repairs import FETCH_BYTES_MAX, Repairs
from tidelog.protocol.messages.fetch import FetchableTopicResponse, FetchResponse, PartitionData
from tidelog.replication.ports import Endpoint, PeerUnreachable

TOPIC_ID = b"t" * 16
LOG_BYTES = 3 * FETCH_BYTES_MAX


class SlowLink:
    """To a replica whose log is of zeros; offsets are positions. The clock goes on while an answer arrives."""

    def __init__(self, bytes_per_s: int, batch_bytes: int = 1) -> None:
        self.bytes_per_s, self.batch_bytes = bytes_per_s, batch_bytes
        self.now_s = 0.0
        self.sent: list[int] = []
        self.partition: Any = Mock(topic="t", index=0, topic_id=TOPIC_ID)
        unused: Any = None
        clock: Any = SimpleNamespace(time=lambda: self.now_s)
        self.repairs = Repairs(1, unused, unused, lambda broker: Endpoint("node", broker), self.exchange, clock, unused)

    async def exchange(self, endpoint: Endpoint, request: Any, version: int, *, timeout_ms: int, **_: Any) -> Any:
        asked = request.topics[0].partitions[0]
        size = min(max(asked.partition_max_bytes, self.batch_bytes), LOG_BYTES - asked.fetch_offset)
        self.now_s += min(size / self.bytes_per_s, timeout_ms / 1000)
        if size > self.bytes_per_s * timeout_ms / 1000:
            raise PeerUnreachable("no answer in time")
        self.sent.append(size)
        data = PartitionData(partition_index=0, high_watermark=LOG_BYTES, records=bytes(size))
        return FetchResponse(responses=[FetchableTopicResponse(topic_id=TOPIC_ID, partitions=[data])])

    async def copy(self) -> int:
        """How many attempts bring the whole log; at most 100."""
        position = attempts = 0
        while position < LOG_BYTES and attempts < 100:
            attempts += 1
            try:
                position += len(await self.repairs.fetch(self.partition, 2, position, up_to_log_end=True))
                await self.repairs.fetch(self.partition, 2, 0, up_to_log_end=True, bytes_max=1)
            except PeerUnreachable:
                continue
        assert position == LOG_BYTES
        return attempts


@pytest.mark.parametrize("bytes_per_s", [20_000, 100_000, 200_000])
async def test_a_copy_comes_over_a_slow_link(bytes_per_s: int) -> None:
    """It was fetched again and again, 1 MiB at once."""
    link = SlowLink(bytes_per_s)
    await link.copy()
    assert link.now_s < 2 * LOG_BYTES / bytes_per_s + 40


async def test_quick_answers_are_as_large_as_before() -> None:
    link = SlowLink(10_000)
    with pytest.raises(PeerUnreachable):
        await link.repairs.fetch(link.partition, 2, 0, up_to_log_end=True)
    link.bytes_per_s = 100_000_000
    assert await link.copy() == 4
    assert max(link.sent) == FETCH_BYTES_MAX


async def test_a_fast_link_brings_all_at_once() -> None:
    assert await SlowLink(100_000_000).copy() == 3
