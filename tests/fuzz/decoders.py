"""Fuzz targets without a node: one function of some bytes each, which returns, or raises what nothing may raise.

A target tries one room of decoders, and holds what it gives to a second opinion: what was decoded is encoded and
decoded again, what was admitted is read. What a decoder may raise is caught here; everything else is a finding. The
first bytes of an input choose between the cases of its target, the rest is the input of the decoder.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from random import Random
from struct import Struct
from typing import Any, cast

from tests.fuzz.target import Target
from tests.properties.test_messages_against_kio import MESSAGES, PAIRS, filled
from tidelog.broker.network.connection import KafkaConnection
from tidelog.broker.network.request import Deferred
from tidelog.broker.scheduling.deferred_callbacks import DeferredCallbacks
from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.protocol import hot, hot_replication
from tidelog.protocol.batches import compression
from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record import read_varint
from tidelog.protocol.batches.record_batch import HEADER_SIZE, LOG_OVERHEAD, BatchHeader, read_header, write_crc
from tidelog.protocol.batches.record_walk import CHECKED_RECORDS
from tidelog.protocol.batches.records import decode_batch, decode_section, iter_records
from tidelog.protocol.errors import KafkaError, MalformedMessage
from tidelog.protocol.messages.fetch import FetchRequest, FetchResponse
from tidelog.protocol.messages.produce import ProduceRequest
from tidelog.storage.segments.append import admit, admit_replicated
from tidelog.storage.segments.append_rules import AppendRules
from tidelog.storage.segments.inspection import NeedsInspection
from tidelog.storage.segments.log_config import LogConfig

NOW_MS = 1_700_000_000_000
DECOMPRESSED_BYTES_MAX = 1 << 20
FRAME_BYTES_MAX = 4096

_SIZE = Struct(">i")
_CHOICE = Struct(">H")


# ------------------------------------------------------------------------------------------------------------- frames


class _Transport:
    """Takes what is written; says it is full now and then, and drains when asked."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = self.paused = False

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, chunks: Any) -> None:
        self.written += b"".join(chunks)

    def pause_reading(self) -> None:
        assert not self.paused, "paused twice"
        self.paused = True

    def resume_reading(self) -> None:
        assert self.paused, "resumed twice"
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    abort = close


class _Owner:
    """Answers every frame with itself: at once, later, later and alone, or in many pieces, as its first byte says."""

    frame_bytes_max = FRAME_BYTES_MAX
    dispatch_pipelined: Any = None
    keys_of_nodes: Collection[int] = ()

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.parked: list[tuple[Deferred, bytes]] = []
        self.due: list[Callable[[], None]] = []
        self.reserved_bytes = 0
        self.callbacks = DeferredCallbacks(cast(Any, None))
        self.scheduler = FairScheduler(self.due.append)

    def dispatch(self, frame: memoryview, connection: KafkaConnection) -> Any:
        data = bytes(frame)
        self.frames.append(data)
        kind = data[0] & 3
        if kind & 2:
            deferred = Deferred(exclusive=kind == 3)
            self.parked.append((deferred, data))
            return deferred
        return [data[:2], data[2:]] if kind else data

    def connected(self, connection: KafkaConnection) -> bool:
        return True

    def disconnected(self, connection: KafkaConnection) -> None:
        pass

    def widen(self, sock: socket.socket) -> None:
        raise AssertionError("nobody follows")

    def not_read(self, connection: KafkaConnection) -> None:
        pass

    def warn(self, kind: str, text: str) -> None:
        pass

    def buffers_full(self, host: str) -> None:
        pass

    def reserve_buffer(self, extra_bytes: int) -> bool:
        self.reserved_bytes += extra_bytes
        return self.reserved_bytes <= 4 * FRAME_BYTES_MAX


def frames(data: bytes) -> None:
    """However the bytes arrive: the same frames, and every answer once, in order."""
    owner, transport = _Owner(), _Transport()
    connection = KafkaConnection(owner, "PLAINTEXT")
    connection.connection_made(cast(Any, transport))
    rng = Random(data[:1])
    stream = data[1:]
    position = 0
    while position < len(stream) and not transport.closed:
        if owner.due:
            owner.due.pop()()
        elif owner.parked and (transport.paused or rng.random() < 0.3):
            deferred, answer = owner.parked.pop(rng.randrange(len(owner.parked)))
            deferred.complete(answer)
        elif transport.paused:
            connection.resume_writing()
        else:
            if rng.random() < 0.1:
                connection.pause_writing()
                continue
            room = connection.get_buffer(-1)
            assert len(room), "asyncio takes an empty buffer for the end"
            taken = min(len(room), len(stream) - position, rng.choice([1, 3, 64, 100_000]))
            room[:taken] = stream[position : position + taken]
            position += taken
            connection.buffer_updated(taken)
    while not transport.closed and (owner.parked or owner.due or transport.paused):
        connection.resume_writing()
        while owner.due:
            owner.due.pop()()
        while owner.parked:
            deferred, answer = owner.parked.pop()
            deferred.complete(answer)
    expected, malformed = _frames_of(stream)
    assert owner.frames == expected[: len(owner.frames)], "other frames than were sent"
    if not transport.closed:
        assert not malformed, "a frame that cannot be was passed over"
        assert owner.frames == expected, "frames are missing"
        assert bytes(transport.written) == b"".join(expected), "answers out of order"
    connection.connection_lost(None)
    assert owner.reserved_bytes == 0, "buffers that were not given back"


