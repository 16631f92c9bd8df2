"""A log whose first file is gone: the files around it say that records are missing, which are fetched again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, offsets_of, read, records_of
from tests.unit.storage.test_damage import COUNT, copy_of, repair, served
from tidelog.protocol.errors import KafkaError
from tidelog.storage.log.repair import CopyRefused
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig

MakeLogs = Callable[..., Logs]
ENDINGS = ["after a clean stop", "after a kill", "after a loss of power"]


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    made = logs(segment_bytes=2500, index_interval_bytes=300)
    for n in range(COUNT):
        made.append(idempotent(2 * n, count=2, value=b"%03d" % n * 20, timestamp=NOW + n), epoch=n // 25)
    made.log.flush()
    made.directory.write_checkpoints()
    assert made.log.segment_count >= 4
    return made


def end(made: Logs, ending: str) -> None:
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()


def begin(made: Logs, ending: str) -> None:
    made.open(machine_ran_on=ending == "after a kill")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("pattern", ["{}.log", "{}.*"])
@pytest.mark.parametrize("count", [1, 2])
def test_records_of_missing_first_files_are_refused_and_repaired(
    made: Logs, ending: str, pattern: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    copy, last = copy_of(made), made.log.log_end_offset
    names = [name[:20] for name in made.files("*.log")]
    first = int(names[count])
    end(made, ending)
    for name in names[:count]:
        for path in made.folder.glob(pattern.format(name)):
            path.unlink()
    for _ in range(2):  # a start that finds what the one before has left
        begin(made, ending)
        assert (made.log.log_start_offset, made.log.log_end_offset) == (0, last)
        [(_, damaged)] = made.log.damaged_ranges()
        assert (damaged.first_offset, damaged.end_offset) == (0, first)
        assert f"offsets 0 to {first} are damaged" in caplog.text
        with pytest.raises(DamagedRecords):
            read(made.log, 0, 1, last)
        assert list(served(made.log)) == list(range(first, last))
        end(made, ending)
    begin(made, ending)
    repair(made.log, copy)
    assert not made.log.damaged_ranges()
    assert offsets_of(records_of(made.log)) == list(range(last))
    assert list(made.log.leader_epochs) == [(0, 0), (1, 50), (2, 100)]
    end(made, ending)
    begin(made, ending)
    assert offsets_of(records_of(made.log)) == list(range(last))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("pattern", ["{}.log", "{}.*"])
@pytest.mark.parametrize("start", [5, 6])
def test_a_missing_first_file_in_which_the_log_start_lies_inside_of_a_batch(
    made: Logs, ending: str, pattern: str, start: int
) -> None:
    """Its name is the log start then, and the batch of the other replicas begins before that."""
    made.log.delete_records(start)
    made.directory.write_checkpoints()
    # The other replicas have deleted what is below the log start, too.
    copy = {offset: data for offset, data in copy_of(made).items() if offset + 2 > start}
    last, name = made.log.log_end_offset, made.files("*.log")[0][:20]
    first = int(made.files("*.log")[1][:20])
    end(made, ending)
    for path in made.folder.glob(pattern.format(name)):
        path.unlink()
    begin(made, ending)
    [(segment, damaged)] = made.log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (start, first)
    if start % 2:
        work = made.log.repair_of(segment, damaged)
        with pytest.raises(CopyRefused, match="reaches beyond"):
            work.accept(memoryview(copy[start - 1]))
        end(made, ending)
        begin(made, ending)  # a start that finds what the refusal has left
        [(_, damaged)] = made.log.damaged_ranges()
        assert (damaged.first_offset, damaged.end_offset) == (start - 1, first)
    repair(made.log, copy)
    for _ in range(2):
        assert not made.log.damaged_ranges()
        assert (made.log.log_start_offset, made.log.log_end_offset) == (start, last)
        assert [each for each in offsets_of(records_of(made.log)) if each >= start] == list(range(start, last))
        end(made, ending)
        begin(made, ending)


@pytest.mark.parametrize("ending", ENDINGS[:2])
def test_the_only_file_of_a_log_is_missing(logs: MakeLogs, ending: str) -> None:
    made = logs()
    made.append(*[batch(2) for _ in range(5)])
    made.log.flush()
    made.directory.write_checkpoints()
    copy = copy_of(made)
    end(made, ending)
    (made.folder / made.files("*.log")[0]).unlink()
    begin(made, ending)
    assert ("t", 0) in made.directory.shortened_logs, "such a log must not speak for what it had"
    if ending == "after a clean stop":
        assert made.log.log_end_offset == 10
        repair(made.log, copy)
        assert offsets_of(records_of(made.log)) == list(range(10))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("hole", ["the file is gone", "its last batches are gone", "one batch is gone"])
def test_a_producer_of_missing_records_below_the_recovery_point_is_not_forgotten(
    logs: MakeLogs, ending: str, hole: str
) -> None:
    """The snapshot that names the producer is gone, too, so that the start reads the batches around the hole."""
    made = logs(segment_bytes=700, index_interval_bytes=100_000)
    for n in range(30):
        value = b"%03d" % n * 20
        sequence, producer_id = (0, 8) if n == 12 else (n - (n > 12), 7)
        made.append(idempotent(sequence, producer_id=producer_id, value=value))
    made.log.flush()
    made.directory.write_checkpoints()
    copy, last = copy_of(made), made.log.log_end_offset
    names = made.files("*.log")
    number = next(n for n, name in enumerate(names) if int(name[:20]) > 12) - 1
    end(made, ending)
    for name in made.files("*.snapshot"):
        if int(name[:20]) > int(names[number][:20]):
            (made.folder / name).unlink()
    path = made.folder / names[number]
    data, position = path.read_bytes(), len(copy[0]) * (12 - int(names[number][:20]))
    if hole == "the file is gone":
        path.unlink()
    elif hole == "one batch is gone":
        path.write_bytes(data[:position] + data[position + len(copy[0]) :])
    else:
        path.write_bytes(data[:position])
    begin(made, ending)
    with pytest.raises(KafkaError):
        made.append(idempotent(0, producer_id=8))
    assert made.log.log_end_offset == last
    repair(made.log, copy)
    for _ in range(2):
        [info] = made.append(idempotent(0, producer_id=8))
        assert (info.first_offset, made.log.log_end_offset) == (12, last)
        end(made, ending)
        begin(made, ending)


@pytest.mark.parametrize("witness", ["leader-epoch-checkpoint", "log-start-offset-checkpoint"])
def test_one_of_the_two_witnesses_of_the_log_start_is_enough(made: Logs, witness: str) -> None:
    made.log.delete_records(4)
    made.close()
    for name in ("leader-epoch-checkpoint", "log-start-offset-checkpoint"):
        if name != witness:
            (made.folder / name).unlink(missing_ok=True)
            (made.path / name).unlink(missing_ok=True)
    names = made.files("*.log")
    (made.folder / names[0]).unlink()
    made.open()
    [(_, damaged)] = made.log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (4, int(names[1][:20]))
    assert made.log.log_start_offset == 4


def test_indexes_that_are_left_are_a_witness_where_there_is_no_other(made: Logs) -> None:
    made.close()
    (made.folder / "leader-epoch-checkpoint").unlink()
    names = made.files("*.log")
    (made.folder / names[0]).unlink()
    made.open()
    [(_, damaged)] = made.log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (0, int(names[1][:20]))


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_compacted_log_that_lacks_its_first_file_was_not_compacted_there(logs: MakeLogs, ending: str) -> None:
    """Its segments may have gaps and end early, but a cleaned one keeps the name of the first."""
    config = {"cleanup_policy": frozenset({"compact"}), "segment_bytes": 300}
    made = logs(**config)
    made.append(*[batch(2, key=b"k%d" % n) for n in range(20)])
    made.log.flush()
    made.log.cleaned_offset = made.log.segments.active.base_offset
    made.directory.write_checkpoints()
    copy = copy_of(made)
    last = max(offset for offset in copy if offset < int(made.files("*.log")[1][:20]))
    del copy[last]  # compacted where the copies come from
    first = int(made.files("*.log")[1][:20])
    end(made, ending)
    for path in made.folder.glob(f"{0:020d}.*"):
        path.unlink()
    for _ in range(2):
        begin(made, ending)
        [(_, damaged)] = made.log.damaged_ranges()
        assert (damaged.first_offset, damaged.end_offset) == (0, first)
        end(made, ending)
    begin(made, ending)
    repair(made.log, copy)
    assert not made.log.damaged_ranges()
    assert offsets_of(records_of(made.log)) == [each for each in range(40) if each not in (last, last + 1)]


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("how", ["retention", "delete records", "emptied", "emptied and written to", "of Kafka"])
def test_a_log_start_that_was_moved_is_no_damage(made: Logs, how: str, ending: str) -> None:
    log = made.log
    if how == "retention":
        log.set_config(LogConfig(segment_bytes=2500, retention_bytes=6000))
        made.directory.maintain(NOW)
    elif how == "delete records":
        log.delete_records(60)
        made.directory.maintain(NOW)
    elif how.startswith("emptied"):
        log.truncate_fully_and_start_at(500)
        if how == "emptied and written to":
            log.append_as_follower(batch(2, base_offset=500, leader_epoch=2), NOW)
    else:
        log.delete_records(60)
        made.directory.maintain(NOW)
        made.directory.write_checkpoints()
    start = log.log_start_offset
    assert start > 0
    end(made, ending)
    if how == "of Kafka":  # which names no log start that the first segment's name says
        (made.path / "log-start-offset-checkpoint").unlink()
        start = int(made.files("*.log")[0][:20])
        (made.folder / "leader-epoch-checkpoint").write_text(f"0\n3\n0 {start}\n1 50\n2 100\n")
    begin(made, ending)
    for segment in list(made.log.segments):
        scrub = Scrub(made.log, segment)
        scrub.run(10**9)
        assert not scrub.finish()
    assert not made.log.damaged_ranges()
    assert made.log.log_start_offset == start
    assert ("t", 0) not in made.directory.shortened_logs
    with pytest.raises(KafkaError):
        read(made.log, start - 1, 1, made.log.log_end_offset)


def test_a_crash_while_a_log_is_emptied_leaves_no_damage(made: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*args: object) -> None:
        raise OSError(5, "the process is gone")

    monkeypatch.setattr("tidelog.storage.log.partition_log.Segment.create", crash)
    with pytest.raises(OSError, match="gone"):
        made.log.truncate_fully_and_start_at(500)
    monkeypatch.undo()
    made.kill()
    made.open(machine_ran_on=True)
    assert not made.log.damaged_ranges()
    assert ("t", 0) not in made.directory.shortened_logs
    assert made.log.log_start_offset == made.log.log_end_offset


@pytest.mark.parametrize("count", [1, 2])
def test_files_that_were_never_on_the_device_are_not_called_missing_after_a_loss_of_power(
    logs: MakeLogs, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = logs()
    made.append(batch(2))
    made.log.roll(NOW)
    made.append(batch(2))
    made.log.durability.files.epochs(made.log.leader_epochs).write()
    made.kill()
    for name in made.files("*.log")[:count]:
        (made.folder / name).unlink()
    for _ in range(2):
        log = made.open()
        assert (log.log_start_offset, log.log_end_offset) == (0, 0)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
        assert not made.directory.shortened_logs
        made.kill()


@pytest.mark.parametrize("policy", ["compact", "delete"])
@pytest.mark.parametrize("kept", [0, 1])
def test_the_empty_segment_behind_a_lost_end_stays_at_a_second_start(logs: MakeLogs, policy: str, kept: int) -> None:
    """It was removed, and the next records went into the segment that lacked its end: readers passed over that."""
    made = logs(cleanup_policy=frozenset({policy}))
    made.append(batch(key=b"0"), batch(key=b"1"))
    made.log.roll(NOW)
    made.append(batch(key=b"2"), batch(key=b"3"))
    if not kept:
        made.log.roll(NOW)
    copy, path = copy_of(made), made.folder / made.files("*.log")[1]
    made.log.flush()
    made.directory.write_checkpoints()
    end(made, ENDINGS[0 if kept else 1])
    data = path.read_bytes()
    path.write_bytes(data[: kept * len(data) // 2])
    made.open(machine_ran_on=True)
    made.close_and_open()
    assert made.log.log_end_offset == 4
    for _ in range(2):
        with pytest.raises(DamagedRecords):
            read(made.log, 2 + kept, 1, 4)
        made.append(batch(key=b"4"))
        for segment in list(made.log.segments)[:2]:
            work = Scrub(made.log, segment)
            work.run(10**9)
            work.finish()
    repair(made.log, copy)
    assert offsets_of(records_of(made.log)) == list(range(6))


def test_a_read_at_the_begin_of_an_empty_segment_fails_at_the_end_of_the_log_too(logs: MakeLogs) -> None:
    """The reader got no record and no error until the next append."""
    made = logs()
    made.append(batch(), batch())
    made.log.roll(NOW)
    made.append(batch())
    made.log.roll(NOW)
    made.close()
    (made.folder / made.files("*.log")[1]).write_bytes(b"")
    made.open()
    made.close_and_open()
    with pytest.raises(DamagedRecords):
        read(made.log, 2, 1, 3)
