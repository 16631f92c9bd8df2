"""What a raw reader makes of an answer with a damaged batch in it: asked for again or refused, never passed over."""

from __future__ import annotations

import asyncio
import struct

import pytest

from tidelog.client import Producer
from tidelog.client.model import TopicPartition
from tidelog.client.network.raw_fetch import RawBatches, _chunk
from tidelog.client.sync.consumer import RawReader
from tidelog.protocol.batches.record_batch import HEADER_SIZE, write_crc
from tidelog.protocol.batches.records import encode_batch, iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.fetch import PartitionData
from tidelog.testing.embedded import EmbeddedBroker

T0 = TopicPartition("t", 0)


def batch(first: int, last: int) -> bytes:
    return bytes(encode_batch([(1, None, b"%d" % offset, ()) for offset in range(first, last)], base_offset=first))


THREE = (batch(0, 10), batch(10, 20), batch(20, 30))


def chunk(records: bytes, offset: int = 0, end: int = 30, high_watermark: int = 30) -> RawBatches | None:
    data = PartitionData(records=records, high_watermark=high_watermark, partition_index=0, error_code=0)
    return _chunk(T0, data, offset, end, check_crcs=True)


def offsets(found: RawBatches) -> list[int]:
    return [record.offset for record in iter_records(found.data) if found.first_offset <= record.offset < 30]


@pytest.mark.parametrize("place", range(HEADER_SIZE))
@pytest.mark.parametrize("value", [0x00, 0x01, 0x7F, 0x80, 0xFF])
def test_a_damaged_header_makes_no_gap(place: int, value: int):
    damaged = bytearray(THREE[1])
    damaged[place] = value
    # No CRC covers the base offset, bytes 0 to 7: where no batch stands before it, nothing can tell.
    for offset in (0, 10, 15) if place >= 8 else (0,):
        try:
            found = chunk(THREE[0] * (offset < 10) + bytes(damaged) + THREE[2], offset)
            rows = [each for each in offsets(found) if each >= offset] if found else None
        except KafkaError:
            continue
        assert found is not None
        assert rows == list(range(offset, found.next_offset))


@pytest.mark.parametrize("magic", [0, 1])
def test_a_short_message_of_an_old_format_is_named(magic: int):
    with pytest.raises(KafkaError, match=f"magic {magic}") as refused:
        chunk(struct.pack(">qiIb", 0, 22, 0, magic) + bytes(17))
    assert refused.value.code is ErrorCode.INVALID_RECORD


def test_a_batch_of_earlier_offsets_where_another_was_asked_for_is_refused():
    displaced = bytearray(THREE[1])
    displaced[7] = 0  # the base offset, 10
    with pytest.raises(KafkaError, match="a batch of earlier offsets came where 10 was asked for"):
        chunk(bytes(displaced) + THREE[2], 10)
    found = chunk(THREE[0] + THREE[1] + THREE[2], 10)  # as a broker may answer that knows its place roughly
    assert found is not None
    assert offsets(found) == list(range(10, 30))


def test_offsets_that_cannot_be_are_refused_though_the_crc_is_right():
    negative = bytearray(THREE[1])
    negative[23:27] = struct.pack(">i", -5)
    write_crc(negative, 0, len(negative))
    for records in (THREE[0] + bytes(negative) + THREE[2], THREE[1] + THREE[0], THREE[1] + THREE[1], batch(30, 35)):
        with pytest.raises(KafkaError) as failure:
            chunk(records)
        assert failure.value.code is ErrorCode.CORRUPT_MESSAGE
        assert "t-0" in str(failure.value)


def test_a_chunk_has_the_epoch_of_its_last_batch_before_the_end():
    """The next fetch says it, and a leader with another log before that offset refuses."""
    epochs = [
        bytes(encode_batch([(1, None, b"", ())], base_offset=offset, leader_epoch=epoch))
        for offset, epoch in ((0, 3), (1, 5), (2, 7))
    ]
    for end, epoch in ((1, 3), (2, 5), (3, 7)):
        found = chunk(b"".join(epochs), 0, end)
        assert found is not None
        assert (found.next_offset, found.last_epoch) == (end, epoch)


def test_gaps_of_compaction_are_none():
    found = chunk(THREE[0] + THREE[2])
    assert found is not None
    assert (offsets(found), found.next_offset) == ([*range(10), *range(20, 30)], 30)


def test_a_batch_that_never_comes_whole_says_so():
    with pytest.raises(KafkaError, match="no whole batch in the 40 bytes that came for offset 0"):
        chunk(THREE[0][:40])


def test_a_reader_that_receives_less_than_a_chunk_asks_for_less() -> None:
    """It asked for the same until the read failed after `stall_timeout_ms`."""

    async def send_records(brokers: str) -> None:
        async with Producer(bootstrap_servers=brokers, batch_size=4000) as producer:
            await producer.send_many("t", [(b"k", bytes(200))] * 1000)

    with EmbeddedBroker() as broker:
        brokers = broker.bootstrap_servers
        asyncio.run(send_records(brokers))
        with RawReader(bootstrap_servers=brokers, receive_message_max_bytes=40_000, retry_backoff_ms=10) as reader:
            chunks = list(reader.fetch(T0, 0, 1000, stall_timeout_ms=20_000))
        assert sum(len(list(iter_records(chunk.data))) for chunk in chunks) == 1000


def test_a_batch_that_a_reader_cannot_receive_is_an_error_as_soon_as_it_is_asked_for_alone() -> None:
    """It was asked for again until the read failed after `stall_timeout_ms`, as if no records had come."""

    async def send_records(brokers: str) -> None:
        async with Producer(bootstrap_servers=brokers) as producer:
            await producer.send_and_wait("t", b"small")
            await producer.send_and_wait("t", bytes(50_000))

    with EmbeddedBroker() as broker:
        brokers = broker.bootstrap_servers
        asyncio.run(send_records(brokers))
        options = {"receive_message_max_bytes": 40_000, "retry_backoff_ms": 10, "retry_backoff_max_ms": 10}
        with RawReader(bootstrap_servers=brokers, **options) as reader:
            chunks = reader.fetch(T0, 0, 2, stall_timeout_ms=20_000)
            assert [record.value for record in iter_records(next(chunks).data)] == [b"small"]
            with pytest.raises(KafkaError, match="records of t-0 at 1 cannot be fetched") as failure:
                next(chunks)
            assert failure.value.code is ErrorCode.MESSAGE_TOO_LARGE