def _frames_of(stream: bytes) -> tuple[list[bytes], bool]:
    found: list[bytes] = []
    position = 0
    while len(stream) - position >= 4:
        (size,) = _SIZE.unpack_from(stream, position)
        if not 8 <= size <= FRAME_BYTES_MAX:
            return found, True
        if position + 4 + size > len(stream):
            break
        found.append(stream[position + 4 : position + 4 + size])
        position += 4 + size
    return found, False


def frame_seeds() -> Iterator[bytes]:
    for first in range(4):
        payloads = [bytes([first + number]) + bytes(7 + number * 40) for number in range(4)]
        yield bytes([first]) + b"".join(_SIZE.pack(len(each)) + each for each in payloads)


# ----------------------------------------------------------------------------------------------------------- messages


def messages(data: bytes) -> None:
    """Bytes are a message or malformed, and a message says the same when it is written and read again."""
    if len(data) < 2:
        return
    message, version = PAIRS[_CHOICE.unpack_from(data)[0] % len(PAIRS)]
    body = data[2:]
    try:
        read, _ = message.read(memoryview(bytearray(body)), 0, version)
    except MalformedMessage:
        return
    written = read.encode(version)
    assert message.decode(written, version).encode(version) == written, (message, version)


def message_seeds() -> Iterator[bytes]:
    rng = Random(5)
    for number, (message, version) in enumerate(PAIRS):
        yield _CHOICE.pack(number) + filled(rng, message, version).encode(version)


# ---------------------------------------------------------------------------------------------------------- by hand


def by_hand(data: bytes) -> None:
    """What is decoded by hand on the hot path says what the compiled messages say, where it says anything."""
    if len(data) < 2:
        return
    case, version, body = data[0] % 4, data[1], memoryview(bytearray(data[2:]))
    try:
        if case == 0:
            _compare_produce(body, 3 + version % 11)
        elif case == 1:
            hot_replication.decode_follower_request(body)
            if len(body) == hot_replication.ONE_REQUEST_BYTES:
                hot_replication.decode_one(body)
        elif case == 2:
            hot_replication.decode_fetched(body)
            hot_replication.decode_one_fetched(body)
        else:
            _compare_produce(body, 9 + version % 5)
    except MalformedMessage:
        pass


def _compare_produce(body: memoryview, version: int) -> None:
    one = hot.decode_one_produce(body, 0, version)
    if one is None:
        hot.decode_produce(body, version)
        return
    topic, index, records, acks, timeout_ms, transactional_id = one
    whole = hot.decode_produce(body, version)
    assert (whole.acks, whole.timeout_ms, whole.transactional_id) == (acks, timeout_ms, transactional_id)
    assert whole.topics == [(topic, [(index, records)])]


def by_hand_seeds() -> Iterator[bytes]:
    rng = Random(6)
    for case, message, versions in (
        (0, ProduceRequest, range(3, 14)),
        (1, FetchRequest, range(18, 19)),
        (2, FetchResponse, range(18, 19)),
    ):
        for version in versions:
            for _ in range(4):
                yield bytes([case, version - versions.start]) + filled(rng, message, version).encode(version)


# ------------------------------------------------------------------------------------------------- batches and records

_RULES = [
    AppendRules(LogConfig.from_topic_config(settings))
    for settings in (
        {},
        {"cleanup.policy": "compact"},
        {"compression.type": "lz4"},
        {"message.timestamp.type": "LogAppendTime"},
        {"message.timestamp.before.max.ms": "1000"},
        {"compression.type": "uncompressed", "max.message.bytes": "2000"},
    )
]


def batches(data: bytes) -> None:
    """What is admitted is what a reader will find: whole batches, with as many records as their offsets."""
    if not data:
        return
    choice, given = data[0], bytearray(data[1:])
    if choice & 1:
        mend_crcs(given)
    if choice & 2:
        try:
            admitted = admit_replicated(memoryview(given), choice >> 4)
        except KafkaError:
            return
        assert sum(each[1] for each in admitted) <= len(given)
        return
    rules = _RULES[(choice >> 3) % len(_RULES)]
    try:
        try:
            written, admitted = admit(memoryview(given), 1000, 7, NOW_MS, rules, True)
        except NeedsInspection as unseen:
            unseen.decompress()
            for _ in unseen.inspect():
                pass
            unseen.rebuild()
            rules.inspected_batch = unseen.batches
            written, admitted = admit(unseen.batches, 1000, 7, NOW_MS, rules, True)
    except KafkaError:
        return
    except NeedsInspection:
        raise AssertionError("looked at, and not known again") from None
    finally:
        rules.inspected_batch = None
    assert len(admitted) == 1, "clients write one batch"
    position, size_bytes, base_offset, last_offset, *_ = admitted[0]
    assert (position, size_bytes, base_offset) == (0, len(written), 1000)
    header = read_header(written)
    assert write_crc(bytearray(written), 0, size_bytes) == header.crc, "the CRC is wrong now"
    assert header.last_offset == last_offset
    if rules.looks_inside:
        decode_batch(written, 0, header)  # or nobody could read it
    elif not header.compression:
        _check_walked(written, header)


