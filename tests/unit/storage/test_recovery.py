"""What a log makes of what a crash left: torn tails, indexes of zeros, snapshots of another time."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, batch, idempotent, marker, offsets_of, read, records_of
from tidelog.protocol.batches.record_batch import HEADER, BatchHeader, iter_headers, read_header, write_crc
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.files.disk import OsFile
from tidelog.storage.log import recovery
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.saved_rows import save_index_rows
from tidelog.storage.producers import recall
from tidelog.storage.producers.producer_snapshots import encode_snapshot
from tidelog.storage.producers.producer_state import ProducerEntry
from tidelog.storage.segments.reader import headers
from tidelog.storage.segments.segment import Segment

pytestmark = pytest.mark.usefixtures("quiet")

MakeLogs = Callable[..., Logs]
DAY_MS = 86_400_000
FIRST, SECOND = "00000000000000000000", "00000000000000000010"


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Twenty records of 100 bytes, ten in each of two segments, nothing synced."""
    made = logs(segment_bytes=1850, index_interval_bytes=300)
    made.append(*(idempotent(n, value=b"x" * 100, timestamp=NOW + 10 * n) for n in range(20)))
    assert made.files("*.log") == [f"{FIRST}.log", f"{SECOND}.log"]
    return made


def index_rows(log: PartitionLog) -> list[tuple[Any, Any]]:
    return [(segment.offset_index.rows(), segment.time_index.rows()) for segment in log.segments]


def check(log: PartitionLog, end: int) -> None:
    """Everything there is agrees with the first `end` records."""
    assert log.log_end_offset == end
    assert offsets_of(records_of(log)) == offsets_of(records_of(log, 1)) == list(range(end))
    for offset in range(end):
        found = log.offset_for_timestamp(NOW + 10 * offset - 5)
        assert found is not None
        assert found.offset == offset
    assert log.offset_for_timestamp(NOW + 10 * end) is None
    entry = log.producers.entries[7]
    assert (entry.last_sequence, entry.batches[-1][3]) == (end - 1, end - 1)
    assert log.append_as_leader(idempotent(end - 1, value=b"x" * 100), 0, NOW).duplicate
    assert log.append_as_leader(idempotent(end, timestamp=NOW + 10 * end), 0, NOW).first_offset == end


def test_nothing_is_lost_when_only_the_process_ends(made: Logs):
    check(made.kill_and_open(), 20)


def test_the_indexes_are_those_of_a_clean_end(made: Logs):
    made.close()
    clean = {path.name: path.read_bytes() for path in made.folder.glob("*index")}
    made.open()
    (made.path / ".kafka_cleanshutdown").unlink(missing_ok=True)
    for path in made.folder.glob("*index"):
        path.write_bytes(b"")
    (made.path / "recovery-point-offset-checkpoint").unlink()
    made.kill_and_open()
    assert {path.name: path.read_bytes() for path in made.folder.glob("*index")} == clean


ODD_HEADERS: dict[str, dict[str, int]] = {
    **{f"attribute {bit}": {"attributes": 1 << bit} for bit in range(6, 15)},
    "attribute 15": {"attributes": -(1 << 15)},
    "all unused attributes": {"attributes": -128},
    "no time": {"base_timestamp": -1, "max_timestamp": -1},
    "the oldest time": {"base_timestamp": -(2**63), "max_timestamp": -(2**63)},
    "producer -2": {"producer_id": -2, "producer_epoch": -2, "base_sequence": -2},
    "a producer without an epoch": {"producer_id": 8, "producer_epoch": -1, "base_sequence": 0},
    "the last sequence": {"producer_id": 8, "producer_epoch": 32767, "base_sequence": 2**31 - 1},
}


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("name", ODD_HEADERS)
def test_an_odd_batch_that_was_taken_is_there_after_a_kill(logs: MakeLogs, name: str, more: int):
    made, odd = logs(), batch(3)
    HEADER.pack_into(odd, 0, *read_header(odd)._replace(**ODD_HEADERS[name]))
    write_crc(odd, 0, len(odd))
    made.append(batch(), odd, *[batch()] * more)
    before = [bytes(region) for region in read(made.log, 0, 100_000, 4 + more).regions]
    log = made.kill_and_open()
    assert log.log_end_offset == 4 + more
    assert [bytes(region) for region in read(log, 0, 100_000, 4 + more).regions] == before


@pytest.mark.parametrize("lost", [1, 30, 60, 100, 170])
def test_a_torn_tail_is_cut(made: Logs, lost: int):
    made.kill()
    path = made.folder / f"{SECOND}.log"
    path.write_bytes(path.read_bytes()[:-lost])
    check(made.open(), 19)


@pytest.mark.parametrize("tail", [b"\0" * 500, b"garbage" * 20, b"\0" * 12, bytes(range(61))])
def test_bytes_behind_the_tail_are_cut(made: Logs, tail: bytes):
    made.kill()
    path = made.folder / f"{SECOND}.log"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + tail)
    log = made.open()
    assert path.stat().st_size == size
    check(log, 20)


def test_the_log_ends_before_the_first_bad_batch_whatever_follows(made: Logs):
    made.kill()
    path = made.folder / f"{FIRST}.log"
    data = bytearray(path.read_bytes())
    data[5 * 171 + 100] ^= 1
    path.write_bytes(data)
    log = made.open()
    assert made.files("*.log") == [f"{FIRST}.log"]
    check(log, 5)


