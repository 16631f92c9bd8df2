"""The compiled split of a batch says the same as the plain decoder, and leaves what is broken to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.test_records_columnar import record
from tidelog.client.consuming.record_decoder import RecordDecoder
from tidelog.client.model import TopicPartition
from tidelog.protocol.batches.record_batch import HEADER_SIZE, read_header
from tidelog.protocol.batches.record_columns import FEWEST_RECORDS, split_records
from tidelog.protocol.batches.records import decode_fields, encode_batch, record_section
from tidelog.protocol.errors import KafkaError

pytest.importorskip("numba")

PARTITION = TopicPartition("t", 3)
large_batch = st.builds(
    lambda some, base_offset, codec, timestamp_type: encode_batch(
        some * (FEWEST_RECORDS // len(some) + 1),
        base_offset=base_offset,
        leader_epoch=7,
        compression=codec,
        timestamp_type=timestamp_type,
    ),
    st.lists(record, min_size=1, max_size=60),
    st.integers(0, 2**40),
    st.integers(0, 4),
    st.integers(0, 1),
)


def decoders() -> tuple[RecordDecoder, RecordDecoder]:
    plain, compiled = RecordDecoder(), RecordDecoder()
    compiled.load_kernel()
    return plain, compiled


@pytest.mark.slow
@given(large_batch, st.sampled_from([-1, 0, 1, 40]))
def test_both_ways_make_the_same_records(batch, skipped):
    header = read_header(batch)
    section = record_section(batch, 0, header)
    first = header.base_offset + skipped
    assert split_records(section, header, first) is not None
    plain, compiled = (decoder.decode(PARTITION, section, header, first) for decoder in decoders())
    assert compiled == plain
    assert [type(each) for each in compiled] == [type(each) for each in plain]


@pytest.mark.slow
@given(large_batch, st.randoms(use_true_random=False))
def test_what_the_split_takes_of_a_broken_batch_is_what_the_plain_decoder_reads(batch, rng: random.Random):
    header = read_header(batch)._replace(attributes=0)
    whole = record_section(batch, 0, read_header(batch))
    for _ in range(20):
        broken = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            broken[rng.randrange(min(len(broken), rng.choice((60, 10**6))))] = rng.choice(
                (0, 1, 0x7F, 0x80, 0xFE, 0xFF, rng.randrange(256))
            )
        end = rng.choice((len(broken), rng.randrange(len(broken))))
        section = bytes(broken[:end])
        outcomes: list[object] = []
        for decoder in decoders():
            try:
                outcomes.append(decoder.decode(PARTITION, section, header, 0))
            except KafkaError as error:
                outcomes.append((error.code, error.message))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "change",
    [
        {"record_count": 39},
        {"record_count": 41},
        {"record_count": 2**31 - 1},
        *({"base_offset": sign * number} for sign in (1, -1) for number in (2**63 - 2**31 + 1, 2**63 - 1)),
    ],
)
def test_a_header_that_the_plain_decoder_refuses_is_left_to_it(change):
    batch = encode_batch([(5, None, b"v", ())] * 40)
    header = read_header(batch)
    section = bytes(batch[HEADER_SIZE:])
    assert split_records(section, header, 0) is not None
    wrong = header._replace(**change)
    with pytest.raises(KafkaError):
        decode_fields(section, wrong)
    assert split_records(section, wrong, -(2**63)) is None


@pytest.mark.parametrize("base", [sign * number for sign in (1, -1) for number in (2**63 - 2**13 + 1, 2**63 - 1)])
def test_times_at_the_end_of_64_bits_are_the_same(base):
    batch = encode_batch([(number * number, None, b"v", ()) for number in range(120)])
    header = read_header(batch)._replace(base_timestamp=base)
    plain, compiled = (decoder.decode(PARTITION, bytes(batch[HEADER_SIZE:]), header, 0) for decoder in decoders())
    assert plain == compiled
    assert all(-(2**63) <= record.timestamp_ms < 2**63 for record in plain)
