"""Damaged bytes in a log: what is damaged is refused, the rest is served, and a whole copy makes it whole again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from struct import pack, pack_into
from time import process_time
from zlib import crc32

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, offsets_of, read, records_of
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.repair import CopyRefused, NoRoom
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments import examination, reader
from tidelog.storage.segments import segment as segment_module
from tidelog.storage.segments.append import UnexplainedGap
from tidelog.storage.segments.damage import DamagedRange, DamagedRecords, bytes_after
from tidelog.storage.segments.examination import UNKNOWN_END, Examiner, WholeBatch
from tidelog.storage.segments.segment import Segment

MakeLogs = Callable[..., Logs]
COUNT = 60

DAMAGE: dict[str, Callable[[bytearray, int, int], None]] = {
    "base offset": lambda data, at, size: pack_into(">q", data, at, int.from_bytes(data[at : at + 8], "big") ^ 4),
    "high bit of the base offset": lambda data, at, size: data.__setitem__(at, data[at] ^ 0x80),
    "length": lambda data, at, size: pack_into(">i", data, at + 8, size + 400),
    "negative length": lambda data, at, size: pack_into(">i", data, at + 8, -5),
    "leader epoch": lambda data, at, size: pack_into(">i", data, at + 12, 77),
    "no leader epoch": lambda data, at, size: pack_into(">i", data, at + 12, -1),
    "magic": lambda data, at, size: data.__setitem__(at + 16, 3),
    "CRC": lambda data, at, size: data.__setitem__(at + 18, data[at + 18] ^ 1),
    "last offset delta": lambda data, at, size: pack_into(">i", data, at + 23, 900),
    "a bit of the payload": lambda data, at, size: data.__setitem__(at + size - 3, data[at + size - 3] ^ 8),
    "zeros": lambda data, at, size: data.__setitem__(slice(at, at + size), bytes(size)),
    "zeros over batches": lambda data, at, size: data.__setitem__(slice(at + 20, at + 3 * size), bytes(3 * size - 20)),
}


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Sixty batches of two records in several segments, of a producer and in three leader epochs."""
    made = logs(segment_bytes=2500, index_interval_bytes=300)
    for n in range(COUNT):
        made.append(idempotent(2 * n, count=2, value=b"%03d" % n * 20, timestamp=NOW + n), epoch=n // 25)
    made.directory.write_checkpoints()
    assert made.log.segment_count >= 4
    return made


def batches_of(path: Path) -> list[tuple[int, int]]:
    return [(position, header.size_bytes) for position, header in iter_headers(path.read_bytes())]


def damage(path: Path, number: int, kind: str) -> None:
    data = bytearray(path.read_bytes())
    length = len(data)
    DAMAGE[kind](data, *batches_of(path)[number])
    path.write_bytes(data[:length])


def copy_of(made: Logs) -> dict[int, bytes]:
    """Each batch by the offset of its first record."""
    copy = {}
    for name in made.files("*.log"):
        data = (made.folder / name).read_bytes()
        for position, header in iter_headers(data):
            copy[header.base_offset] = data[position : position + header.size_bytes]
    return copy


def served(log: PartitionLog) -> Iterator[int]:
    """Every offset that a reader gets; it goes on behind an error at the next offset."""
    offset = 0
    while offset < log.log_end_offset:
        try:
            result = read(log, offset, 1000, log.log_end_offset)
        except DamagedRecords:
            offset += 1
            continue
        records = [record.offset for region in result.regions for record in iter_records(region)]
        found = [each for each in records if each >= offset]
        assert found
        assert found[0] == offset, "records are passed over without an error"
        yield from found
        offset = result.next_offset


@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_segment_whose_file_is_removed_while_the_log_is_open_is_damage(made: Logs, number: int) -> None:
    """One file of one log says nothing against the device, and the others have its records."""
    copy, end = copy_of(made), made.log.log_end_offset
    path = made.folder / made.files("*.log")[number]
    made.log.segments.release()
    path.unlink()
    hidden = end - len(list(served(made.log)))
    assert hidden
    assert made.log.damaged_ranges()
    made.append(idempotent(2 * COUNT, timestamp=NOW + COUNT), epoch=(COUNT - 1) // 25)
    repair(made.log, copy)
    assert list(served(made.log)) == list(range(end + 1))
    assert list(served(made.close_and_open())) == list(range(end + 1))


def test_a_log_that_is_given_up_makes_no_file_anew(made: Logs) -> None:
    """A topic of the same name may have its path by now."""
    segment = made.log.segments[1]
    made.log.abandon()
    (made.folder / made.files("*.log")[1]).unlink()
    with pytest.raises(FileNotFoundError):
        _ = segment.file
    assert len(made.files("*.log")) == made.log.segment_count - 1


def repair(log: PartitionLog, copy: dict[int, bytes]) -> None:
    for segment, damaged in log.damaged_ranges():
        repair_range(log, segment, damaged, copy)


def repair_range(
    log: PartitionLog,
    segment: Segment,
    damaged: DamagedRange,
    copy: dict[int, bytes],
    *,
    lacks_below: int | None = None,
) -> None:
    work = log.repair_of(segment, damaged)
    work.lacks_below, work.knows_gaps = lacks_below, True
    for offset in sorted(copy):
        if not work.is_complete and offset >= damaged.first_offset:
            work.accept(memoryview(copy[offset]))
    check = work.finish()
    check.run()
    assert log.finish_repair(check)


@pytest.mark.parametrize("ending", ["while it is open", "after a clean stop", "after a kill"])
@pytest.mark.parametrize(
    "where", ["first of the log", "second of the log", "middle", "last of a segment", "first of the last segment"]
)
@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_refused_and_repaired_and_the_rest_is_served(
    made: Logs, kind: str, where: str, ending: str
) -> None:
    copy, end = copy_of(made), made.log.log_end_offset
    names = made.files("*.log")
    name, number = {
        "first of the log": (names[0], 0),
        "second of the log": (names[0], 1),
        "middle": (names[1], 3),
        "last of a segment": (names[1], -1),
        "first of the last segment": (names[-1], 0),
    }[where]
    if ending == "after a clean stop":
        made.close()
    elif ending == "after a kill":
        made.kill()
    whole = {path: path.read_bytes() for path in made.folder.glob("*.log")}
    damage(made.folder / name, number, kind)
    if ending == "while it is open":
        for _ in range(2):
            made.log.segments.age_trust()
        for segment in list(made.log.segments):
            scrub = Scrub(made.log, segment)
            scrub.run(10**9)
            scrub.finish()
        log = made.log
    else:
        log = made.open(machine_ran_on=True)
    assert log.log_end_offset == end
    assert not made.directory.shortened_logs
    got = list(served(log))
    assert got == sorted(set(got))
    assert log.damaged_ranges()
    hidden = {offset for _, each in log.damaged_ranges() for offset in range(each.first_offset, each.end_offset)}
    assert hidden
    assert len(hidden) <= 8
    assert set(got) == set(range(end)) - hidden
    repair(log, copy)
    assert not log.damaged_ranges()
    assert offsets_of(records_of(log)) == list(range(end))
    assert {path: path.read_bytes() for path in whole} == whole
    assert list(log.leader_epochs) == [(0, 0), (1, 50), (2, 100)]
    entry = log.producers.entries[7]
    assert (entry.last_sequence, entry.batches[-1][3]) == (end - 1, end - 1)
    assert log.append_as_leader(idempotent(end - 2, count=2, value=b"059" * 20), 2, NOW).duplicate
    assert log.append_as_leader(idempotent(end, count=2), 2, NOW).first_offset == end


@pytest.mark.parametrize("ending", ["while it is open", "after a clean stop", "after a kill"])
def test_a_lower_epoch_in_the_first_batch_of_a_segment_is_damage(made: Logs, ending: str) -> None:
    """Nothing in the segment comes before it; the epoch file was corrected to what was damaged."""
    copy = copy_of(made)
    names = made.files("*.log")
    name = next(each for each in names if int(each[:20]) > 50)
    if ending == "after a clean stop":
        made.close()
    elif ending == "after a kill":
        made.kill()
    path = made.folder / name
    data = bytearray(path.read_bytes())
    pack_into(">i", data, 12, int.from_bytes(data[12:16], "big") - 1)
    path.write_bytes(data)
    log = made.log if ending == "while it is open" else made.open(machine_ran_on=True)
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        scrub.run(10**9)
        scrub.finish()
    [(_, damaged)] = log.damaged_ranges()
    assert damaged.first_offset == int(name[:20])
    repair(log, copy)
    assert not log.damaged_ranges()
    assert list(log.leader_epochs) == [(0, 0), (1, 50), (2, 100)]
    assert offsets_of(records_of(log)) == list(range(2 * COUNT))


@pytest.mark.parametrize("has_snapshot", [True, False])
@pytest.mark.parametrize("cut", [1, 40, 500])
def test_what_a_clean_log_lacks_at_its_end_is_damage_and_the_log_goes_on_behind_it(
    made: Logs, cut: int, has_snapshot: bool
) -> None:
    copy, end = copy_of(made), made.log.log_end_offset
    made.close()
    path = made.folder / made.files("*.log")[-1]
    path.write_bytes(path.read_bytes()[:-cut])
    if not has_snapshot:
        (made.folder / made.files("*.snapshot")[-1]).unlink()
    log = made.open()
    assert log.log_end_offset == end
    assert made.directory.shortened_logs, "such a log must not speak for what it had"
    assert list(served(log)) == list(range(log.damaged_ranges()[0][1].first_offset))
    if not has_snapshot:
        with pytest.raises(KafkaError) as refused:
            log.append_as_leader(idempotent(end, count=2), 2, NOW)
        assert refused.value.code == ErrorCode.KAFKA_STORAGE_ERROR, "its sequences are not known until it is repaired"
    assert log.append_as_leader(batch(), 2, NOW).first_offset == end
    repair(log, copy)
    assert offsets_of(records_of(log)) == list(range(end + 1))
    assert log.append_as_leader(idempotent(end - 2, count=2, value=b"059" * 20), 2, NOW).duplicate


@pytest.mark.parametrize("byte", [*range(8), *range(23, 27)])
@pytest.mark.parametrize("interval_bytes", [0, 4096])
def test_a_wrong_base_offset_or_last_offset_of_the_last_batch_does_not_move_the_end_of_the_log(
    logs: MakeLogs, interval_bytes: int, byte: int
) -> None:
    """A start after a clean stop believed it. With a row of the index for the batch the log did not open at all."""
    made = logs(index_interval_bytes=interval_bytes)
    for n in range(4):
        made.append(batch(2, timestamp=NOW + n), epoch=0)
    copy = copy_of(made)
    made.close()
    path = made.folder / made.files("*.log")[-1]
    data = bytearray(path.read_bytes())
    data[batches_of(path)[-1][0] + byte] ^= 1 if byte < 8 else 2
    path.write_bytes(data)
    log = made.open()
    assert log.log_end_offset == 8
    assert made.directory.shortened_logs
    assert list(served(log)) == list(range(6))
    assert log.append_as_leader(batch(), 1, NOW).first_offset == 8
    repair(log, copy)
    assert list(served(log)) == list(range(9))


def test_a_log_that_ends_behind_its_checkpoint_is_whole_if_its_last_batch_is(logs: MakeLogs) -> None:
    """The checkpoint has no checksum."""
    made = logs()
    made.append(batch(2), batch(2))
    made.close()
    path = made.path / "recovery-point-offset-checkpoint"
    path.write_bytes(path.read_bytes().replace(b"t 0 4", b"t 0 1"))
    log = made.open()
    assert (log.log_end_offset, log.damaged_ranges()) == (4, [])
    assert not made.directory.shortened_logs
    assert list(served(log)) == list(range(4))


@pytest.mark.parametrize("content", [b"0\n1\nt 0 1\xff0\n", b"0\n4\nt 0 110\n", bytes(12), "a directory"])
def test_after_a_loss_of_power_damage_is_no_torn_tail_where_the_recovery_point_is_unreadable(
    made: Logs, content: bytes | str
) -> None:
    """It counted as 0, and all that was behind the damage was cut."""
    copy = copy_of(made)
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    path = made.path / "recovery-point-offset-checkpoint"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.unlink()
        path.mkdir()
    damage(made.folder / made.files("*.log")[1], 3, "CRC")
    log = made.open()
    [(_, damaged)] = log.damaged_ranges()
    assert list(served(log)) == [*range(damaged.first_offset), *range(damaged.end_offset, 2 * COUNT)]
    repair(log, copy)
    assert list(served(log)) == list(range(2 * COUNT))


@pytest.mark.parametrize("what", ["a part of the last batch", "the last batch", "the high watermark too"])
def test_after_a_loss_of_power_a_cut_is_said_where_the_recovery_point_is_unreadable(
    made: Logs, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """All of it was on the device. It counted as what had not been synced, and went without a word."""
    made.log.flush()
    made.directory.write_checkpoints()
    made.kill()
    (made.path / "recovery-point-offset-checkpoint").write_bytes(bytes(12))
    if what == "the high watermark too":
        (made.path / "replication-offset-checkpoint").write_bytes(bytes(12))
    path = made.folder / made.files("*.log")[-1]
    data = path.read_bytes()
    path.write_bytes(data[: batches_of(path)[-1][0]] if what == "the last batch" else data[:-10])
    log = made.open()
    assert log.log_end_offset < 2 * COUNT
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.endswith(f"lacks records that may have been acknowledged, from offset {log.log_end_offset} on")
    assert made.directory.shortened_logs == {("t", 0)}


def test_what_a_killed_process_leaves_behind_the_last_whole_batch_is_cut_and_the_loss_is_said_first(made: Logs) -> None:
    made.kill()
    (made.path / "replication-offset-checkpoint").unlink()  # else it says how much is missing
    path = made.folder / made.files("*.log")[-1]
    path.write_bytes(path.read_bytes()[:-10])
    losses: list[int] = []
    made.directory = made._open()
    directory = made.directory
    directory.on_loss = lambda: losses.append(path.stat().st_size)
    size = path.stat().st_size
    directory.ending = Ending.KILLED
    log = directory.load(lambda topic: made.config, NOW)["t", 0]
    assert losses == [size], "the claim goes before the bytes"
    assert directory.shortened_logs == {("t", 0)}
    assert log.log_end_offset < 2 * COUNT


@pytest.mark.parametrize("high_watermark", [70, 2 * COUNT])
def test_an_empty_last_segment_after_a_kill_may_have_held_records(made: Logs, high_watermark: int) -> None:
    """It is begun when there is a record for it. One that is known to be empty by the high watermark has lost none."""
    if high_watermark == 2 * COUNT:
        made.log.roll(NOW)
    path = made.folder / made.files("*.log")[-1]
    (made.path / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 70\n")
    (made.path / "replication-offset-checkpoint").write_text(f"0\n1\nt 0 {high_watermark}\n")
    made.kill()
    path.write_bytes(b"")
    log = made.open(machine_ran_on=True)
    assert log.log_end_offset == int(path.name[:20])
    assert made.directory.shortened_logs == ({("t", 0)} if high_watermark == 70 else set())


def test_a_whole_segment_that_is_gone_is_damage(made: Logs) -> None:
    copy, end = copy_of(made), made.log.log_end_offset
    made.close()
    (made.folder / made.files("*.log")[1]).write_bytes(b"")
    log = made.open()
    assert log.log_end_offset == end
    assert set(served(log)) < set(range(end))
    repair(log, copy)
    assert offsets_of(records_of(log)) == list(range(end))


def test_a_copy_of_another_leader_epoch_is_refused(made: Logs) -> None:
    copy = copy_of(made)
    made.close()
    damage(made.folder / made.files("*.log")[1], 3, "CRC")
    log = made.open()
    list(served(log))
    [(segment, damaged)] = log.damaged_ranges()
    stale = bytearray(copy[damaged.first_offset])
    pack_into(">i", stale, 12, 9)
    with pytest.raises(CopyRefused, match="leader epoch 9"):
        log.repair_of(segment, damaged).accept(memoryview(stale))
    with pytest.raises(CopyRefused, match="lacks"):
        log.repair_of(segment, damaged).accept(memoryview(copy[damaged.end_offset]))
    broken = bytearray(copy[damaged.first_offset])
    broken[-1] ^= 1
    with pytest.raises(CopyRefused, match="damaged, too"):
        log.repair_of(segment, damaged).accept(memoryview(broken))
    assert log.damaged_ranges()


@pytest.mark.parametrize("number", [0, 3])
def test_a_cut_below_damage_takes_it_along_and_a_cut_inside_keeps_what_is_below(made: Logs, number: int) -> None:
    made.close()
    path = made.folder / made.files("*.log")[1]
    damage(path, number, "zeros over batches")
    log = made.open()
    list(served(log))
    [(_, damaged)] = log.damaged_ranges()
    inside = damaged.first_offset + 2
    log.truncate_to(inside)
    assert log.log_end_offset == inside
    [(_, left)] = log.damaged_ranges()
    assert (left.first_offset, left.end_offset) == (damaged.first_offset, inside)
    assert log.append_as_leader(batch(), 3, NOW).first_offset == inside
    log.truncate_to(damaged.first_offset - 2)
    assert not log.damaged_ranges()
    assert log.log_end_offset == damaged.first_offset - 2


def test_a_follower_takes_no_gap_that_compaction_cannot_explain(logs: MakeLogs) -> None:
    made = logs()
    made.append(batch(2))
    behind_a_gap = batch(1, base_offset=7, leader_epoch=0)
    with pytest.raises(UnexplainedGap):
        made.log.append_as_follower(behind_a_gap, NOW)
    both = memoryview(bytearray(bytes(batch(1, base_offset=2, leader_epoch=0)) + bytes(behind_a_gap)))
    made.log.append_as_follower(both, NOW)
    assert made.log.log_end_offset == 3, "what comes before the gap is taken"
    made.log.explain_gaps(7)
    made.log.append_as_follower(behind_a_gap, NOW)
    assert offsets_of(records_of(made.log)) == [0, 1, 2, 7]


@pytest.mark.parametrize("ending", ["stop", "kill", "loss of power"])
def test_a_gap_that_was_explained_is_no_damage_after_a_start(logs: MakeLogs, ending: str) -> None:
    """Nobody may be left to explain it again: without other replicas it would count as lost."""
    made = logs(segment_bytes=200)
    made.append(batch(2))
    made.log.explain_gaps(300)
    for base_offset in (7, 9, 150, 299):
        made.log.append_as_follower(batch(1, base_offset=base_offset, leader_epoch=0), NOW)
    with pytest.raises(UnexplainedGap):
        made.log.append_as_follower(batch(1, base_offset=301, leader_epoch=0), NOW)
    made.log.append_as_follower(batch(1, base_offset=300, leader_epoch=0), NOW)
    assert made.log.segment_count > 2
    if ending == "stop":
        made.close()
    else:
        made.kill()
    log = made.open(machine_ran_on=ending == "kill")
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        scrub.run(10**9)
        assert not scrub.finish()
    assert not log.damaged_ranges()
    assert not made.directory.shortened_logs
    assert offsets_of(records_of(log)) == [0, 1, 7, 9, 150, 299, 300]
    with pytest.raises(UnexplainedGap):
        log.append_as_follower(batch(1, base_offset=302, leader_epoch=0), NOW)


@pytest.mark.parametrize("content", [b"1\nmany\n", b"1\n999\n", b"1\n999\n00000000\n", None])
def test_a_damaged_note_of_gaps_explains_none(made: Logs, content: bytes | None) -> None:
    """The segment that is gone is missed, though the note says that nothing is."""
    made.log.explain_gaps(7)
    made.close()
    note = made.folder / "explained-gaps"
    note.write_bytes(note.read_bytes().replace(b"7", b"9", 1) if content is None else content)
    names = made.files("*.log")
    (made.folder / names[1]).unlink()
    log = made.open()
    assert log.gaps_explained_below == 0
    assert list(served(log)) == [
        each for each in range(log.log_end_offset) if not int(names[1][:20]) <= each < int(names[2][:20])
    ]
    assert log.damaged_ranges()


def test_an_index_that_disagrees_is_made_anew_and_no_damage(made: Logs) -> None:
    made.close()
    path = made.folder / made.files("*.index")[1]
    right = path.read_bytes()
    path.write_bytes(right[:5] + bytes([right[5] ^ 1]) + right[6:])
    log = made.open()
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        scrub.run(10**9)
        assert not scrub.finish()
    assert path.read_bytes() == right
    assert offsets_of(records_of(log)) == list(range(2 * COUNT))


def test_bytes_too_many_between_two_batches_are_never_served_and_go_with_a_repair(made: Logs) -> None:
    copy, end = copy_of(made), made.log.log_end_offset
    made.close()
    path = made.folder / made.files("*.log")[0]
    whole = path.read_bytes()
    position, _ = batches_of(path)[3]
    path.write_bytes(whole[:position] + b"\1" * 300 + whole[position:])
    log = made.open()
    for _ in range(2):  # the second time goes by what the first has left: hints, and what was found
        assert list(served(log)) == list(range(end)), "no record is lost"
        for size in (1, 150, 400, 10_000):
            offset = 0
            while offset < end:
                result = read(log, offset, size, end)
                offset = [record.offset for region in result.regions for record in iter_records(region)][-1] + 1
    [(_, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (6, 6)
    repair(log, copy)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("may_have_gaps", [False, True])
@pytest.mark.parametrize("is_end_known", [False, True])
@pytest.mark.parametrize("number", [1, 5, -1])
def test_a_batch_that_lost_its_base_offset_with_all_before_it_is_no_first_batch(
    made: Logs, number: int, is_end_known: bool, may_have_gaps: bool
) -> None:
    """After a power failure, the last bytes that are on the device may begin inside the base offset of a batch."""
    path = made.folder / made.files("*.log")[0]
    end = made.log.segments.first.next_offset
    data = bytearray(path.read_bytes())
    batches = batches_of(path)
    position, _ = batches[number]
    data[: position + 8] = bytes(position + 8)
    examiner = Examiner(
        lambda length, at: bytes(data[at : at + length]), len(data), 0, may_have_gaps=may_have_gaps,
        end_offset=end if is_end_known else UNKNOWN_END,
    )  # fmt: skip
    whole = [each.position for each in examiner.run() if isinstance(each, WholeBatch)]
    assert whole == [each for each, _ in batches if each > position]


@pytest.mark.parametrize("magic", [0, 1])
def test_messages_of_an_old_format_are_named(made: Logs, magic: int) -> None:
    """Kafka 4 reads them in segments that it has had since before 0.11."""
    body = bytes([magic, 0]) + bytes(8 * magic) + b"\xff\xff\xff\xff\0\0\0\1v"
    message = pack(">qiI", 0, 4 + len(body), crc32(body)) + body
    data = message + (made.folder / made.files("*.log")[0]).read_bytes()
    for is_whole in (True, False):
        if not is_whole:
            data = data[: len(message) - 1] + b"w" + data[len(message) :]
        first, second = islice(
            Examiner(lambda length, at: data[at : at + length], len(data), 0, may_have_gaps=True).run(), 2  # noqa: B023
        )  # fmt: skip
        assert isinstance(first, DamagedRange)
        assert isinstance(second, WholeBatch)
        assert first.end_position == second.position
        assert (f"a message of format {magic}, " in first.reason) is is_whole


def test_a_segment_that_is_appended_to_has_room_for_another_length_once_it_is_rolled(made: Logs) -> None:
    copy, end = copy_of(made), made.log.log_end_offset
    made.close()
    path = made.folder / made.files("*.log")[-1]
    whole = path.read_bytes()
    position, _ = batches_of(path)[2]
    path.write_bytes(whole[:position] + b"\1" * 300 + whole[position:])
    log = made.open()
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        scrub.run(10**9)
        scrub.finish()
    with pytest.raises(NoRoom):
        repair(log, copy)
    log.roll(NOW)
    repair(log, copy)
    assert path.read_bytes() == whole
    assert offsets_of(records_of(log)) == list(range(end))


@pytest.mark.parametrize("position", [-5, 2**31 - 1])
def test_an_index_row_that_points_nowhere_keeps_no_log_from_opening(made: Logs, position: int) -> None:
    end = made.log.log_end_offset
    made.close()
    for name in made.files("*.index"):
        data = bytearray((made.folder / name).read_bytes())
        for row in range(0, len(data) - 8, 8):
            pack_into(">i", data, row + 4, position)
        (made.folder / name).write_bytes(data)
    log = made.open()
    for offset in range(0, end, 2):
        log.segments[log.segments.floor_index(offset)].hints.clear()  # so that the index is asked
        [region] = read(log, offset, 1, end).regions
        assert next(iter_records(region)).offset == offset


def test_batches_behind_the_last_position_of_an_index_get_no_rows_and_are_read(
    made: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (examination, segment_module):
        monkeypatch.setattr(module, "MAX_POSITION", 1000)
    for is_clean in (True, False):
        made.close() if is_clean else made.kill()
        for name in made.files("*.index"):
            (made.folder / name).unlink()
        log = made.open(machine_ran_on=True)
        assert list(served(log)) == list(range(2 * COUNT))
        for segment in log.segments:
            assert segment.offset_index.last_value <= 1000


def test_a_time_index_that_lacks_its_last_rows_is_made_anew_by_the_scrubber(made: Logs) -> None:
    made.close()
    path = made.folder / made.files("*.timeindex")[1]
    right = path.read_bytes()
    path.write_bytes(right[:12])
    log = made.open()
    for segment in list(log.segments):
        scrub = Scrub(log, segment)
        scrub.run(10**9)
        assert not scrub.finish()
    assert path.read_bytes() == right
    for number in range(COUNT):
        found = log.offset_for_timestamp(NOW + number)
        assert found is not None
        assert found.offset == next(
            2 * each + more for each in range(COUNT) for more in (0, 1) if each + more >= number
        )


@pytest.mark.parametrize("text", ["0\n", "0\n0\n", "0\n1\n2 100\n", "0\n3\n0 40\n1 50\n2 100\n"])
def test_leader_epochs_that_do_not_reach_the_first_record_are_made_anew_after_a_clean_stop(
    made: Logs, text: str
) -> None:
    made.close()
    (made.folder / "leader-epoch-checkpoint").write_text(text)
    assert list(made.open().leader_epochs) == [(0, 0), (1, 50), (2, 100)]


@pytest.mark.parametrize("extra", [0, 300])
@pytest.mark.parametrize("cut", [1, 300, 500])
@pytest.mark.parametrize("may_end_early", [False, True])
def test_the_scrubber_and_a_reader_find_the_same_where_a_file_is_shorter_than_it_was(
    made: Logs, cut: int, extra: int, may_end_early: bool
) -> None:
    """`extra` bytes lay behind the batches of the segment when the log was opened."""
    copy, end = copy_of(made), made.log.log_end_offset
    made.close()
    path = made.folder / made.files("*.log")[1]
    whole = path.read_bytes()
    path.write_bytes(whole + b"\1" * extra)
    log = made.open()
    path.write_bytes((whole + b"\1" * extra)[:-cut])
    segment = log.segments[1]
    segment.may_have_gaps = segment.may_end_early = may_end_early
    expected = segment.examine().damage
    assert expected
    scrub = Scrub(log, segment)
    scrub.run(10**9)
    assert scrub.finish()
    assert segment.damage == expected
    repair(log, copy)
    assert path.read_bytes() == whole
    assert offsets_of(records_of(log)) == list(range(end))


@pytest.mark.parametrize("number", [1, -1])
@pytest.mark.parametrize("left_bytes", [0, 30])
def test_all_that_lies_before_a_cut_is_read_in_one_piece(
    made: Logs, monkeypatch: pytest.MonkeyPatch, number: int, left_bytes: int
) -> None:
    """A large read maps the file. That the file is shorter than it was refused what is before the cut, too."""
    monkeypatch.setattr(reader, "MAP_ABOVE_BYTES", 100)
    segment = made.log.segments[number]
    path = made.folder / made.files("*.log")[number]
    made.log.segments.release()
    os.truncate(path, batches_of(path)[3][0] + left_bytes)
    base, end = segment.base_offset, made.log.log_end_offset
    for offset in (base, base + 2):
        result = read(made.log, offset, 1 << 20, end)
        assert (result.next_offset, result.size_bytes) == (base + 6, sum(map(len, result.regions)))
    with pytest.raises(DamagedRecords):
        read(made.log, base + 6, 1 << 20, end)


def test_a_walk_over_many_damaged_ranges_does_not_look_at_each_for_every_batch() -> None:
    ranges = tuple(DamagedRange(10 * n, 10 * n + 5, n, n + 1, "") for n in range(6000))
    began = process_time()
    assert all(bytes_after(ranges, at) == at + 5 for at in range(0, 60_000, 10))
    assert all(bytes_after(ranges, at) == at for at in range(7, 60_000, 10))
    assert process_time() - began < 1


def test_bytes_behind_damage_that_follows_other_damage_are_found() -> None:
    gap, end = DamagedRange(20, 20, 7, 9, ""), DamagedRange(50, 50, 12, 13, "")
    ranges = (DamagedRange(10, 20, 5, 7, ""), gap, DamagedRange(20, 30, 9, 11, ""), end)
    assert [bytes_after(ranges, at) for at in (0, 9, 10, 19, 20, 29, 30, 50, 60)] == [0, 9, 30, 30, 30, 30, 30, 50, 60]


def test_the_zeros_behind_the_records_of_a_preallocated_segment_are_passed_quickly() -> None:
    """The search for a batch tried each of them: a start after a kill took 25 s of CPU for a segment of 1 GiB."""
    zeros = bytes(1024 * 1024)
    size_bytes = 256 * len(zeros)
    began = process_time()
    examiner = Examiner(lambda count, position: zeros[:count], size_bytes, 7)
    [tail] = examiner.run()
    assert isinstance(tail, DamagedRange)
    assert (tail.position, tail.end_position, tail.first_offset) == (0, size_bytes, 7)
    assert process_time() - began < 2, "trying each takes more than twice as long"
