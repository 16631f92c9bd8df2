"""What a batch must be to enter a log."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import cramjam
import pytest

from tests.unit.storage.batches import NOW, batch, idempotent, marker
from tidelog.protocol.batches.compression import compress
from tidelog.protocol.batches.record_batch import HEADER_SIZE, check_crc, read_header, write_crc
from tidelog.protocol.batches.records import decode_batch, encode_batch, record_section
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.segments.append import admit, admit_replicated
from tidelog.storage.segments.append_rules import INSPECTED_BYTES_MAX, AppendRules
from tidelog.storage.segments.inspection import (
    AT_ONCE_BYTES_MAX,
    AT_ONCE_COMPRESSED_MAX,
    AT_ONCE_RECOMPRESSED_MAX,
    AT_ONCE_RECORDS_MAX,
    BLAMED_MAX,
    INSPECTED_RECORDS_MAX,
    STEP_RECORDS,
    NeedsInspection,
)
from tidelog.storage.segments.log_config import LogConfig


def admitted(data: memoryview, *, next_offset: int = 100, from_client: bool = True, **settings: Any):
    rules = AppendRules(LogConfig(**settings))
    try:
        return admit(data, next_offset, 5, NOW, rules, from_client)
    except NeedsInspection as unseen:
        looked_at(unseen)
        rules.inspected_batch = unseen.batches
        return admit(unseen.batches, next_offset, 5, NOW, rules, from_client)


def looked_at(unseen: NeedsInspection) -> int:
    """The steps it took."""
    unseen.decompress()
    steps = sum(1 for _ in unseen.inspect())
    unseen.rebuild()
    return steps


def refused(data: memoryview, *, from_client: bool = True, **settings: Any) -> ErrorCode:
    with pytest.raises(KafkaError) as caught:
        admitted(data, from_client=from_client, **settings)
    assert caught.value.message
    return caught.value.code


def patched(data: memoryview, position: int, layout: str, value: int, *, crc: bool = True) -> memoryview:
    struct.pack_into(layout, data, position, value)
    if crc:
        write_crc(data, 0, len(data))
    return data


def test_offsets_and_epoch_are_stamped_in_place_and_the_crc_stays_right():
    data = batch(3)
    written, [entry] = admitted(data)
    assert written is data
    header = read_header(data)
    assert (header.base_offset, header.last_offset, header.partition_leader_epoch) == (100, 102, 5)
    assert check_crc(data, 0, header)
    assert entry == (0, len(data), 100, 102, NOW + 2, 0, -1, -1, -1, 5)


def test_a_batch_above_max_message_bytes_is_too_large():
    data = batch(1, value=b"x" * 500)
    assert refused(data, max_message_bytes=len(data) - 1) == ErrorCode.MESSAGE_TOO_LARGE
    admitted(data, max_message_bytes=len(data))


@pytest.mark.parametrize("position", [21, 30, 60, 70])
def test_a_flipped_bit_under_the_crc_is_corrupt(position: int):
    data = batch(2)
    data[position] ^= 4
    assert refused(data) == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_batch_cut_short_is_no_batch_and_behind_a_whole_one_it_is_left_out(cut: int):
    assert refused(batch(2)[:-cut]) == ErrorCode.INVALID_RECORD
    first = batch(2, key=b"k")
    both = memoryview(bytearray(bytes(first) + bytes(batch(2)[:-cut])))
    compacted: dict[str, Any] = {"cleanup_policy": frozenset({"compact"})}
    for settings in ({}, compacted):
        written, [entry] = admitted(memoryview(bytearray(both)), **settings)
        assert (len(written), entry[1]) == (len(first), len(first))


def test_an_impossible_length_is_corrupt():
    assert refused(patched(batch(), 8, ">i", 3, crc=False)) == ErrorCode.CORRUPT_MESSAGE
    assert refused(patched(batch(), 8, ">i", -5, crc=False)) == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("magic", "code"), [(0, ErrorCode.INVALID_RECORD), (1, ErrorCode.INVALID_RECORD), (3, ErrorCode.CORRUPT_MESSAGE)]
)
def test_other_formats_are_refused(magic: int, code: ErrorCode):
    assert refused(patched(batch(), 16, ">b", magic, crc=False)) == code


def test_nothing_at_all_is_refused():
    assert refused(memoryview(bytearray())) == ErrorCode.INVALID_RECORD


@pytest.mark.parametrize(("position", "value"), [(57, 4), (57, 0), (57, -1), (23, 5), (23, -1)])
def test_counts_must_agree(position: int, value: int):
    assert refused(patched(batch(3), position, ">i", value)) == ErrorCode.INVALID_RECORD


def test_clients_may_not_write_control_batches_but_the_node_may():
    assert refused(marker(abort=True)) == ErrorCode.INVALID_RECORD
    _, [entry] = admitted(marker(abort=True), from_client=False)
    assert entry[3] == 100


def test_clients_send_one_batch_from_offset_zero():
    assert refused(batch(1, base_offset=1)) == ErrorCode.INVALID_RECORD
    two = memoryview(bytearray(bytes(batch(2)) + bytes(batch(3))))
    assert refused(two) == ErrorCode.INVALID_RECORD
    _, entries = admitted(two, from_client=False)
    assert [(entry[2], entry[3]) for entry in entries] == [(100, 101), (102, 104)]


@pytest.mark.parametrize("max_message_bytes", [10, 1000])
def test_what_clients_may_send_at_all_is_checked_before_size_and_crc(max_message_bytes: int):
    """As in Kafka (ProduceRequest.validateRecords, UnifiedLog.analyzeAndValidateRecords)."""
    shifted = patched(batch(1, base_offset=1), 70, ">b", 1, crc=False)
    assert refused(shifted, max_message_bytes=max_message_bytes) == ErrorCode.INVALID_RECORD
    two = memoryview(bytearray(bytes(shifted) + bytes(batch(3))))
    assert refused(patched(two, 0, ">q", 0, crc=False), max_message_bytes=max_message_bytes) == ErrorCode.INVALID_RECORD


def test_an_idempotent_batch_needs_a_sequence():
    assert refused(patched(idempotent(0), 53, ">i", -1)) == ErrorCode.INVALID_RECORD


def test_an_unknown_compression_is_unsupported():
    assert refused(patched(batch(), 21, ">h", 6)) == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE


def test_timestamps_too_far_ahead_are_refused_by_the_header():
    settings: dict[str, Any] = {"message_timestamp_after_max_ms": 1000}
    admitted(batch(1, timestamp=NOW + 1000), **settings)
    with pytest.raises(KafkaError) as caught:
        admitted(batch(3, timestamp=NOW + 1000), **settings)
    assert caught.value.code == ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in caught.value.record_errors] == [1, 2]
    admitted(batch(1, timestamp=-1), **settings)


def test_timestamps_too_old_are_found_among_the_records():
    settings: dict[str, Any] = {"message_timestamp_before_max_ms": 1000}
    admitted(batch(3, timestamp=NOW - 1000), **settings)
    with pytest.raises(KafkaError) as caught:
        admitted(batch(3, timestamp=NOW - 1002), **settings)
    assert caught.value.code == ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in caught.value.record_errors] == [0, 1]
    admitted(batch(3, timestamp=NOW - 5000), message_timestamp_type="LogAppendTime", **settings)


def test_a_batch_said_to_be_of_log_append_time_is_made_one_of_create_time():
    compacted: dict[str, Any] = {"cleanup_policy": frozenset({"compact"})}
    for settings in ({}, compacted):
        written, [entry] = admitted(patched(batch(1, key=b"k"), 21, ">h", 8), **settings)
        header = read_header(written)
        assert (header.timestamp_type, header.max_timestamp, entry[5]) == (0, NOW, 0)
        assert check_crc(written, 0, header)


def test_a_producer_may_not_set_log_append_time_where_the_topic_does():
    said = patched(batch(), 21, ">h", 8)
    assert refused(said, message_timestamp_type="LogAppendTime") == ErrorCode.INVALID_TIMESTAMP
    assert refused(patched(batch(1, timestamp=-1), 21, ">h", 8)) == ErrorCode.INVALID_TIMESTAMP


def test_log_append_time_is_stamped_with_a_new_crc():
    data = batch(2, timestamp=5)
    written, [entry] = admitted(data, message_timestamp_type="LogAppendTime")
    header = read_header(written)
    assert (header.timestamp_type, header.max_timestamp, entry[4]) == (1, NOW, NOW)
    assert check_crc(written, 0, header)
    assert {record.timestamp for record in decode_batch(written)} == {NOW}


def test_a_compacted_topic_takes_no_record_without_a_key():
    settings: dict[str, Any] = {"cleanup_policy": frozenset({"compact"})}
    assert refused(batch(2), **settings) == ErrorCode.INVALID_RECORD
    admitted(batch(2, key=b"k"), **settings)
    admitted(batch(2), from_client=False, **settings)


@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_a_topic_with_a_compression_of_its_own_recompresses(codec: str):
    data = idempotent(4, 3, compression=1 if codec != "gzip" else 4, value=b"abc" * 50)
    written, [entry] = admitted(data, compression_type=codec)
    header = read_header(written)
    assert header.compression == ["uncompressed", "gzip", "snappy", "lz4", "zstd"].index(codec)
    assert (header.base_offset, header.last_offset, header.base_sequence) == (100, 102, 4)
    assert (header.producer_id, entry[6], entry[8], entry[1]) == (7, 7, 4, len(written))
    assert check_crc(written, 0, header)
    assert [record.value for record in decode_batch(written)] == [b"abc" * 50] * 3


def test_recompression_leaves_the_records_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """Byte for byte, and none is decoded for it; only the header is put right, where it gave another latest time."""
    monkeypatch.setattr(
        "tidelog.storage.segments.inspection.decode_section", lambda *_: pytest.fail("records are decoded")
    )
    data = idempotent(4, 3, compression=4, key=b"k", transactional=True)
    section = record_section(data, 0, read_header(data), 1000)
    patched(data, 35, ">q", NOW + 700)
    written, [entry] = admitted(data, compression_type="gzip")
    header = read_header(written)
    assert record_section(written, 0, header, 1000) == section
    assert (header.base_timestamp, header.max_timestamp, entry[4]) == (NOW, NOW + 2, NOW + 2)
    assert (header.is_transactional, header.producer_epoch, header.record_count) == (True, 0, 3)
    assert check_crc(written, 0, header)


def test_a_batch_that_grows_by_recompression_may_become_too_large():
    data = batch(1, value=b"a" * 5000, compression=1)
    assert refused(data, compression_type="uncompressed", max_message_bytes=1000) == ErrorCode.MESSAGE_TOO_LARGE


def test_records_that_are_not_what_the_header_says_are_found_where_records_are_looked_at():
    data = patched(patched(batch(2, key=b"k"), 57, ">i", 3), 23, ">i", 2)
    code = refused(data, cleanup_policy=frozenset({"compact"}))
    assert code in (ErrorCode.INVALID_RECORD, ErrorCode.CORRUPT_MESSAGE)


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("count", [2, 4, 300])
def test_small_batches_that_hold_other_records_than_they_announce_are_refused(codec: int, count: int):
    for announced in (1, 3, 5, count - 1, count + 1, 2**31 - 1):
        data = batch(count, compression=codec)
        if announced == count:
            continue
        struct.pack_into(">i", data, 57, announced)
        assert refused(patched(data, 23, ">i", announced - 1)) == ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", range(5))
def test_garbage_is_refused_so_that_producers_do_not_repeat_it(codec: int):
    data = batch(1, value=b"x" * 200)
    data[61:] = bytes(range(1, len(data) - 60))
    assert refused(patched(data, 21, ">h", codec)) == ErrorCode.INVALID_RECORD
    assert refused(patched(data, 21, ">h", codec), cleanup_policy=frozenset({"compact"})) == ErrorCode.INVALID_RECORD


def test_what_decompresses_to_much_is_counted_only_where_records_are_looked_at():
    data = batch(1, value=bytes(1_000_000), compression=4)
    assert len(data) < 2048
    admitted(memoryview(bytearray(data)))
    header = read_header(data)
    struct.pack_into(">i", data, 57, 50_000)
    lying = patched(data, 23, ">i", 49_999)
    admitted(memoryview(bytearray(lying)))
    assert refused(lying, cleanup_policy=frozenset({"compact"})) == ErrorCode.INVALID_RECORD
    assert header.record_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("codec", range(1, 5))
def test_a_bomb_costs_no_more_than_its_bound(codec: int):
    bomb = batch(1, value=bytes(INSPECTED_BYTES_MAX + 1), compression=codec)
    settings: dict[str, Any] = {"cleanup_policy": frozenset({"compact"}), "max_message_bytes": 4_000_000}
    assert refused(bomb, **settings) == ErrorCode.MESSAGE_TOO_LARGE
    many = batch(1, value=bytes(INSPECTED_BYTES_MAX // 2), compression=codec)
    struct.pack_into(">i", many, 57, INSPECTED_RECORDS_MAX + 1)
    assert refused(patched(many, 23, ">i", INSPECTED_RECORDS_MAX), **settings) == ErrorCode.MESSAGE_TOO_LARGE


def test_a_refusal_names_no_more_than_a_thousand_records():
    data = memoryview(bytearray(encode_batch([(NOW, None, b"v", ())] * (BLAMED_MAX + 500))))
    with pytest.raises(KafkaError) as caught:
        admitted(data, cleanup_policy=frozenset({"compact"}))
    assert len(caught.value.record_errors) == BLAMED_MAX


def test_compressed_records_whose_offsets_leave_some_out_are_refused_or_where_all_are_looked_at_replaced():
    data = batch(3, compression=1, key=b"k")
    header = read_header(data)
    section = bytearray(record_section(data, 0, header, 1 << 20))
    section[3] = 20  # the first record's delta: 10
    sparse = memoryview(bytearray(data[:61]) + compress(1, section))
    struct.pack_into(">i", sparse, 8, len(sparse) - 12)
    write_crc(sparse, 0, len(sparse))
    assert refused(memoryview(bytearray(sparse))) == ErrorCode.INVALID_RECORD
    written, [entry] = admitted(sparse, cleanup_policy=frozenset({"compact"}))
    assert [record.offset for record in decode_batch(written)] == [100, 101, 102]
    assert entry[2:4] == (100, 102)


class TestReplicated:
    def test_whole_batches_are_taken_as_they_are(self):
        data = memoryview(bytearray(bytes(batch(2, base_offset=10)) + bytes(batch(1, base_offset=20))))
        assert [(b[2], b[3]) for b in admit_replicated(data, 10)] == [(10, 11), (20, 20)]

    def test_a_partial_last_batch_is_left_out(self):
        first = bytes(batch(2, base_offset=10))
        for cut in (1, 40, len(first) - 10):
            data = memoryview(bytearray(first + bytes(batch(1, base_offset=12))[: len(first) - cut]))
            assert [b[2] for b in admit_replicated(data, 10)][:1] == [10]

    def test_offsets_below_the_log_end_are_refused(self):
        with pytest.raises(KafkaError) as caught:
            admit_replicated(batch(2, base_offset=10), 11)
        assert caught.value.code == ErrorCode.OFFSET_OUT_OF_RANGE

    def test_a_wrong_crc_is_corrupt(self):
        data = batch(2, base_offset=10)
        data[70] ^= 1
        with pytest.raises(KafkaError) as caught:
            admit_replicated(data, 10)
        assert caught.value.code == ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize("policy", ["delete", "compact"])
@pytest.mark.parametrize("count", [1, 500])
@pytest.mark.parametrize(
    ("flags", "block_size", "reason"),
    [
        (0x40, 0x40, "linked"),
        (0x61, 0x40, "dictionary"),
        (0x62, 0x40, "reserved bits"),
        (0x20, 0x40, "unknown version"),
        (0x60, 0x41, "reserved bits"),
        (0x60, 0xC0, "reserved bits"),
        (0x60, 0x30, "unknown"),
    ],
)
def test_an_lz4_frame_that_java_does_not_read_is_refused(
    flags: int, block_size: int, reason: str, count: int, policy: str
):
    """Kafka refuses it, too: whoever writes such frames is to notice it here, and not the readers."""
    data = batch(count, value=random.Random(1).randbytes(200), key=b"k", compression=3)
    data[HEADER_SIZE + 4], data[HEADER_SIZE + 5] = flags, block_size
    write_crc(data, 0, len(data))
    with pytest.raises(KafkaError, match=reason) as caught:
        admitted(data, cleanup_policy=frozenset({policy}))
    assert caught.value.code is ErrorCode.INVALID_RECORD


def framed(codec: int, payload: Callable[[bytes], bytes]) -> memoryview:
    """A batch of records that compress badly, with `payload` of their bytes in place of what compresses them."""
    noise = random.Random(1)
    plain = encode_batch([(NOW, None, noise.randbytes(200), ()) for _ in range(40)])
    data = memoryview(bytearray(bytes(plain[:HEADER_SIZE]) + payload(bytes(plain[HEADER_SIZE:]))))
    data[22] = codec
    struct.pack_into(">i", data, 8, len(data) - 12)
    write_crc(data, 0, len(data))
    return data


def lz4(data: bytes) -> bytes:
    return compress(3, data)


def checked_lz4(data: bytes) -> bytes:
    """One frame with a checksum of the content, as in Java's producer none has."""
    compressor = cramjam.lz4.Compressor(content_checksum=True, block_linked=False)
    compressor.compress(data)
    return bytes(compressor.finish())


