"""The log start at a start of the node: a checkpoint without a checksum hides no record unless a second file agrees."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker, offsets_of, records_of
from tidelog.protocol.batches.record_batch import LENGTH_OFFSET
from tidelog.storage.files.checkpoints import HIGH_WATERMARK_FILE, LEADER_EPOCH_FILE, LOG_START_FILE, CheckpointTask
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.verification import LogFacts, StoppedLog

MakeLogs = Callable[..., Logs]
ENDINGS = ["after a clean stop", "after a kill", "after a loss of power"]
COUNT = 30


@pytest.fixture
def made(logs: MakeLogs) -> Logs:
    """Thirty batches of a record each, ten or eleven in a segment."""
    made = logs(segment_bytes=1000)
    for number in range(COUNT):
        made.append(batch(value=b"%03d" % number * 10, timestamp=NOW + number), epoch=number // 12)
    made.log.flush()
    made.directory.write_checkpoints()
    assert made.log.segment_count == 3
    return made


def restart(made: Logs, ending: str, change: Callable[[], object] = lambda: None) -> PartitionLog:
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
    change()
    return made.open(machine_ran_on=ending == "after a kill")


def name_log_start(made: Logs, offset: int) -> None:
    (made.path / LOG_START_FILE).write_text(f"0\n1\nt 0 {offset}\n")


def damage_epochs(made: Logs, how: str) -> None:
    path = made.folder / LEADER_EPOCH_FILE
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"no entry": b"0\n0\n", "no byte": b"", "unreadable": b"0\n7\nx\n"}[how])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("epochs", ["gone", "no entry", "no byte", "unreadable"])
@pytest.mark.parametrize("log_start_offset", [1, 7, 21, COUNT - 1, 500, 2**40])
def test_a_checkpoint_alone_hides_and_deletes_no_record(
    made: Logs, log_start_offset: int, epochs: str, ending: str
) -> None:
    def damage() -> None:
        name_log_start(made, log_start_offset)
        damage_epochs(made, epochs)

    restart(made, ending, damage)
    for each in ENDINGS:
        assert (made.log.log_start_offset, made.log.log_end_offset) == (0, COUNT)
        assert offsets_of(records_of(made.log)) == list(range(COUNT))
        assert list(made.log.leader_epochs) == [(0, 0), (1, 12), (2, 24)]
        assert ("t", 0) not in made.directory.shortened_logs
        restart(made, each)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("log_start_offset", [1, 7, 21, COUNT - 1, COUNT, 500, 2**40])
def test_a_checkpoint_that_the_epoch_file_contradicts_hides_no_record(
    made: Logs, log_start_offset: int, ending: str
) -> None:
    restart(made, ending, lambda: name_log_start(made, log_start_offset))
    assert made.log.log_start_offset == 0
    assert offsets_of(records_of(made.log)) == list(range(COUNT))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("log_start_offset", [3, 12, 15, 24, COUNT - 1, COUNT])
def test_deleted_records_stay_deleted_over_every_start(made: Logs, log_start_offset: int, ending: str) -> None:
    made.log.delete_records(log_start_offset)
    made.directory.write_checkpoints()
    for each in (ending, *ENDINGS):
        restart(made, each)
        assert (made.log.log_start_offset, made.log.log_end_offset) == (log_start_offset, COUNT)
    made.append(batch(), epoch=3)
    restart(made, ending)
    assert offsets_of(records_of(made.log)) == list(range(log_start_offset, COUNT + 1))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("is_truncated", [False, True])
def test_records_after_a_log_of_which_all_was_deleted_bring_nothing_back(
    made: Logs, is_truncated: bool, ending: str
) -> None:
    """The epoch file has no entry then, until the next round of checkpoints, which writes it first."""
    made.log.delete_records(COUNT)
    made.directory.write_checkpoints()
    if is_truncated:
        made.log.assign_epoch(3)
        made.log.truncate_to(COUNT)  # the next leader is another replica: that epoch had no record
        made.log.flush()
    else:
        restart(made, "after a clean stop")
    assert list(made.log.leader_epochs) == ([] if is_truncated else [(2, COUNT)])
    made.directory.write_checkpoints()
    made.append(batch(), batch(), epoch=4)
    made.directory.finish_checkpoints(begin_round(made))
    restart(made, ending)
    assert made.log.log_start_offset == COUNT
    assert offsets_of(records_of(made.log)) == [COUNT, COUNT + 1]
    assert list(made.log.leader_epochs) == [(4, COUNT)]


def begin_round(made: Logs) -> CheckpointTask:
    task = made.directory.begin_checkpoints()
    task.run()
    return task


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("epochs", ["gone", "no entry", "unreadable"])
def test_retention_is_not_undone_where_the_epoch_file_is_lost(made: Logs, epochs: str, ending: str) -> None:
    made.log.delete_records(int(made.files("*.log")[1][:20]))
    made.directory.maintain(NOW)
    start = made.log.log_start_offset
    assert start > 0
    made.directory.write_checkpoints()
    restart(made, ending, lambda: damage_epochs(made, epochs))
    assert made.log.log_start_offset == start
    assert offsets_of(records_of(made.log)) == list(range(start, COUNT))


def test_an_epoch_file_without_an_entry_confirms_no_log_start_below_the_high_watermark(made: Logs) -> None:
    """Beside records, such a file is a damaged one."""

    def damage() -> None:
        damage_epochs(made, "no entry")
        name_log_start(made, COUNT)
        (made.path / HIGH_WATERMARK_FILE).write_text(f"0\n1\nt 0 {COUNT - 1}\n")

    assert restart(made, "after a kill", damage).log_start_offset == 0
    assert offsets_of(records_of(made.log)) == list(range(COUNT))


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("log_start_offset", [COUNT + 1, 500, 2**40])
def test_a_log_start_above_the_high_watermark_does_not_say_that_missing_files_were_deleted(
    made: Logs, log_start_offset: int, count: int, ending: str
) -> None:
    names = made.files("*.log")

    def damage() -> None:
        name_log_start(made, log_start_offset)
        for name in names[:count]:
            (made.folder / name).unlink()

    log = restart(made, ending, damage)
    assert log.log_start_offset == 0
    [(_, damaged)] = log.damaged_ranges()
    assert damaged.first_offset == 0
    # Of a log that was open, the recovery point is the last offset: a lower bound of the log end.
    end_offset = COUNT if ending == "after a clean stop" else COUNT - 1
    assert damaged.end_offset == (int(names[1][:20]) if count == 1 else end_offset)


@pytest.mark.parametrize("has_restarted", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
def test_records_behind_a_log_of_which_all_was_deleted_are_kept_by_a_start(
    logs: MakeLogs, ending: str, has_restarted: bool
) -> None:
    """After an unclean election they may be of an earlier epoch than the deleted ones: a start cut them."""
    made = logs()
    made.append(batch(), batch(), epoch=9)
    made.log.delete_records(2)
    made.directory.write_checkpoints()
    if has_restarted:
        restart(made, "after a kill")
    made.log.truncate_to(2)  # to the end of the last epoch that this log and its leader have
    for offset in range(2, 5):
        made.log.append_as_follower(batch(base_offset=offset, leader_epoch=7), NOW)
    made.log.flush()
    log = restart(made, ending)
    assert not made.directory.shortened_logs
    assert not any(segment.damage for segment in log.segments)
    assert offsets_of(records_of(log)) == [2, 3, 4]
    assert list(log.leader_epochs) == [(7, 2)]


def follow(log: PartitionLog, epoch: int, count: int = 3) -> list[int]:
    """Append from a leader of this epoch. The offsets."""
    offsets = list(range(log.log_end_offset, log.log_end_offset + count))
    for offset in offsets:
        log.append_as_follower(batch(base_offset=offset, leader_epoch=epoch), NOW)
    log.flush()
    return offsets


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("why", ["it was stopped", "its leader lacks an epoch in which it led without a record"])
@pytest.mark.parametrize("epoch", [9, 11])
def test_a_follower_of_which_all_was_deleted_goes_on_without_a_wait(
    logs: MakeLogs, epoch: int, why: str, ending: str
) -> None:
    """Its next append synced the checkpoints of the directory."""
    made = logs()
    made.append(batch(), epoch=5)
    made.append(batch(), epoch=9)
    made.log.delete_records(2)
    made.directory.write_checkpoints()
    if why == "it was stopped":
        restart(made, "after a clean stop")
    else:
        made.log.assign_epoch(10)
        made.log.truncate_to(2)
    log, write_checkpoint = made.log, made.log.write_checkpoint
    assert list(log.leader_epochs) == ([(9, 2)] if why == "it was stopped" else [])
    log.write_checkpoint = lambda: pytest.fail("waits for the device")
    offsets = follow(log, epoch)
    log.write_checkpoint = write_checkpoint
    assert offsets_of(records_of(restart(made, ending))) == offsets
    assert list(made.log.leader_epochs) == [(epoch, 2)]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_verification_takes_no_deleted_record_for_one_whose_epoch_is_missing(logs: MakeLogs, is_cut: bool) -> None:
    """An empty file of epochs is right where all is deleted and the leader lacked the last epoch."""
    made = logs()
    made.append(batch(), epoch=5)
    made.append(batch(), epoch=9)
    made.log.delete_records(1 if is_cut else 2)
    made.log.assign_epoch(10)
    made.log.truncate_to(2)
    made.close()
    if is_cut:
        damage_epochs(made, "no entry")
    facts = LogFacts(is_clean=True, recovery_point=2, high_watermark=2, log_start_offset=1 if is_cut else 2)
    problems = [problem.reason for problem in StoppedLog(made.disk, str(made.folder), facts).verify()]
    assert ("is empty" in problems) == is_cut, problems


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("where", ["in the segment", "before an empty segment", "in segments that retention took out"])
def test_a_start_knows_the_last_epoch_of_a_log_of_which_all_was_deleted(
    logs: MakeLogs, where: str, ending: str
) -> None:
    """The leader compares it with its log. After an unclean election the log of this replica may be another one, and
    longer: it joined the ISR without what the leader had acknowledged below its log start.
    """
    made = logs(retention_ms=1000)
    made.append(batch(), epoch=5)
    made.append(batch(), epoch=9)
    made.log.flush()
    if where == "in segments that retention took out":
        made.directory.maintain(NOW + 10_000)
        assert not made.log.segments.condemned
    else:
        made.log.delete_records(2)
    if where == "before an empty segment":
        made.log.roll(NOW)
    made.directory.write_checkpoints()
    for _ in range(2):
        log = restart(made, ending)
        assert (log.log_start_offset, log.log_end_offset) == (2, 2)
        assert list(log.leader_epochs) == [(9, 2)]
        assert ending != "after a clean stop" or not log.leader_epochs.is_dirty  # there is nothing to write again


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("where", ["in the segment", "before an empty segment", "in segments that retention took out"])
def test_deleted_records_of_a_later_epoch_are_found_wherever_they_are(logs: MakeLogs, where: str, ending: str) -> None:
    """No checkpoint has the log start yet: a start after a kill would have them back, and cut what follows."""
    made = logs(retention_ms=1000)
    made.append(batch(), epoch=5)
    made.append(batch(), epoch=9)
    log = made.log
    if where == "in segments that retention took out":
        log.maintain(NOW + 10_000)
        assert log.segments.condemned
    else:
        log.delete_records(2)
    if where == "before an empty segment":
        log.roll(NOW)
    log.flush()
    log.truncate_to(2)
    offsets = follow(log, 7)
    log = restart(made, ending)
    assert not made.directory.shortened_logs
    assert not log.damaged_ranges()
    assert offsets_of(records_of(log)) == offsets
    assert list(log.leader_epochs) == [(7, 2)]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_deleted_record_of_unreadable_epoch_may_be_of_a_later_one(logs: MakeLogs, ending: str) -> None:
    made = logs()
    made.append(batch(), batch(), epoch=9)
    made.log.delete_records(2)
    made.log.truncate_to(2)
    with (made.folder / made.files("*.log")[0]).open("r+b") as file:
        file.seek(made.log.segments.first.size_bytes // 2 + LENGTH_OFFSET)
        file.write(bytes(4))
    offsets = follow(made.log, 7)
    log = restart(made, ending)
    assert not made.directory.shortened_logs
    assert not any(segment.damage for segment in log.segments)
    assert offsets_of(records_of(log)) == offsets


@pytest.mark.parametrize("ending", ENDINGS)
def test_producers_are_known_behind_deleted_records_of_a_later_epoch(logs: MakeLogs, ending: str) -> None:
    """As in Kafka, which truncates nothing then: a batch that is sent again must not be written twice."""
    made = logs()
    made.append(idempotent(0), idempotent(1), epoch=9)
    made.append(idempotent(0, producer_id=8, transactional=True), epoch=9)
    made.log.delete_records(3)
    made.log.truncate_to(3)
    offsets = follow(made.log, 7)
    producers = made.log.producers
    assert (producers.entries[7].last_sequence, producers.first_open_offset) == (1, 2)
    assert made.log.append_as_leader(idempotent(1), 10, NOW).duplicate
    made.append(marker(abort=True, producer_id=8), epoch=10, from_client=False)
    assert producers.first_open_offset == -1
    made.append(idempotent(2), epoch=10)
    log = restart(made, ending)
    assert not any(segment.damage for segment in log.segments)
    assert offsets_of(records_of(log)) == [*offsets, 7]  # 6 is the marker's
    assert log.producers.entries[7].last_sequence == 2


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_epoch_without_records_is_not_kept_behind_records_by_a_start(logs: MakeLogs, ending: str) -> None:
    """Only records, also deleted ones, prove that the log has an epoch."""
    made = logs()
    made.append(batch(), batch(), epoch=2)
    made.log.assign_epoch(5)
    made.log.flush()
    assert list(made.log.leader_epochs) == [(2, 0), (5, 2)]
    assert list(restart(made, ending).leader_epochs) == [(2, 0)]