def test_a_tail_lost_at_the_end_of_a_batch_takes_the_later_segments_too(made: Logs):
    made.kill()
    path = made.folder / f"{FIRST}.log"
    size = path.stat().st_size // 10
    path.write_bytes(path.read_bytes()[: 6 * size])
    log = made.open()
    assert made.files("*.log") == [f"{FIRST}.log"]
    check(log, 6)


def spoil_zeros(path: Path) -> None:
    path.write_bytes(bytes(1000 // 24 * 24))


def spoil_missing(path: Path) -> None:
    path.unlink()


def spoil_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def spoil_odd(path: Path) -> None:
    path.write_bytes(b"\x7f" * 31)


def spoil_wild(path: Path) -> None:
    path.write_bytes(b"\x7f" * 48)


def spoil_preallocated(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(24 * 50))


SPOILS = [spoil_zeros, spoil_missing, spoil_truncated, spoil_odd, spoil_wild, spoil_preallocated]


@pytest.mark.parametrize("is_clean", [True, False])
@pytest.mark.parametrize("suffix", ["index", "timeindex"])
@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize("segment", [FIRST, SECOND])
def test_a_spoilt_index_is_rebuilt(
    made: Logs, segment: str, spoil: Callable[[Path], None], suffix: str, is_clean: bool
):
    made.log.flush()
    made.close()
    right = {path.name: path.read_bytes() for path in made.folder.glob("*index")}
    spoil(made.folder / f"{segment}.{suffix}")
    if not is_clean:
        (made.path / ".kafka_cleanshutdown").unlink()
    log = made.open()
    assert made.directory.was_clean is is_clean
    check(log, 20)
    first = made.folder / f"{FIRST}.{suffix}"
    assert first.read_bytes() == right[first.name]


def test_an_index_spoilt_while_the_log_is_open_is_rebuilt_on_the_way(made: Logs):
    made.close_and_open()
    made.log.segments.release()
    path = made.folder / f"{FIRST}.index"
    path.write_bytes(b"\0\0\0\x01\0\0\0\x05" * (path.stat().st_size // 8))
    for offset in (7, 3, 9):
        [region] = read(made.log, offset, 1, 20).regions
        assert [record.offset for record in iter_records(region)] == [offset]
    assert path.read_bytes()[:8] != b"\0\0\0\x01\0\0\0\x05"


class TestSnapshots:
    def test_garbage_is_deleted_and_the_log_replayed(self, made: Logs):
        made.close()
        for name in made.files("*.snapshot"):
            (made.folder / name).write_bytes(b"\0" * 40)
        check(made.open(), 20)

    def test_missing_ones_are_made_up_for(self, made: Logs):
        made.close()
        for name in made.files("*.snapshot"):
            (made.folder / name).unlink()
        check(made.open(), 20)

    def test_one_ahead_of_the_log_is_not_believed(self, made: Logs):
        made.kill()
        wrong = encode_snapshot([ProducerEntry(7, 3, -1, NOW, -1, [(90, 90, 90, 90, NOW)])])
        (made.folder / "00000000000000000091.snapshot").write_bytes(wrong)
        check(made.open(), 20)
        assert "00000000000000000091.snapshot" not in made.files("*.snapshot")

    def test_one_behind_the_log_is_replayed_from(self, made: Logs):
        made.close()
        assert made.files("*.snapshot") == [f"{SECOND}.snapshot", "00000000000000000020.snapshot"]
        (made.folder / "00000000000000000020.snapshot").unlink()
        check(made.open(), 20)

    def test_producers_that_only_the_snapshot_knows_are_remembered(self, made: Logs):
        made.append(idempotent(0, producer_id=1))
        made.append(*(idempotent(n, value=b"x" * 100) for n in range(20, 50)))
        made.directory.write_checkpoints()
        made.log.delete_records(40)
        made.directory.maintain(NOW)
        assert made.log.segments.first.base_offset > 20
        for log in (made.close_and_open(), made.kill_and_open()):
            assert log.producers.entries[1].last_sequence == 0

    def test_expired_producers_are_not_loaded(self, made: Logs):
        made.close()
        written_at(made, NOW)
        log = made.open(NOW + 2 * DAY_MS)
        assert not log.producers.entries

    @pytest.mark.parametrize("is_clean", [True, False])
    def test_a_producer_whose_records_have_old_times_is_known_after_a_start(self, logs: MakeLogs, is_clean: bool):
        """What it sends again would be written twice."""
        made = logs(segment_bytes=1000)
        made.append(idempotent(0, producer_id=1, timestamp=NOW - 10 * DAY_MS))
        for number in range(40):  # in the files behind
            made.append(idempotent(number, producer_id=2, timestamp=NOW - 10 * DAY_MS))
        (made.close if is_clean else made.kill)()
        written_at(made, NOW - 2 * DAY_MS)
        written_at(made, NOW - DAY_MS // 2, made.files("*.log")[-1])
        log = made.open(NOW)
        assert log.segment_count > 2
        assert list(log.producers.entries) == [2]
        log.expire_producers(NOW + DAY_MS // 2 - 1)
        assert made.append(idempotent(39, producer_id=2, timestamp=NOW - 10 * DAY_MS))[0].duplicate
        log.expire_producers(NOW + DAY_MS // 2)
        assert not log.producers.entries


def written_at(made: Logs, time_ms: int, pattern: str = "*.log") -> None:
    for name in made.files(pattern):
        os.utime(made.folder / name, ns=(time_ms * 1_000_000, time_ms * 1_000_000))


class TestLeaderEpochs:
    @pytest.mark.parametrize("content", [None, b"", b"garbage", b"0\n1\n", b"0\n2\n5 0\n3 9\n", bytes(20)])
    def test_a_spoilt_file_is_rebuilt_from_the_batches(self, logs: MakeLogs, content: bytes | None):
        made = logs()
        for epoch in (1, 1, 4, 6):
            made.append(batch(2), epoch=epoch)
        made.close()
        path = made.folder / "leader-epoch-checkpoint"
        assert path.read_bytes() == b"0\n3\n1 0\n4 4\n6 6\n"
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        assert list(made.open().leader_epochs) == [(1, 0), (4, 4), (6, 6)]

    def test_epochs_of_a_lost_tail_are_forgotten(self, logs: MakeLogs):
        made = logs()
        made.append(batch(2), epoch=1)
        size = made.log.size_bytes
        made.append(batch(2), epoch=4)
        made.log.flush()
        made.kill()
        path = made.folder / f"{FIRST}.log"
        path.write_bytes(path.read_bytes()[:size])
        assert list(made.open().leader_epochs) == [(1, 0)]


class TestCheckpoints:
    @pytest.mark.parametrize("content", [b"garbage", b"", b"0\n1\nt 0 999999\n", b"0\n1\nt 0 3\n", b"\0" * 30])
    @pytest.mark.parametrize("name", ["recovery-point-offset-checkpoint", "replication-offset-checkpoint"])
    def test_whatever_they_say_the_log_opens(self, made: Logs, name: str, content: bytes):
        made.kill()
        (made.path / name).write_bytes(content)
        check(made.open(), 20)

    def test_a_log_that_ends_before_its_start_begins_anew(self, made: Logs):
        made.kill()
        (made.path / "log-start-offset-checkpoint").write_bytes(b"0\n1\nt 0 100\n")
        (made.folder / "leader-epoch-checkpoint").write_bytes(b"0\n1\n0 100\n")
        log = made.open()
        assert (log.log_start_offset, log.log_end_offset) == (100, 100)
        assert log.append_as_leader(batch(), 0, NOW).first_offset == 100

    @pytest.mark.parametrize("ends", ["close", "kill"])
    def test_a_log_start_that_the_epochs_do_not_confirm_deletes_nothing(self, made: Logs, ends: str):
        """Neither file has a checksum: one flipped digit took records from every replica."""
        made.log.delete_records(3)
        made.directory.write_checkpoints()
        getattr(made, ends)()
        path = made.path / "log-start-offset-checkpoint"
        assert path.read_bytes() == b"0\n1\nt 0 3\n"
        path.write_bytes(b"0\n1\nt 0 13\n")
        log = made.open()
        assert log.log_start_offset == 3
        assert offsets_of(records_of(log))[-17:] == list(range(3, 20))

    def test_segments_below_the_recovery_point_are_not_scanned(self, made: Logs):
        made.log.flush()
        made.directory.write_checkpoints()
        made.kill()
        path = made.folder / f"{FIRST}.log"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
        assert made.open().log_end_offset == 20

    def test_after_a_clean_end_nothing_is_scanned(self, made: Logs):
        made.close()
        path = made.folder / f"{SECOND}.log"
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)
        assert made.open().log_end_offset == 20


class TestStrangeFiles:
    def test_what_was_being_deleted_or_written_goes(self, made: Logs):
        made.kill()
        strange = [
            f"{FIRST}.log.deleted",
            f"{FIRST}.index.cleaned",
            "leader-epoch-checkpoint.tmp",
            "00000000000000000099.index",
        ]
        for name in strange:
            (made.folder / name).write_bytes(b"x")
        check(made.open(), 20)
        assert not [name for name in strange if (made.folder / name).exists()]

    def test_snapshots_of_the_metadata_log_stay(self, made: Logs):
        made.kill()
        names = ["00000000000000000010-0000000001.checkpoint", "00000000000000000005-0000000001.checkpoint.deleted"]
        for name in names:
            (made.folder / name).write_bytes(b"x")
        check(made.open(), 20)
        assert all((made.folder / name).exists() for name in names)

    def test_a_swap_that_was_begun_is_finished(self, made: Logs):
        third = f"{20:020d}"
        made.append(idempotent(20, value=b"x" * 1000, timestamp=NOW + 200))
        assert made.files("*.log")[2:] == [f"{third}.log"]
        made.close()
        whole = b"".join((made.folder / f"{base}.log").read_bytes() for base in (FIRST, SECOND))
        for suffix, data in (("log", whole), ("index", b""), ("timeindex", b"")):
            (made.folder / f"{FIRST}.{suffix}.swap").write_bytes(data)
        (made.path / ".kafka_cleanshutdown").unlink()
        log = made.open()
        assert made.files("*.log") == [f"{FIRST}.log", f"{third}.log"]
        check(log, 21)

    def test_half_a_swap_is_taken_back(self, made: Logs):
        made.close()
        whole = b"".join((made.folder / f"{base}.log").read_bytes() for base in (FIRST, SECOND))
        (made.folder / f"{FIRST}.log.swap").write_bytes(whole)
        (made.folder / f"{FIRST}.index.cleaned").write_bytes(b"")
        (made.folder / f"{FIRST}.timeindex.swap").write_bytes(b"x")
        before = made.files("*.log")
        (made.path / ".kafka_cleanshutdown").unlink()
        log = made.open()
        assert made.files("*.log") == before
        assert (made.folder / f"{FIRST}.timeindex").read_bytes() != b"x"
        assert not made.files("*.swap") + made.files("*.cleaned")
        check(log, 20)

    def test_an_empty_directory_is_an_empty_log(self, made: Logs):
        made.kill()
        for path in made.folder.iterdir():
            path.unlink()
        (made.path / "recovery-point-offset-checkpoint").unlink(missing_ok=True)
        log = made.open()
        assert (log.log_start_offset, log.log_end_offset, log.topic_id) == (0, 0, None)

    @pytest.mark.parametrize("content", [b"", b"version: 0\n", b"\0" * 43])
    def test_a_spoilt_topic_id_is_unknown(self, made: Logs, content: bytes):
        made.kill()
        (made.folder / "partition.metadata").write_bytes(content)
        log = made.open()
        assert log.topic_id is None
        check(log, 20)


def test_a_spoilt_index_of_aborted_transactions_is_made_anew(logs: MakeLogs):
    made = logs(segment_bytes=600)
    for number in range(10):
        made.append(idempotent(2 * number, 2, transactional=True))
        made.append(marker(abort=number % 2 == 0), from_client=False)
    expected = made.log.aborted_transactions(0, 30)
    assert len(expected) == 5
    made.close()
    for path in made.folder.glob("*.txnindex"):
        path.write_bytes(path.read_bytes()[:-3])
    assert made.open().aborted_transactions(0, 30) == expected


def _change_a_row(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


INDEX_DAMAGE: dict[str, Callable[[Path], object]] = {
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "its last row is gone": lambda path: path.write_bytes(path.read_bytes()[:-34]),
    "another producer id": lambda path: _change_a_row(path, 9),
    "another first offset": lambda path: _change_a_row(path, 17),
    "another last offset": lambda path: _change_a_row(path, 25),
    "a later last stable offset": lambda path: _change_a_row(path, 30),
    "one row more": lambda path: path.write_bytes(path.read_bytes() + struct.pack(">hqqqq", 0, 7, 20000, 20001, 20002)),
}


def put_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


SUMS_DAMAGE: dict[str, Callable[[Path], object]] = {
    "right": Path.exists,
    "emptied": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-3]),
    "a directory": put_directory,
}


@pytest.mark.parametrize("sums", SUMS_DAMAGE)
@pytest.mark.parametrize("what", INDEX_DAMAGE)
@pytest.mark.parametrize("ending", ["stopped", "killed", "stopped, started and killed"])
def test_readers_of_committed_records_get_no_aborted_ones_whatever_an_index_of_transactions_says(
    logs: MakeLogs, what: str, ending: str, sums: str
):
    """Its rows have no checksum, and a file that is gone looks like one that was never needed."""
    made = logs(segment_bytes=900)
    for number in range(20):
        made.append(idempotent(2 * number, 2, transactional=True))
        made.append(marker(abort=number % 2 == 0), from_client=False)
    expected = made.log.aborted_transactions(0, 60)
    assert len(expected) == 10
    names = made.files("*.txnindex")
    assert len(names) > 3
    if ending != "killed":
        made.close()
    if ending == "stopped, started and killed":
        made.open()
    if ending != "stopped":
        made.log.flush()
        made.directory.write_checkpoints()
        made.kill()
    damaged = made.folder / names[1]
    INDEX_DAMAGE[what](damaged)
    SUMS_DAMAGE[sums](made.folder / "transaction-index-checksums")
    log = made.open(machine_ran_on=True)
    assert log.aborted_transactions(0, 60) == expected
    assert damaged.stat().st_size
    assert made.close_and_open().aborted_transactions(0, 60) == expected
    assert not made.directory.recovery.scanned_bytes


def test_unreadable_checksums_of_indexes_that_are_not_needed_any_more_are_removed(logs: MakeLogs):
    made = logs(segment_bytes=300)
    made.append(*[batch(2) for _ in range(20)])
    made.close()
    path = made.folder / "transaction-index-checksums"
    path.write_bytes(b"\0\0")
    made.open()
    assert made.directory.recovery.scanned_bytes
    assert not path.exists()
    made.close_and_open()
    assert not made.directory.recovery.scanned_bytes


def test_unreadable_checksums_of_indexes_of_transactions_are_written_anew(logs: MakeLogs):
    made = logs(segment_bytes=600)
    for number in range(10):
        made.append(idempotent(2 * number, 2, transactional=True))
        made.append(marker(abort=number % 2 == 0), from_client=False)
    expected = made.log.aborted_transactions(0, 30)
    made.close()
    path = made.folder / "transaction-index-checksums"
    content = path.read_bytes()
    path.write_bytes(content[:-3])
    assert made.open().aborted_transactions(0, 30) == expected
    made.close()
    assert path.read_bytes() == content


def test_an_open_transaction_is_still_open(logs: MakeLogs):
    made = logs()
    made.append(batch(2), idempotent(0, 2, transactional=True), batch(1))
    for log in (made.kill_and_open(), made.close_and_open()):
        assert log.last_stable_offset == 2
    made.append(marker(abort=True), from_client=False)
    assert made.log.aborted_transactions(0, 10) == [(7, 2, 5, 6)]


@pytest.mark.parametrize("end", [Logs.close, Logs.kill])
def test_a_transaction_that_is_cut_off_after_a_start_is_not_open(logs: MakeLogs, end: Callable[[Logs], object]):
    made = logs()
    made.append(idempotent(0, transactional=True), marker(abort=False), from_client=False)
    made.log.append_as_leader(idempotent(1, transactional=True), 0, NOW, from_client=False)
    end(made)
    made.directory = made._open()
    made.log = made.directory.load(lambda topic: made.config, NOW)["t", 0]
    made.log.set_high_watermark(2)
    made.log.truncate_to(2)
    assert not made.log.producers.ongoing
    assert not made.append(idempotent(1))[0].duplicate


def test_with_a_flush_policy_what_was_read_back_is_committed_at_once(logs: MakeLogs):
    made = logs(flush_messages=1)
    made.append(batch(3))
    assert made.log.committable_offset == 0
    log = made.kill_and_open()
    assert (log.committable_offset, log.flush_due) == (3, False)


@pytest.mark.parametrize("how", ["closed", "killed", "truncated"])
def test_the_last_five_batches_of_a_producer_are_known_again(logs, how: str):
    home = logs()
    sizes = [1, 4, 1, 3, 1]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    home.append(*(idempotent(start, size) for start, size in zip(starts, sizes)))
    if how == "truncated":
        home.close()
        home.open()  # with a snapshot at the log end, which alone names only the last batch
        home.append(batch())
        home.log.truncate_to(sum(sizes))
    elif how == "closed":
        home.close()
        home.open()
    else:
        home.kill_and_open()
    for start, size in zip(starts, sizes):
        info = home.log.append_as_leader(idempotent(start, size), 0, NOW)
        assert (info.duplicate, info.first_offset) == (True, start)


def test_a_truncation_of_what_is_not_replicated_does_not_read_the_log_again(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch
):
    """A replay of a segment of small batches takes seconds, in which a follower acknowledges nothing."""
    home = logs()
    home.append(*(idempotent(sequence) for sequence in range(8)))

    class Replayed(Exception):
        """The log is read."""

    def replay(*_: object) -> None:
        raise Replayed

    monkeypatch.setattr(recovery, "replay", replay)
    home.log.truncate_to(6)
    assert [each[0] for each in home.log.producers.entries[7].batches] == [3, 4, 5]
    assert home.log.append_as_leader(idempotent(5), 0, NOW).duplicate
    assert home.log.append_as_leader(idempotent(6), 0, NOW).first_offset == 6
    # Not yet replicated: the end of a transaction with a batch of it, and the next one.
    home.append(idempotent(7, transactional=True))
    for each in (idempotent(8, transactional=True), marker(abort=False), idempotent(9, transactional=True)):
        home.log.append_as_leader(each, 0, NOW, from_client=False)
    assert home.log.producers.entries[7].transaction_first_offset == 10
    home.log.truncate_to(8)
    assert home.log.producers.entries[7].transaction_first_offset == 7
    assert home.log.last_stable_offset == 7
    assert home.log.append_as_leader(idempotent(7, transactional=True), 0, NOW).duplicate
    with pytest.raises(Replayed):
        home.log.truncate_to(7)  # as after an unclean election: it was replicated


@pytest.mark.parametrize("how", ["closed", "killed", "truncated", "an old snapshot is copied back"])
def test_transactional_batches_are_known_again(logs: MakeLogs, how: str):
    """Those of the open transaction, behind a marker of the one before it; what was cut off is not among them."""
    home = logs()
    home.append(*(idempotent(sequence, transactional=True) for sequence in range(3)))
    home.append(marker(abort=False), from_client=False)
    home.append(idempotent(3, transactional=True))
    home.close()
    home.open()
    home.append(*(idempotent(sequence, transactional=True) for sequence in range(4, 7)))
    lost: list[int] = []
    if how == "truncated":
        home.log.truncate_to(7)
        lost = [6]
    elif how == "killed":
        home.kill()
    else:
        home.close()
    if how == "an old snapshot is copied back":
        newest, oldest = home.files("*.snapshot")[-1], home.files("*.snapshot")[0]
        assert newest != oldest
        (home.folder / newest).unlink()
    if how != "truncated":
        home.open()
    entry = home.log.producers.entries[7]
    assert (entry.transaction_first_offset, home.log.last_stable_offset) == (4, 4)
    known = [sequence for sequence in range(2, 7) if sequence not in lost]
    assert [batch[0] for batch in entry.batches] == known if not lost else entry.batches[-1][0] == 5
    for sequence in known[-3:]:
        info = home.log.append_as_leader(idempotent(sequence, transactional=True), 0, NOW)
        assert (info.duplicate, info.first_offset) == (True, sequence + 1)
    with pytest.raises(KafkaError) as caught:
        home.log.append_as_leader(idempotent(2, transactional=True), 0, NOW)
    assert caught.value.code == ErrorCode.INVALID_TXN_STATE
    for sequence in lost:
        assert not home.log.append_as_leader(idempotent(sequence, transactional=True), 0, NOW).duplicate


def test_a_transactions_end_is_known_after_a_start(logs: MakeLogs):
    """The epoch that a marker of version 2 has raised fences the producer's late batches after a restart, too."""
    home = logs()
    home.append(*(idempotent(sequence, transactional=True) for sequence in range(3)))
    home.append(marker(abort=False, epoch=1, coordinator_epoch=5), from_client=False)
    for log in (home.close_and_open(), home.kill_and_open()):
        entry = log.producers.entries[7]
        assert (entry.epoch, entry.coordinator_epoch, entry.transaction_first_offset) == (1, 5, -1)
        assert entry.batches == []
        with pytest.raises(KafkaError) as caught:
            log.append_as_leader(idempotent(2, transactional=True), 0, NOW)
        assert caught.value.code == ErrorCode.INVALID_PRODUCER_EPOCH


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_large_batches_of_several_producers_are_known_again(logs: MakeLogs, how: str):
    """Five batches of each lie further apart than one read, and in several segments."""
    home = logs(segment_bytes=300_000)
    sent = [(producer_id, sequence) for sequence in range(8) for producer_id in (7, 8, 9)]
    for producer_id, sequence in sent:
        home.append(idempotent(sequence, producer_id=producer_id, value=b"x" * 40_000))
    assert len(home.log.segments) > 3
    home.close_and_open() if how == "closed" else home.kill_and_open()
    for offset, (producer_id, sequence) in list(enumerate(sent))[-15:]:
        info = home.log.append_as_leader(idempotent(sequence, producer_id=producer_id, value=b"x" * 40_000), 0, NOW)
        assert (info.duplicate, info.first_offset) == (True, offset)


def test_batches_of_an_older_epoch_are_not_known_again(logs: MakeLogs):
    """A batch of the old epoch would be taken for a duplicate of the new one, and its answer for an acknowledgement."""
    home = logs()
    home.append(*(idempotent(sequence, epoch=0) for sequence in range(4)))
    home.append(*(idempotent(sequence, epoch=1) for sequence in range(2)))
    log = home.close_and_open()
    assert [batch[:3] for batch in log.producers.entries[7].batches] == [(0, 0, 4), (1, 1, 5)]
    info = log.append_as_leader(idempotent(2, epoch=1), 0, NOW)
    assert (info.duplicate, info.first_offset) == (False, 6)
    with pytest.raises(KafkaError) as caught:
        home.log.append_as_leader(idempotent(5, epoch=1), 0, NOW)
    assert caught.value.code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.mark.parametrize("kind", ["length", "zeros"])
@pytest.mark.parametrize("how", ["closed", "killed"])
def test_damage_that_the_search_for_a_producers_batches_meets_is_known_from_the_start_on(
    made: Logs, how: str, kind: str
) -> None:
    """It stayed unknown until a read or the scrubber met it, and the batches before it stayed unknown, too."""
    made.log.flush()
    made.directory.write_checkpoints()
    made.close() if how == "closed" else made.kill()
    name, damaged = (SECOND, 17) if how == "closed" else (FIRST, 7)
    path = made.folder / f"{name}.log"
    data = bytearray(path.read_bytes())
    position = next(position for position, header in iter_headers(bytes(data)) if header.base_offset == damaged)
    data[position + 8 : position + 12] = b"\x7f\xff\xff\xff" if kind == "length" else bytes(4)
    path.write_bytes(data)
    log = made.open(machine_ran_on=True)
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(damaged, damaged + 1)]
    assert not log.lacks_producers
    entry = log.producers.entries[7]
    assert [each[0] for each in entry.batches] == [14, 15, 16, 18, 19] if how == "closed" else [15, 16, 17, 18, 19]
    assert log.append_as_leader(idempotent(16, value=b"x" * 100), 0, NOW).duplicate


def test_what_the_search_has_read_behind_the_damage_counts_once(logs: MakeLogs) -> None:
    made = logs(segment_bytes=1_000_000, index_interval_bytes=100)
    made.append(*(idempotent(number, value=b"x" * 12_000) for number in range(8)))
    made.close()
    path = made.folder / f"{FIRST}.log"
    data = bytearray(path.read_bytes())
    position = next(position for position, header in iter_headers(bytes(data)) if header.base_offset == 3)
    data[position + 8 : position + 12] = b"\x7f\xff\xff\xff"
    path.write_bytes(data)
    log = made.open()
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(3, 4)]
    assert [each[0] for each in log.producers.entries[7].batches] == [2, 4, 5, 6, 7]


def test_it_does_not_read_a_whole_log_for_one_producer(logs: MakeLogs, monkeypatch: pytest.MonkeyPatch):
    home = logs()
    home.append(idempotent(5, producer_id=8), *(batch(value=b"x" * 300) for _ in range(4000)))
    home.append(idempotent(3), idempotent(4))
    read: list[int] = []

    def counted(segment: Segment, position: int = 0) -> Iterator[tuple[int, BatchHeader]]:
        for found in headers(segment, position):
            read.append(found[0])
            yield found

    monkeypatch.setattr(recall, "headers", counted)
    log = home.close_and_open()
    assert [batch[0] for batch in log.producers.entries[7].batches] == [3, 4]
    assert len(read) < 3000


def test_a_small_log_is_recovered_without_making_files(logs: MakeLogs):
    made = logs()
    made.append(*(batch(1, timestamp=NOW + 10 * n) for n in range(3)))
    before = made.files("*")
    log = made.kill_and_open()
    assert made.files("*") == before
    assert offsets_of(records_of(log)) == [0, 1, 2]
    found = log.offset_for_timestamp(NOW + 15)
    assert found is not None
    assert (found.offset, found.timestamp) == (2, NOW + 20)
    # What comes next is indexed as in a log that was never killed, and is there after another kill.
    made.append(*(batch(1, timestamp=NOW + 10 * n, value=b"x" * 1000) for n in range(3, 40)))
    assert log.segments.active.offset_index.count > 3
    log = made.kill_and_open()
    assert offsets_of(records_of(log)) == list(range(40))
    assert f"{FIRST}.index" in made.files("*"), "too large to be kept in memory alone"
    made.close()
    assert offsets_of(records_of(made.open())) == list(range(40))


@pytest.mark.parametrize("preallocate", [False, True])
@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_kill_after_a_truncation_below_the_high_watermark_misses_no_records(
    logs: MakeLogs, preallocate: bool, is_flushed: bool
) -> None:
    """The checkpoint had the former high watermark: a segment with zeros behind its records was called damaged."""
    made = logs(preallocate=preallocate)
    for _ in range(15):
        made.append(batch())
    made.log.set_high_watermark(15)
    if is_flushed:
        made.log.flush()
    made.directory.write_checkpoints()
    made.log.truncate_to(1)
    made.append(batch(), epoch=1)
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not made.directory.shortened_logs
    assert not log.damaged_ranges()
    assert (log.log_end_offset, offsets_of(records_of(log))) == (2, [0, 1])


@pytest.mark.parametrize("size_changes", [False, True])
def test_a_kill_after_preallocate_and_segment_bytes_were_changed_misses_no_records(
    logs: MakeLogs, monkeypatch: pytest.MonkeyPatch, size_changes: bool
) -> None:
    """Nothing says then that the zeros are none of lost records. A shortage leaves them until the next segment."""
    made = logs(preallocate=True, segment_bytes=100_000)
    made.append(*(batch() for _ in range(5)))
    path = made.folder / f"{FIRST}.log"
    made.config = replace(made.config, preallocate=False, segment_bytes=50_000 if size_changes else 100_000)
    with monkeypatch.context() as patch:
        patch.setattr(OsFile, "truncate", short_of_memory)
        made.log.set_config(made.config)
    assert path.stat().st_size == 100_000
    made.log.set_config(replace(made.config, preallocate=True))
    assert path.stat().st_size == 100_000
    made.log.set_config(made.config)
    assert path.stat().st_size < 1000
    made.append(batch())
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not made.directory.shortened_logs
    assert offsets_of(records_of(log)) == list(range(6))


def test_a_kill_with_preallocate_reports_no_cut(logs: MakeLogs, caplog: pytest.LogCaptureFixture) -> None:
    """Each such start warned of hundreds of thousands of bytes that are no batches: the zeros for records to come."""
    made = logs(preallocate=True, segment_bytes=100_000)
    made.append(*(batch() for _ in range(5)))
    made.kill()
    logging.disable(logging.NOTSET)
    log = made.open(machine_ran_on=True)
    assert log.log_end_offset == 5
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert made.directory.recovery.cut_bytes == 0
    assert made.directory.recovery.scanned_bytes == log.size_bytes


def short_of_memory(*_: object) -> None:
    raise OSError(errno.ENOMEM, "no memory")


@pytest.mark.parametrize("is_known_to_be_off", [False, True])
def test_a_kill_after_preallocate_was_turned_off_misses_no_records(logs: MakeLogs, is_known_to_be_off: bool) -> None:
    """The zeros of a segment that began before the change were called lost records, as if the log were shorter."""
    made = logs(preallocate=True, segment_bytes=100_000)
    made.append(*(batch() for _ in range(5)))
    made.config = replace(made.config, preallocate=False)
    if is_known_to_be_off:
        made.log.set_config(made.config)
        made.append(batch())
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not made.directory.shortened_logs
    assert not log.damaged_ranges()
    assert log.log_end_offset == 5 + is_known_to_be_off
    assert log.size_bytes == (made.folder / f"{FIRST}.log").stat().st_size < 1000


def test_an_index_of_transactions_that_a_truncation_emptied_goes_at_the_start_after_a_kill(logs: MakeLogs) -> None:
    """It stayed, and nothing synced it: a loss of power gave back the row of a transaction that was cut off."""
    made = logs()
    made.append(idempotent(0, 1, transactional=True))
    made.append(marker(abort=True), from_client=False)
    assert made.files("*.txnindex")
    made.log.truncate_to(1)
    made.kill()
    made.open(machine_ran_on=True)
    assert not made.files("*.txnindex")


@pytest.mark.slow
@pytest.mark.parametrize("preallocate", [False, True])
def test_a_kill_soon_after_the_start_after_a_loss_of_power_misses_no_records_again(
    logs: MakeLogs, preallocate: bool
) -> None:
    """The high watermark from before was the checkpoint's until the next one: zeros behind it were called damaged."""
    made = logs(preallocate=preallocate, segment_bytes=1_000_000)
    for _ in range(15):
        made.append(batch())
    made.directory.write_checkpoints()
    made.kill()
    path = made.folder / made.files("*.log")[0]
    position = [position for position, _ in headers(made.log.segments.active)][5]
    path.write_bytes(path.read_bytes()[:position])
    made.open()
    assert made.log.log_end_offset == 5
    made.kill()
    log = made.open(machine_ran_on=True)
    assert not made.directory.shortened_logs
    assert not log.damaged_ranges()
    assert log.log_end_offset == 5


def test_a_kill_soon_after_the_start_after_a_loss_of_power_misses_no_records_of_a_replica_that_moves(
    logs: MakeLogs,
) -> None:
    made = logs()
    made.directory.create_future("t", 1, TOPIC_ID, made.config, NOW)
    log = made.directory.futures["t", 1]
    for offset in range(15):
        log.append_as_follower(batch(base_offset=offset, leader_epoch=0), NOW)
    log.set_high_watermark(15)
    made.directory.write_checkpoints()
    made.kill()
    path = Path(log.segments.active.path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    for machine_ran_on in (False, True):
        made.open(machine_ran_on=machine_ran_on)
        assert made.directory.futures["t", 1].log_end_offset == 5
        assert not made.directory.shortened_logs
        made.kill()


@pytest.mark.parametrize("machine_ran_on", [True, False])
@pytest.mark.parametrize("is_rolled", [False, True])
@pytest.mark.parametrize("offset", [2, 3, 4])
def test_records_after_a_truncation_below_the_log_start_are_kept_by_a_start(
    logs: MakeLogs, offset: int, is_rolled: bool, machine_ran_on: bool
) -> None:
    """After an unclean election. The deleted batches before them are of a later epoch, and a start cut the new ones."""
    made = logs()
    made.append(batch(2), epoch=9)
    if is_rolled:
        made.log.roll(NOW)
    made.append(batch(2), batch(2), epoch=9)
    made.log.delete_records(4)
    made.directory.write_checkpoints()
    made.log.truncate_to(offset)
    start = made.log.log_end_offset
    assert start == (offset // 2) * 2
    for _ in range(3):
        made.append(batch(), epoch=7)
    made.log.flush()
    made.kill()
    log = made.open(machine_ran_on=machine_ran_on)
    assert not made.directory.shortened_logs
    assert not log.damaged_ranges()
    assert offsets_of(records_of(log)) == [start, start + 1, start + 2]
    assert list(log.leader_epochs) == [(7, start)]


@pytest.mark.parametrize("loss", [b"", b"torn", None])
def test_a_kill_of_a_log_whose_last_segment_has_no_records_any_more_misses_none(
    logs: MakeLogs, loss: bytes | None
) -> None:
    """It was truncated to where a segment begins, or a loss of power left this of it: both may be above the high
    watermark.
    """
    made = logs()
    for _ in range(2):
        made.append(batch(), batch())
        made.log.roll(NOW)
    made.append(batch())
    made.log.set_high_watermark(1)
    made.directory.write_checkpoints()
    if loss is not None:
        (made.folder / made.files("*.log")[-1]).write_bytes(loss)
        made.kill()
        assert made.open().log_end_offset == 4
    else:
        made.log.truncate_to(2)
    end = made.log.log_end_offset
    for _ in range(2):
        made.kill()
        made.open(machine_ran_on=True)
        assert not made.directory.shortened_logs
        assert offsets_of(records_of(made.log)) == list(range(end))
    made.append(batch())
    assert offsets_of(records_of(made.close_and_open())) == list(range(end + 1))


def test_a_kill_before_the_first_record_of_a_segment_is_reported_once(logs: MakeLogs) -> None:
    made = logs()
    made.append(batch())
    made.log.roll(NOW)
    for reported in ({("t", 0)}, set()):
        made.kill()
        made.open(machine_ran_on=True)
        assert made.directory.shortened_logs == reported
        assert offsets_of(records_of(made.log)) == [0]


@pytest.mark.parametrize("machine_ran_on", [True, False])
def test_saved_index_rows_of_batches_that_were_lost_are_removed(made: Logs, machine_ran_on: bool) -> None:
    """As of a loss of power that has kept the index rows and not the batches; a part of a row, too."""
    active = made.log.segments.active
    for _ in save_index_rows(made.directory.logs):
        pass
    index = made.folder / f"{SECOND}.index"
    saved = index.read_bytes()
    assert len(saved) == 8 * active.offset_index.count > 8
    os.truncate(made.folder / f"{SECOND}.log", active.offset_index.row(1)[1] + 20)
    index.write_bytes(saved + saved[:5])
    made.kill()
    log = made.open(machine_ran_on=machine_ran_on)
    assert index.read_bytes() == saved[:8]
    end = log.log_end_offset
    assert 10 < end < 20
    assert offsets_of(records_of(log)) == list(range(end))
    made.append(*(idempotent(n, value=b"x" * 100, timestamp=NOW + 10 * n) for n in range(end, 20)))
    for _ in save_index_rows(made.directory.logs):
        pass
    assert index.read_bytes() == saved