def sized_lz4(data: bytes) -> bytes:
    """One frame with the size of its content, as librdkafka writes it. The checksum of the descriptor is not read."""
    frame = bytearray(lz4(data))
    frame[4] |= 0x08
    frame[6:6] = struct.pack("<Q", len(data))
    return bytes(frame)


FRAMINGS: dict[str, tuple[int, Callable[[bytes], bytes], str]] = {
    "snappy's own": (2, lambda data: bytes(cramjam.snappy.compress(data)), "xerial"),
    "lz4 without its end mark": (3, lambda data: lz4(data)[:-4], "no end"),
    "lz4 without its checksum": (3, lambda data: checked_lz4(data)[:-4], "no end"),
    "lz4 that is cut in a block": (3, lambda data: lz4(data)[:-40], "no end"),
    "lz4 with a size and without its end": (3, lambda data: sized_lz4(data)[:-40], "no end"),
    "lz4 with a size": (3, sized_lz4, ""),
    "lz4 with a size and noise behind it": (3, lambda data: sized_lz4(data) + b"noise", ""),
    "xerial's": (2, lambda data: compress(2, data), ""),
    "raw snappy": (2, lambda data: bytes(cramjam.snappy.compress_raw(data)), ""),
    "one lz4 frame": (3, lz4, ""),
    "one lz4 frame with a checksum": (3, checked_lz4, ""),
    "one lz4 frame of many blocks": (3, lambda data: checked_lz4(data * 200), ""),
    "lz4 and an empty frame behind it": (3, lambda data: lz4(data) + lz4(b""), ""),
    "lz4 and zeros behind it": (3, lambda data: lz4(data) + bytes(5), ""),
    "lz4 and noise behind it": (3, lambda data: lz4(data) + b"noise", ""),
}


