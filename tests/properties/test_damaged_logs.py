"""One damaged file in a random log: it opens, readers are passed over nothing in silence, a copy makes it whole."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import event, given
from hypothesis import strategies as st

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, read, records_of
from tests.unit.storage.cleaning import clean
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import Record, iter_records
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.repair import NoRoom
from tidelog.storage.log.scrub import Scrub, check_small_files
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig


class Sent(NamedTuple):
    records: int
    size_bytes: int
    is_idempotent: bool
    begins_epoch: bool
    key: int


class History(NamedTuple):
    segment_bytes: int
    interval_bytes: int
    is_compacted: bool
    sent: list[Sent]
    flushed_share: float
    """How much of it was on the device, and in the checkpoints, at the end."""
    ending: Ending


class Damage(NamedTuple):
    """Of the file number `file` of the log, from `share` of its length on."""

    kind: str
    file: int
    share: float
    size_bytes: int
    source_share: float
    bit: int


SENT = st.builds(
    Sent,
    records=st.integers(1, 4),
    size_bytes=st.sampled_from((0, 10, 60, 250)),
    is_idempotent=st.booleans(),
    begins_epoch=st.integers(0, 9).map(lambda number: number == 0),
    key=st.integers(0, 6),
)
HISTORIES = st.builds(
    History,
    segment_bytes=st.sampled_from((1300, 2500, 6000)),
    interval_bytes=st.sampled_from((0, 200, 1000)),
    is_compacted=st.booleans(),
    sent=st.lists(SENT, min_size=8, max_size=40),
    flushed_share=st.floats(0, 1),
    ending=st.sampled_from(Ending),
)
DAMAGES = st.builds(
    Damage,
    kind=st.sampled_from(("flip", "zero", "cut", "overwrite", "duplicate")),
    file=st.integers(0, 200),
    share=st.floats(0, 1, exclude_max=True),
    size_bytes=st.sampled_from((1, 8, 61, 200, 512, 4096)),
    source_share=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)

Facts = dict[int, Record]


class Derived(NamedTuple):
    """What a log knows beside its records."""

    epochs: list[int]
    sequences: dict[int, tuple[int, int]]
    found_by_time: list[int]


def derived(log: PartitionLog, history: History) -> Derived:
    found = [log.offset_for_timestamp(NOW + 10 * number - 5) for number in range(len(history.sent))]
    batches = [header for _, header in iter_headers(contents(Path(log.directory)))]
    return Derived(
        # Of an epoch nothing may be left in a compacted log.
        [log.leader_epochs.epoch_for_offset(header.base_offset) for header in batches],
        {producer_id: (entry.epoch, entry.last_sequence) for producer_id, entry in log.producers.entries.items()},
        [each.offset if each else -1 for each in found],
    )


def write(folder: Path, history: History) -> tuple[Logs, Facts, Derived, int]:
    """The log, its records by offset, what else it knows, and how far its checkpoints go; closed or killed."""
    policy = frozenset({"compact" if history.is_compacted else "delete"})
    config = LogConfig(
        segment_bytes=history.segment_bytes, index_interval_bytes=history.interval_bytes, cleanup_policy=policy,
        min_cleanable_dirty_ratio=0.0, message_timestamp_after_max_ms=2**62,
    )  # fmt: skip
    made = Logs(folder, config)
    epoch = sequence = point = 0
    flushed = int(len(history.sent) * history.flushed_share)
    for number, sent in enumerate(history.sent):
        epoch += sent.begins_epoch
        settings: dict[str, Any] = {
            "value": b"%03d" % number + bytes(sent.size_bytes), "timestamp": NOW + 10 * number,
            "key": b"%d" % sent.key,
        }  # fmt: skip
        if sent.is_idempotent:
            made.append(idempotent(sequence, sent.records, **settings), epoch=epoch)
            sequence += sent.records
        else:
            made.append(batch(sent.records, **settings), epoch=epoch)
        if number == flushed:
            if history.is_compacted and made.log.segment_count > 2:
                clean(made.log)
            made.log.flush()
            made.directory.write_checkpoints()
            point = made.log.recovery_point
    facts = {record.offset: record for record in records_of(made.log)}
    known = derived(made.log, history)
    if history.ending is Ending.CLEAN:
        made.close()
    else:
        made.kill()
    return made, facts, known, point


def apply(data: bytes, damage: Damage) -> bytes:
    at, size = int(len(data) * damage.share), damage.size_bytes
    source = int(len(data) * damage.source_share)
    if damage.kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << damage.bit)]) + data[at + 1 :]
    if damage.kind == "zero":
        return (data[:at] + bytes(size))[: len(data)] + data[at + size :]
    if damage.kind == "cut":
        return data[:at]
    if damage.kind == "overwrite":
        return (data[:at] + data[source : source + size] + data[at + len(data[source : source + size]) :])[: len(data)]
    return data[: at + size] + data[at : at + size] + data[at + size :]


def injure(folder: Path, damage: Damage) -> tuple[str, bool]:
    """The file's name, and whether anything in it is another now."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size)
    path = files[damage.file % len(files)]
    data = path.read_bytes()
    injured = apply(data, damage)
    path.write_bytes(injured)
    return path.name, injured != data


