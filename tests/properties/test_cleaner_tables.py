"""The compiled key table gives the answers of the plain one, for whatever batches come and however small the tables."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import Headers, encode_batch, record_section
from tidelog.protocol.errors import KafkaError
from tidelog.storage.cleaner.keys import KeptRecords, PlainKeyTable, largest_timestamp

pytest.importorskip("numba")

from tidelog.storage.cleaner.kernel import BYTES_PER_SLOT, CompiledKeyTable, siphash

SECRET = bytes(range(16))
KEYS = st.one_of(st.none(), st.binary(max_size=3), st.sampled_from([b"k" * 32, b"k" * 33, b"x" * 300]))
VALUES = st.one_of(st.none(), st.just(b""), st.binary(max_size=200))
RECORDS = st.lists(st.tuples(st.integers(-5, 3_000_000_000), KEYS, VALUES), min_size=1, max_size=70)


def as_compiled(section: bytes, base_timestamp: int, kept: KeptRecords) -> tuple[object, ...]:
    newest = largest_timestamp(section, kept.runs, base_timestamp) if kept.runs else None
    return kept.runs, kept.records, newest, kept.has_tombstone, kept.keyless


@pytest.mark.slow
@given(batches=st.lists(RECORDS, min_size=1, max_size=6), sparse=st.booleans(), from_offset=st.integers(0, 100))
def test_the_two_tables_agree(
    batches: list[list[tuple[int, bytes | None, bytes | None]]], sparse: bool, from_offset: int
):
    plain, compiled = PlainKeyTable(1 << 20, 0.9), CompiledKeyTable(1 << 20, 0.9, SECRET)
    offset, sections = 0, []
    none: Headers = ()
    for records in batches:
        batch = encode_batch([(1_000 + t, key, value, none) for t, key, value in records], base_offset=offset)
        header = read_header(batch)
        section = record_section(batch, 0, header, 1 << 20)
        if sparse:  # as cleaned before: fewer records than offsets
            header = header._replace(last_offset_delta=header.last_offset_delta + 3)
        sections.append((section, header))
        offset = header.next_offset
        assert plain.note(section, header, from_offset) == compiled.note(section, header, from_offset)
        assert plain.latest_offset == compiled.latest_offset
    for latest in (plain.latest_offset, plain.latest_offset // 2):
        plain.latest_offset = compiled.latest_offset = latest
        for section, header in sections:
            for drop_tombstones in (False, True):
                wanted = as_compiled(section, header.base_timestamp, plain.keep(section, header, drop_tombstones))
                found = compiled.keep(section, header, drop_tombstones)
                assert (found.runs, found.records, found.has_tombstone, found.keyless) == (*wanted[:2], *wanted[3:])
                assert not found.records or found.max_timestamp == wanted[2]


@pytest.mark.slow
@given(data=st.binary(max_size=200), count=st.integers(1, 20))
def test_what_is_no_record_is_refused_by_both(data: bytes, count: int):
    header = read_header(encode_batch([(0, b"k", b"v", ())]))._replace(record_count=count, last_offset_delta=count - 1)
    for table in (PlainKeyTable(1 << 20, 0.9), CompiledKeyTable(1 << 20, 0.9, SECRET)):
        try:
            table.keep(data, header, False)
        except KafkaError:
            continue
        assert 6 * count <= len(data)


@pytest.mark.slow
def test_a_full_table_takes_no_more_and_says_up_to_where():
    none: Headers = ()
    batch = encode_batch([(0, b"%d" % n, b"v", none) for n in range(100)])
    header = read_header(batch)
    section = record_section(batch, 0, header, 1 << 20)
    compiled = CompiledKeyTable(60 * BYTES_PER_SLOT, 0.9, SECRET)  # 40 of them: the rest is for growing
    assert not compiled.note(section, header, 0)
    assert compiled.latest_offset == 35
    plain = PlainKeyTable(36 * 200, 1.0)
    assert not plain.note(section, header, 0)
    assert plain.latest_offset == 35
    assert compiled.keep(section, header, False) == plain.keep(section, header, False)._replace(max_timestamp=0)


def test_a_table_that_grows_keeps_what_it_has():
    rng = random.Random(1)
    keys = [rng.randbytes(8) for _ in range(40_000)]
    compiled = CompiledKeyTable(1 << 24, 0.9, SECRET)
    batches = []
    for start in range(0, len(keys), 1000):
        batch = encode_batch([(0, key, b"v", ()) for key in keys[start : start + 1000]], base_offset=start)
        header = read_header(batch)
        batches.append((record_section(batch, 0, header, 1 << 20), header))
        assert compiled.note(*batches[-1], 0)
    repeated = encode_batch([(0, key, b"v", ()) for key in keys[:1000]], base_offset=len(keys))
    header = read_header(repeated)
    assert compiled.note(record_section(repeated, 0, header, 1 << 20), header, 0)
    assert [compiled.keep(*each, False).records for each in batches] == [0] + 39 * [1000]


def test_the_hash_is_siphash_of_128_bits():
    """The first vectors that its authors publish: key 00..0f, messages of 0, 1, 2 ... bytes 00 01 02 ..."""
    import numpy as np

    k0, k1 = (np.uint64(word) for word in struct.unpack("<2Q", SECRET))
    published = [
        "a3817f04ba25a8e66df67214c7550293",
        "da87c1d86b99af44347659119b22fc45",
        "8177228da4a45dc7fca38bdef60affe4",
    ]
    for size, wanted in enumerate(published):
        low, high = siphash(np.arange(size, dtype=np.uint8), 0, size, k0, k1)
        assert struct.pack("<2Q", int(low), int(high)).hex() == wanted