def _check_walked(written: bytearray | memoryview, header: BatchHeader) -> None:
    """As many records as announced, by their lengths; the first ones whole."""
    position, count = HEADER_SIZE, header.record_count
    for number in range(count):
        size, start = read_varint(bytes(written[position : position + 5]), 0, 32)
        position += start + size
        if number + 1 == min(CHECKED_RECORDS, count):
            # Of times the header is believed, and those of the year 300,000,000 are no reason to refuse a batch.
            timeless = header._replace(record_count=number + 1, base_timestamp=0)
            try:
                decode_section(bytes(written[HEADER_SIZE:position]), timeless)
            except KafkaError as error:
                if "64 bits" not in str(error.message):
                    raise
    assert position == len(written), "records and batch do not end together"


def mend_crcs(data: bytearray) -> None:
    """Give every batch in there the CRC it should have, or nothing behind the CRC would ever be tried."""
    position = 0
    while len(data) - position >= HEADER_SIZE:
        try:
            size_bytes = read_header(data, position).size_bytes
        except KafkaError:
            return
        if position + size_bytes > len(data):
            return
        write_crc(data, position, size_bytes)
        position += size_bytes


def batch_seeds() -> Iterator[bytes]:
    records = [(NOW_MS, b"key", b"value", (("a", b"b"), ("c", None))), (NOW_MS + 5, None, None, ())]
    for codec in range(5):
        for count in (1, 2, 40):
            batch = encode_batch([(NOW_MS + n, *records[n % 2][1:]) for n in range(count)], compression=codec)
            for choice in (1, 9, 17, 25, 33, 41):
                yield bytes([choice]) + batch
    sequenced = encode_batch(records, producer_id=5, producer_epoch=0, base_sequence=3)
    yield b"\1" + sequenced
    yield b"\3" + sequenced + sequenced
    yield b"\1" + encode_batch([(NOW_MS, b"k" * 100, b"v" * 20_000, ())])


def records(data: bytes) -> None:
    """A batch is decoded whole or refused, within its bound, however its records lie to it."""
    given = bytearray(data)
    mend_crcs(given)
    try:
        found = list(iter_records(given, DECOMPRESSED_BYTES_MAX))
    except KafkaError:
        return
    assert len(found) <= DECOMPRESSED_BYTES_MAX


def record_seeds() -> Iterator[bytes]:
    for seed in batch_seeds():
        yield seed[1:]


def compressed(data: bytes) -> None:
    """Four codecs, each bounded: no input gives more than it was allowed."""
    if not data:
        return
    codec = 1 + data[0] % 4
    bound = 1 << (4 + (data[0] >> 2) % 17)
    try:
        assert len(compression.decompress(codec, data[1:], bound)) <= bound
    except KafkaError:
        pass


def compressed_seeds() -> Iterator[bytes]:
    for text in (b"", b"a", b"hello " * 20, bytes(70_000), bytes(range(256)) * 300):
        for codec in range(1, 5):
            yield bytes([codec - 1 | 16 << 2]) + compression.compress(codec, text)


def _frame_mutation(data: bytearray, rng: Random) -> None:
    """Give the stream the sizes its frames have, more often than chance would."""
    position = 1
    while len(data) - position > 12:
        size = min(rng.choice([8, 9, 40, 300]), len(data) - position - 4)
        _SIZE.pack_into(data, position, size)
        position += 4 + size


def _batch_mutation(offset: int) -> Callable[[bytearray, Random], None]:
    """Give the first batch the length it has."""

    def mend(data: bytearray, rng: Random) -> None:
        if len(data) >= offset + HEADER_SIZE:
            _SIZE.pack_into(data, offset + 8, len(data) - offset - LOG_OVERHEAD)
            data[offset + 16] = 2

    return mend


assert len(MESSAGES) < len(PAIRS) < 1 << 16

TARGETS = (
    Target("frames", frames, frame_seeds, _frame_mutation),
    Target("messages", messages, message_seeds),
    Target("by_hand", by_hand, by_hand_seeds),
    Target("batches", batches, batch_seeds, _batch_mutation(1)),
    Target("records", records, record_seeds, _batch_mutation(0)),
    Target("compressed", compressed, compressed_seeds),
)
