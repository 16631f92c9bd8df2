"""The small files to the byte: checkpoints, partition.metadata, meta.properties, snapshots, indexes, epochs."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest

from tidelog.protocol.batches.crc import crc32c
from tidelog.storage.files import checkpoints
from tidelog.storage.files.checkpoints import CorruptCheckpoint
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.producers.producer_snapshots import (
    CorruptSnapshot,
    ProducerSnapshots,
    decode_snapshot,
    encode_snapshot,
)
from tidelog.storage.producers.producer_state import ProducerEntry, ProducerState
from tidelog.storage.segments.transaction_index import AbortedTransaction, CorruptTransactionIndex, TransactionIndex


class TestOffsetCheckpoint:
    def test_bytes(self):
        data = checkpoints.encode_offsets({("b", 1): 7, ("a-topic", 10): 123456789012})
        assert data == b"0\n2\na-topic 10 123456789012\nb 1 7\n"
        assert checkpoints.decode_offsets(data) == {("a-topic", 10): 123456789012, ("b", 1): 7}

    def test_an_empty_file_is_an_empty_checkpoint(self):
        assert checkpoints.decode_offsets(b"") == {}
        assert checkpoints.decode_offsets(b"0\n") == {}
        assert checkpoints.decode_offsets(checkpoints.encode_offsets({})) == {}

    @pytest.mark.parametrize(
        "data", [b"1\n0\n", b"x", b"0\n2\na 0 1\n", b"0\n1\na 0\n", b"0\n1\na b 1\n", b"\0\0\0", b"\xff\xfe", b"0\nx\n"]
    )
    def test_anything_else_is_corrupt(self, data: bytes):
        with pytest.raises(CorruptCheckpoint):
            checkpoints.decode_offsets(data)


def test_leader_epoch_checkpoint_bytes():
    data = checkpoints.encode_leader_epochs([(0, 0), (3, 17)])
    assert data == b"0\n2\n0 0\n3 17\n"
    assert checkpoints.decode_leader_epochs(data) == [(0, 0), (3, 17)]
    with pytest.raises(CorruptCheckpoint):
        checkpoints.decode_leader_epochs(b"0\n1\n3 17 4\n")


def test_partition_metadata_bytes():
    topic_id = bytes(range(16))
    data = checkpoints.encode_partition_metadata(topic_id)
    kafkas = b"version: 0\ntopic_id: AAECAwQFBgcICQoLDA0ODw"
    assert data == kafkas + b"\ncrc32c: %08x\n" % crc32c(kafkas)
    for each in (data, data[:-1], kafkas, kafkas + b"\n"):
        assert checkpoints.decode_partition_metadata(each) == topic_id


def test_no_changed_bit_makes_another_topic_id():
    topic_id = bytes(range(16))
    data = checkpoints.encode_partition_metadata(topic_id)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        try:
            assert checkpoints.decode_partition_metadata(bytes(changed)) == topic_id
        except CorruptCheckpoint:
            pass


@pytest.mark.parametrize(
    "data", [b"", b"version: 0\n", b"version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAA", b"\0" * 43, b"a\nb"]
)
def test_partition_metadata_that_is_none(data: bytes):
    with pytest.raises(CorruptCheckpoint):
        checkpoints.decode_partition_metadata(data)


def test_explained_gaps_bytes():
    data = checkpoints.encode_end_offset(1234)
    assert data == b"1\n1234\n%08x\n" % crc32c(b"1\n1234\n")
    assert checkpoints.decode_end_offset(data) == 1234


def test_explained_gaps_of_which_any_byte_is_another_explain_nothing():
    """A larger offset would make a hole in the log look like what compaction left."""
    data = checkpoints.encode_end_offset(1234)
    damaged = [data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] for at in range(len(data)) for bit in (1, 4, 16)]
    for each in (*damaged, *(data[:size] for size in range(len(data))), b"0\n1234\n"):
        with pytest.raises(CorruptCheckpoint):
            checkpoints.decode_end_offset(each)


def test_explained_gaps_with_early_ends_are_read_back_or_refused():
    gaps = checkpoints.ExplainedGaps(1234, frozenset({(700, 900), (0, 80)}))
    data = checkpoints.encode_explained_gaps(gaps)
    lines = b"2\n1234\n0 80\n700 900\n"
    assert data == lines + b"%08x\n" % crc32c(lines)
    assert checkpoints.decode_explained_gaps(data) == gaps
    without = checkpoints.ExplainedGaps(1234)
    assert checkpoints.encode_explained_gaps(without) == checkpoints.encode_end_offset(1234)
    assert checkpoints.decode_explained_gaps(checkpoints.encode_end_offset(1234)) == without
    damaged = [data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] for at in range(len(data)) for bit in (1, 4, 16)]
    for each in (*damaged, *(data[:size] for size in range(len(data))), b"2\n1234\n%08x\n" % crc32c(b"2\n1234\n")):
        with pytest.raises(CorruptCheckpoint):
            checkpoints.decode_explained_gaps(each)


def test_checksums_of_transaction_indexes_are_read_back_or_refused():
    sums = {0: (34, 0xABC), 1200: (-1, 0), 90: (68, 2**32 - 1)}
    data = checkpoints.encode_transaction_sums(sums)
    lines = b"0\n3\n0 34 00000abc\n90 68 ffffffff\n1200 -1 00000000\n"
    assert data == lines + b"%08x\n" % crc32c(lines)
    assert checkpoints.decode_transaction_sums(data) == sums
    assert checkpoints.decode_transaction_sums(checkpoints.encode_transaction_sums({})) == {}
    damaged = [data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :] for at in range(len(data)) for bit in (1, 4, 16)]
    for each in (*damaged, *(data[:size] for size in range(len(data)))):
        with pytest.raises(CorruptCheckpoint):
            checkpoints.decode_transaction_sums(each)


def test_properties_are_java_properties():
    data = checkpoints.encode_properties({"version": "1", "cluster.id": "abc"})
    assert data == b"#\ncluster.id=abc\nversion=1\n"
    java = b"#\n#Sat Nov 21 10:11:51 UTC 2026\nnode.id = 1\n! more\n\ncluster.id=a\\:b\\=c\n"
    assert checkpoints.decode_properties(java) == {"node.id": "1", "cluster.id": "a:b=c"}
    with pytest.raises(CorruptCheckpoint):
        checkpoints.decode_properties(b"no separator\n")


def test_clean_shutdown_bytes():
    assert checkpoints.encode_clean_shutdown(336) == b'{"version":0,"brokerEpoch":336}'
    assert checkpoints.decode_clean_shutdown(b'{"version":0,"brokerEpoch":336}') == 336
    for data in (b"", b"{}", b"[]", b"\0"):
        assert checkpoints.decode_clean_shutdown(data) == -1


def test_a_file_is_replaced_whole(tmp_path: Path):
    checkpoints.replace_file(OsDisk(), str(tmp_path), "name", b"one")
    checkpoints.replace_file(OsDisk(), str(tmp_path), "name", b"2", sync=False)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("name", b"2")]


class TestProducerSnapshot:
    ENTRIES = [
        ProducerEntry(9, 2, 5, 1234, 40, [(7, 9, 50, 52, 1234)]),
        ProducerEntry(10, 0, -1, 99),
        ProducerEntry(11, 1, -1, 5, -1, [(2**31 - 1, 1, 60, 62, 5)]),
    ]

    def test_bytes(self):
        data = encode_snapshot(self.ENTRIES)
        body = struct.pack(">i", 3)
        body += struct.pack(">qhiqiqiq", 9, 2, 9, 52, 2, 1234, 5, 40)
        body += struct.pack(">qhiqiqiq", 10, 0, -1, -1, 0, 99, -1, -1)
        body += struct.pack(">qhiqiqiq", 11, 1, 1, 62, 2, 5, -1, -1)
        assert data == struct.pack(">hI", 1, crc32c(body)) + body

    def test_read_back(self):
        decoded = decode_snapshot(encode_snapshot(self.ENTRIES))
        assert [repr(entry) for entry in decoded] == [repr(entry) for entry in self.ENTRIES]

    @pytest.mark.parametrize("cut", [1, 5, 40])
    def test_a_short_one_is_corrupt(self, cut: int):
        with pytest.raises(CorruptSnapshot):
            decode_snapshot(encode_snapshot(self.ENTRIES)[:-cut])

    @pytest.mark.parametrize("position", [0, 1, 2, 6, 9, 30])
    def test_a_changed_one_is_corrupt(self, position: int):
        data = bytearray(encode_snapshot(self.ENTRIES))
        data[position] ^= 1
        with pytest.raises(CorruptSnapshot):
            decode_snapshot(bytes(data))

    def test_zeros_and_nothing_are_corrupt(self):
        for data in (b"", bytes(10), bytes(100)):
            with pytest.raises(CorruptSnapshot):
                decode_snapshot(data)


class TestProducerSnapshots:
    def taken(self, tmp_path: Path, *offsets: int) -> ProducerSnapshots:
        snapshots = ProducerSnapshots(OsDisk(), str(tmp_path))
        state = ProducerState()
        for offset in offsets:
            state.accept(offset, 0, 0, offset - 1, offset - 1, 5, False)
            state.end_offset = offset
            snapshots.take(state, sync=False)
        return snapshots

    def test_one_is_taken_when_the_state_has_moved(self, tmp_path: Path):
        snapshots = self.taken(tmp_path, 5, 5, 9)
        assert snapshots.offsets == [5, 9]
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "00000000000000000005.snapshot",
            "00000000000000000009.snapshot",
        ]

    def test_the_newest_usable_one_is_loaded(self, tmp_path: Path):
        snapshots = self.taken(tmp_path, 5, 9, 12, 20)
        (tmp_path / "00000000000000000012.snapshot").write_bytes(b"garbage")
        entries, offset = snapshots.load_latest(0, 15)
        assert offset == 9
        assert [entry.producer_id for entry in entries] == [5, 9]
        assert snapshots.offsets == [5, 9]

    def test_without_one_it_begins_at_the_log_start(self, tmp_path: Path):
        assert self.taken(tmp_path, 5).load_latest(5, 9) == ([], 5)
        assert not list(tmp_path.iterdir())

    def test_strays_go_except_the_newest(self, tmp_path: Path):
        snapshots = self.taken(tmp_path, 5, 7, 9, 12, 20, 25)
        snapshots.keep_only([5, 12])
        assert snapshots.offsets == [5, 12, 25]
        snapshots.keep_only([5, 12, 30])
        assert snapshots.offsets == [5, 12]


class TestTransactionIndex:
    ROWS = [AbortedTransaction(1, 10, 20, 15), AbortedTransaction(2, 15, 30, 31)]

    def filled(self, tmp_path: Path) -> TransactionIndex:
        index = TransactionIndex(OsDisk(), str(tmp_path / "x.txnindex"), exists=False)
        for row in self.ROWS:
            index.append(row)
        return index

    def test_bytes(self, tmp_path: Path):
        self.filled(tmp_path)
        expected = b"".join(struct.pack(">hqqqq", 0, *row) for row in self.ROWS)
        assert (tmp_path / "x.txnindex").read_bytes() == expected
        assert TransactionIndex(OsDisk(), str(tmp_path / "x.txnindex"), exists=True).rows == self.ROWS

    def test_what_touches_a_range_is_collected(self, tmp_path: Path):
        index = self.filled(tmp_path)
        assert index.collect(0, 100) == (self.ROWS, False)
        assert index.collect(0, 12) == (self.ROWS[:1], True)
        assert index.collect(21, 31) == (self.ROWS[1:], True)
        assert index.collect(31, 40) == ([], False)

    def test_a_fetch_does_not_look_at_what_was_aborted_long_before(self):
        index = TransactionIndex(OsDisk(), "nowhere", exists=False)
        index.begin_rebuild()
        for number in range(100_000):
            index.append(AbortedTransaction(7, 2 * number, 2 * number + 1, 2 * number + 2))
        began_s = time.process_time()
        for first in range(198_000, 199_990):
            rows, is_complete = index.collect(first, first + 4)
            assert is_complete
            assert [row.first_offset for row in rows] == list(range(first - first % 2, first + 4, 2))
        assert time.process_time() - began_s < 2, "looking at all of them takes ten times as long"

    @pytest.mark.slow
    def test_millions_of_aborted_transactions_take_little_more_memory_than_their_file(self, tmp_path: Path):
        path = tmp_path / "x.txnindex"
        path.write_bytes(b"".join(self.row_bytes(2 * number + 1, 2 * number) for number in range(50_000)))
        tracemalloc.start()
        try:
            index = TransactionIndex(OsDisk(), str(path), exists=True)
            rows, _ = index.collect(99_990, 100_000)
            assert [row.first_offset for row in rows] == list(range(99_990, 100_000, 2))
            assert tracemalloc.get_traced_memory()[0] < 50_000 * 40
        finally:
            tracemalloc.stop()

    def test_truncation_forgets_markers_from_the_offset_on(self, tmp_path: Path):
        index = self.filled(tmp_path)
        index.truncate_to(30)
        assert index.rows == self.ROWS[:1]
        assert (tmp_path / "x.txnindex").stat().st_size == 34

    def test_garbage_is_corrupt(self, tmp_path: Path):
        path = tmp_path / "x.txnindex"
        for data in (b"x" * 33, b"\1" * 34, self.row_bytes(9, 3) + self.row_bytes(9, 3)):
            path.write_bytes(data)
            with pytest.raises(CorruptTransactionIndex):
                _ = TransactionIndex(OsDisk(), str(path), exists=True).rows

    @staticmethod
    def row_bytes(last: int, first: int) -> bytes:
        return struct.pack(">hqqqq", 0, 1, first, last, last)