def served(log: PartitionLog, facts: Facts) -> Iterator[int]:
    """Every offset that a reader gets; it goes on behind an error at the next offset."""
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        try:
            result = read(log, offset, 1000, log.log_end_offset)
        except DamagedRecords:
            offset += 1
            continue
        assert result.next_offset > offset
        found = [each for region in result.regions for each in iter_records(region) if each.offset >= offset]
        for record in found:
            assert facts[record.offset] == record, "another record than was written"
        there = {each for each in facts if offset <= each < result.next_offset}
        assert {each.offset for each in found} == there, "records are passed over without an error"
        yield from sorted(there)
        offset = result.next_offset


def scrub(log: PartitionLog) -> None:
    check_small_files(log)
    for segment in list(log.segments):
        if segment.size_bytes:
            work = Scrub(log, segment)
            work.run(10**9)
            work.finish()


def repair(log: PartitionLog, copy: list[tuple[int, bytes]]) -> None:
    """As the broker does: where the segment that is appended to must change its length, it is rolled first."""
    while log.damaged_ranges():
        segment, damaged = log.damaged_ranges()[0]
        work = log.repair_of(segment, damaged)
        try:
            for end_offset, data in copy:
                if not work.is_complete and end_offset > work.next_offset:
                    work.accept(memoryview(data))
            check = work.finish()
        except NoRoom:
            log.roll(NOW)
            continue
        check.run()
        assert log.finish_repair(check)
        assert damaged not in segment.damage


def contents(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.glob("*.log")))


@given(history=HISTORIES, damage=DAMAGES)
def test_one_damaged_file(history: History, damage: Damage):
    folder = Path(tempfile.mkdtemp(prefix="tidelog-damaged-"))
    try:
        made, facts, known, point = write(folder / "data", history)
        whole = contents(made.folder)
        copy = [(header.next_offset, whole[at : at + header.size_bytes]) for at, header in iter_headers(whole)]
        end = copy[-1][0]
        name, is_damaged = injure(made.folder, damage)
        event(f"{damage.kind} of {name.rpartition('.')[2]}, {history.ending.name}")
        log = made.open(machine_ran_on=history.ending is Ending.KILLED)
        try:
            assert log.log_start_offset == 0
            if log.log_end_offset < end:
                may_be_torn = history.ending is Ending.POWER_LOSS and log.log_end_offset >= point
                assert may_be_torn or ("t", 0) in made.directory.shortened_logs
                facts = {offset: facts[offset] for offset in facts if offset < log.log_end_offset}
            got = set(served(log, facts))
            scrub(log)
            assert set(served(log, facts)) <= set(facts)
            if not is_damaged:
                assert got == set(facts)
            if log.log_end_offset == end:
                repair(log, copy)
                assert not log.damaged_ranges()
                assert set(served(log, facts)) == set(facts)
                assert contents(made.folder) == whole
                scrub(log)
                now = derived(log, history)
                if history.is_compacted and name == LEADER_EPOCH_FILE:
                    now = now._replace(epochs=known.epochs)  # where an epoch begins between two batches, nothing says
                assert now == known
        finally:
            made.close()
    finally:
        shutil.rmtree(folder)
