"""Batches that the compiled loop decodes in runs give the same records and positions as each batch alone."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tidelog.client.consuming import completed_fetch, record_decoder
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.model import TopicPartition
from tidelog.protocol.batches import columnar
from tidelog.protocol.batches.record_batch import HEADER_SIZE, BatchHeader, iter_headers, write_crc
from tidelog.protocol.batches.records import (
    ControlRecordType,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
    iter_records,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

pytest.importorskip("numba")

PARTITION = TopicPartition("t", 3)
CASES = 100
PRODUCERS = (9, 10)
RECORD_COUNT_OFFSET = 57


@pytest.fixture(scope="module")
def kernel() -> RecordDecoder:
    decoder = RecordDecoder()
    decoder.load_kernel()
    return decoder


def random_record(rng: random.Random) -> Any:
    key = rng.choice([None, b"", b"k" * rng.randrange(90)])
    value = rng.choice([None, b"v" * rng.randrange(200), bytes([rng.randrange(256)])])
    headers = () if rng.random() < 0.8 else (("h", None), ("i", b"x"))
    return rng.choice([5, 1_700_000_000_000 + rng.randrange(9), rng.randrange(2**40)]), key, value, headers


def random_batches(rng: random.Random) -> bytes:
    """Up to 20 batches; some are markers, compressed, of another leader epoch or with a gap before them."""
    out, offset = b"", 0
    for _ in range(rng.randrange(1, 20)):
        offset += rng.choice([0, 0, 0, 2])
        producer: dict[str, Any] = {"producer_id": rng.choice(PRODUCERS), "producer_epoch": 0}
        if out and rng.random() < 0.1:
            kind = rng.choice([ControlRecordType.ABORT, ControlRecordType.COMMIT])
            out += encode_control_batch(kind, encode_end_txn_value(0), base_offset=offset, timestamp=5, **producer)
            offset += 1
            continue
        records = [random_record(rng) for _ in range(rng.randrange(1, 6))]
        transaction = {"transactional": True, **producer} if rng.random() < 0.2 else {}
        out += encode_batch(
            records, base_offset=offset, compression=rng.choice([0] * 9 + [3]), timestamp_type=int(rng.random() < 0.2),
            leader_epoch=5 + (rng.random() < 0.2), **transaction,
        )  # fmt: skip
        offset += len(records)
    return out


def read(fetch: CompletedFetch, limits: random.Random) -> list[Any]:
    """What each `take` returned, with the position and the leader epoch after it; an error ends it."""
    results: list[Any] = []
    while not fetch.exhausted:
        try:
            results.append((fetch.take(limits.randrange(1, 12)), fetch.position, fetch.leader_epoch))
        except KafkaError as error:
            with pytest.raises(KafkaError):
                fetch.take(1)
            return [*results, (error.code, error.message, fetch.position)]
    return results


def compare(kernel: RecordDecoder, buffer: bytes, rng: random.Random, first: int = 0, aborted: Any = ()) -> list[Any]:
    """What a consumer reads, with any small bounds of a run, after a check that it reads the same without runs."""
    limits, run_bytes, results = rng.random(), rng.choice([300, 1000, 10_000]), []
    for decoder, bounds in ((kernel, (2, run_bytes, 30)), (RecordDecoder(), (1000, 0, 0))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record_decoder, "FEWEST_RECORDS", bounds[0])
            patch.setattr(completed_fetch, "RUN_BYTES_MAX", bounds[1])
            patch.setattr(completed_fetch, "RUN_RECORDS_MAX", bounds[2])
            fetch = CompletedFetch(PARTITION, first, buffer, aborted, decoder=decoder)
            results.append(read(fetch, random.Random(limits)))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize("seed", range(4))
def test_runs_are_the_batches(kernel: RecordDecoder, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(CASES):
        buffer = random_batches(rng)
        (_, first_header), *_ = iter_headers(buffer)
        first = rng.randint(first_header.base_offset, first_header.last_offset)
        aborted = [(producer, rng.randrange(30)) for producer in PRODUCERS if rng.random() < 0.5]
        compare(kernel, buffer, rng, first, aborted)


Spoil = Callable[[random.Random, bytearray, int, BatchHeader], None]


def refused_count(kernel: RecordDecoder, seed: int, spoil: Spoil) -> int:
    """How many of CASES fetches end with an error after `spoil` of one of their batches."""
    rng, refused = random.Random(seed), 0
    for _ in range(CASES):
        buffer = bytearray(random_batches(rng))
        position, header = rng.choice(list(iter_headers(buffer)))
        spoil(rng, buffer, position, header)
        refused += isinstance(compare(kernel, bytes(buffer), rng)[-1][0], int)
    return refused


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_batch_costs_no_record_before_it(kernel: RecordDecoder, seed: int) -> None:
    def spoil(rng: random.Random, buffer: bytearray, position: int, header: BatchHeader) -> None:
        buffer[position + rng.randrange(27, header.size_bytes)] ^= rng.randrange(1, 256)

    assert refused_count(kernel, seed, spoil) > CASES // 2


@pytest.mark.parametrize("seed", range(4))
def test_a_malformed_record_costs_no_record_before_it(kernel: RecordDecoder, seed: int) -> None:
    """Its CRC is right: a producer wrote it so."""

    def spoil(rng: random.Random, buffer: bytearray, position: int, header: BatchHeader) -> None:
        place = rng.choice([22, 60, HEADER_SIZE, HEADER_SIZE + 3, rng.randrange(HEADER_SIZE, header.size_bytes)])
        buffer[position + place] ^= rng.randrange(1, 256)
        write_crc(buffer, position, header.size_bytes)

    assert refused_count(kernel, seed, spoil) > CASES // 4


@pytest.mark.parametrize("delta", [1, 2, 50])
def test_a_record_that_claims_another_offset_is_read_alone(kernel: RecordDecoder, delta: int) -> None:
    """`take` leaves the position in its batch then, so that no record behind it is passed over."""
    first = encode_batch([(1000, None, b"a", ())] * 3, leader_epoch=5)
    place = HEADER_SIZE + 3  # the offset delta of the first record, one byte
    assert first[place] == 0
    first[place] = 2 * delta
    write_crc(first, 0, len(first))
    second = encode_batch([(1000, None, b"b", ())] * 3, base_offset=3, leader_epoch=5)
    compare(kernel, bytes(first + second), random.Random(1))
    compare(kernel, bytes(first), random.Random(1))


@pytest.mark.parametrize("deltas", [(0, 1, 7), (0, 8, 9), (7, 8, 9)])
@pytest.mark.parametrize("first_offset", [0, 1])
def test_nor_is_one_where_the_offsets_rise(kernel: RecordDecoder, deltas: tuple[int, ...], first_offset: int) -> None:
    batches = [encode_batch([(1000, None, b"a", ())] * 3, base_offset=3 * n, leader_epoch=5) for n in range(4)]
    for batch, claims in ((batches[1], deltas), (batches[2], (7, 8, 9)), (batches[3], (7, 8, 9))):
        for n, delta in enumerate(claims):
            batch[HEADER_SIZE + 8 * n + 3] = 2 * delta
        write_crc(batch, 0, len(batch))
    for seed in range(5):
        compare(kernel, b"".join(batches), random.Random(seed), first_offset)


def test_a_record_that_claims_an_offset_before_its_batch_is_not_handed_out(kernel: RecordDecoder) -> None:
    """A reader is behind it already."""
    first, second = (encode_batch([(1, None, b"v", ())] * 3, base_offset=base, leader_epoch=5) for base in (0, 3))
    second[HEADER_SIZE + 3] = 3  # the offset delta of its first record: -2
    write_crc(second, 0, len(second))
    results = compare(kernel, bytes(first + second), random.Random(1))
    assert [record.offset for records, *_ in results for record in records] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("record_count", [-1, 2**31 - 1])
def test_an_impossible_count_is_an_error(kernel: RecordDecoder, record_count: int) -> None:
    batch = encode_batch([(1000, None, b"a", ())] * 3, leader_epoch=5)
    struct.pack_into(">i", batch, RECORD_COUNT_OFFSET, record_count)
    write_crc(batch, 0, len(batch))
    before = encode_batch([(1000, None, b"b", ())] * 40, leader_epoch=5)
    struct.pack_into(">q", batch, 0, 40)
    assert compare(kernel, bytes(before + batch), random.Random(1))[-1][0] == ErrorCode.INVALID_RECORD


def test_small_batches_are_decoded_by_the_loop(kernel: RecordDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any offset on."""
    monkeypatch.setattr(record_decoder, "decode_fields", lambda *_: pytest.fail("decoded record by record"))
    monkeypatch.setattr(completed_fetch, "RUN_RECORDS_MAX", 60)
    batches = [encode_batch([(1, None, b"%d" % n, ())] * 2, base_offset=2 * n, leader_epoch=5) for n in range(60)]
    for first in (0, 1):
        fetch = CompletedFetch(PARTITION, first, b"".join(batches), decoder=kernel)
        assert [record.value for record in fetch.take(1000)] == [b"%d" % (n // 2) for n in range(first, 120)]


@pytest.mark.parametrize("seed", range(4))
def test_runs_and_columns_in_any_alternation_are_each_record_once(kernel: RecordDecoder, seed: int) -> None:
    pytest.importorskip("pyarrow")
    rng = random.Random(seed)
    for _ in range(CASES // 2):
        buffer = random_batches(rng)
        fetch, offsets = CompletedFetch(PARTITION, 0, buffer, decoder=kernel, high_watermark=100), []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(record_decoder, "FEWEST_RECORDS", 2)
            patch.setattr(completed_fetch, "RUN_RECORDS_MAX", rng.choice([5, 20]))
            patch.setattr(columnar, "PIECE_ROWS", 7)
            while not fetch.exhausted:
                if rng.random() < 0.5:
                    offsets += [record.offset for record in fetch.take(rng.randrange(1, 6))]
                elif (piece := fetch.take_columns(("offset",))) is not None:
                    offsets += piece.column("offset").to_pylist()
        assert offsets == [record.offset for record in iter_records(buffer)]