@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_framing_that_java_does_not_read_is_refused(framing: str):
    """Kafka decompresses each batch, and refuses these. Readers of such a batch would not get past it."""
    codec, payload, reason = FRAMINGS[framing]
    data = framed(codec, payload)
    if not reason:
        assert admitted(data, max_message_bytes=4_000_000)[1]
        return
    with pytest.raises(KafkaError, match=reason) as caught:
        admitted(data)
    assert caught.value.code is ErrorCode.INVALID_RECORD


COMPACTED: dict[str, Any] = {"cleanup_policy": frozenset({"compact"}), "max_message_bytes": 4_000_000}


def keyed(count: int, size_bytes: int = 1, compression: int = 0) -> memoryview:
    records = [(NOW, b"%d" % number, bytes(size_bytes), ()) for number in range(count)]
    return memoryview(bytearray(encode_batch(records, compression=compression)))


def noise(size_bytes: int) -> memoryview:
    """A record that does not get smaller by its compression."""
    records = [(NOW, b"key", random.Random(1).randbytes(size_bytes), ())]
    return memoryview(bytearray(encode_batch(records, compression=4)))


@pytest.mark.parametrize(
    ("data", "is_long"),
    [
        (keyed(AT_ONCE_RECORDS_MAX), False),
        (keyed(AT_ONCE_RECORDS_MAX + 1), True),
        (keyed(10, AT_ONCE_BYTES_MAX // 11, 4), False),
        (keyed(10, AT_ONCE_BYTES_MAX // 9, 4), True),
        (keyed(10, AT_ONCE_BYTES_MAX // 9, 1), True),
        (keyed(10, AT_ONCE_BYTES_MAX // 9), False),
        (noise(AT_ONCE_COMPRESSED_MAX - 1000), False),
        (noise(AT_ONCE_COMPRESSED_MAX + 1000), True),
    ],
)
def test_what_takes_long_to_look_at_is_not_looked_at_at_once(data: memoryview, is_long: bool):
    before = bytes(data)
    rules = AppendRules(LogConfig(**COMPACTED))
    if not is_long:
        admit(data, 100, 5, NOW, rules, True)
        return
    with pytest.raises(NeedsInspection) as caught:
        admit(data, 100, 5, NOW, rules, True)
    assert data == before, "it was changed"
    data[:] = bytes(len(data))  # the buffer is used again
    unseen = caught.value
    assert unseen.rules is rules
    assert looked_at(unseen) == read_header(unseen.batches).record_count // STEP_RECORDS
    assert unseen.batches == before


@pytest.mark.parametrize("compression", [0, 1])
@pytest.mark.parametrize("compression_type", ["producer", "uncompressed", "gzip", "zstd"])
def test_much_is_not_compressed_with_another_codec_at_once(compression_type: str, compression: int):
    is_another = compression_type not in ("producer", "uncompressed", "gzip" if compression else "")
    rules = AppendRules(LogConfig(**COMPACTED, compression_type=compression_type))
    admit(keyed(10, AT_ONCE_RECOMPRESSED_MAX // 11, compression), 100, 5, NOW, rules, True)
    much = keyed(10, AT_ONCE_RECOMPRESSED_MAX // 9, compression)
    if not is_another:
        admit(much, 100, 5, NOW, rules, True)
        return
    with pytest.raises(NeedsInspection) as caught:
        admit(much, 100, 5, NOW, rules, True)
    looked_at(caught.value)
    assert read_header(caught.value.batches).compression == {"gzip": 1, "zstd": 4}[compression_type]


@pytest.mark.parametrize("compression_type", ["producer", "zstd"])
def test_what_was_looked_at_is_admitted_as_if_at_once(compression_type: str, monkeypatch: pytest.MonkeyPatch):
    data = keyed(AT_ONCE_RECORDS_MAX * 2, compression=1)
    settings = COMPACTED | {"compression_type": compression_type}
    later = admitted(memoryview(bytearray(data)), **settings)
    monkeypatch.setattr("tidelog.storage.segments.inspection.AT_ONCE_RECORDS_MAX", INSPECTED_RECORDS_MAX)
    at_once = admit(data, 100, 5, NOW, AppendRules(LogConfig(**settings)), True)
    assert later == at_once
    assert read_header(later[0]).compression == {"producer": 1, "zstd": 4}[compression_type]


def test_what_was_looked_at_under_other_rules_is_looked_at_again():
    data = keyed(AT_ONCE_RECORDS_MAX * 2)
    with pytest.raises(NeedsInspection) as caught:
        admit(data, 100, 5, NOW, AppendRules(LogConfig(**COMPACTED)), True)
    looked_at(caught.value)
    caught.value.rules.inspected_batch = caught.value.batches
    with pytest.raises(NeedsInspection):
        admit(caught.value.batches, 100, 5, NOW, AppendRules(LogConfig(**COMPACTED)), True)


def test_a_long_batch_of_another_time_names_its_records_in_the_end():
    records = [(NOW + 1 + 10**9 * (number == 2500), None, b"v", ()) for number in range(3000)]
    data = memoryview(bytearray(encode_batch(records)))
    with pytest.raises(KafkaError) as caught:
        admitted(data, message_timestamp_after_max_ms=10**6)
    assert caught.value.code == ErrorCode.INVALID_TIMESTAMP
    assert [index for index, _ in caught.value.record_errors] == [2500]
