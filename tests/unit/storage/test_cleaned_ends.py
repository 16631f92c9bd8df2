"""Records that a cleaned log has lost are told from those that the cleaner removed: it leaves the ends of segments."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.storage.batches import NOW, Logs, QuickDisk, batch, read, records_of
from tests.unit.storage.cleaning import begin, clean, contents
from tests.unit.storage.test_compaction import CONFIG, keyed
from tests.unit.storage.test_damage import copy_of, repair
from tests.unit.storage.test_stray_cleanings import Killed, Mortal
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.files.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANED_ENDS_FILE,
    CLEANER_OFFSET_FILE,
    RECOVERY_POINT_FILE,
)
from tidelog.storage.log import explained_gaps
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.verification import RECORDS, LogFacts, StoppedLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

Loss = Callable[[Path], None]


@pytest.fixture
def made(tmp_path: Path) -> Logs:
    """Several cleaned segments, in which offsets are missing between batches, and a part that is not cleaned."""
    made = Logs(tmp_path / "logs", CONFIG)
    for number in range(90):
        made.append(keyed((f"k{number % 50}", f"{number}" * 10)))
    made.log.roll(NOW)
    clean(made.log)
    made.append(keyed(("k0", "last")))
    made.directory.write_checkpoints()
    assert len(made.files("*.log")) >= 4
    return made


def copied_with_gaps(path: Path, batch_count: int) -> Logs:
    """A log that was copied from a cleaned one: of each three offsets it has the first."""
    made = Logs(path, CONFIG)
    for number in range(batch_count):
        fetched = batch(key=b"%d" % number, value=b"." * 100, base_offset=3 * number, leader_epoch=0)
        made.log.append_as_follower(fetched, NOW)
    made.log.set_high_watermark(made.log.log_end_offset)
    return made


def last_batch(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: [position for position, _ in iter_headers(data)][-1]])


def everything(path: Path) -> None:
    path.write_bytes(b"")


def all_files(path: Path) -> None:
    for each in path.parent.glob(f"{path.stem}.*"):
        each.unlink()


def name(path: Path) -> None:
    path.rename(path.with_stem(f"{int(path.stem) + 1:020d}"))


def served(log: PartitionLog) -> list[tuple[int, bytes]]:
    """(offset, batch) of all that a reader gets; damage is an error for it."""
    found, offset = [], log.log_start_offset
    while offset < log.log_end_offset:
        result = read(log, offset, 1, log.log_end_offset)
        assert result.next_offset > offset
        found.append((offset, b"".join(result.regions)))
        offset = result.next_offset
    return found


@pytest.mark.parametrize("ending", ["after a clean stop", "after a kill"])
@pytest.mark.parametrize("number", [-4, -2])
@pytest.mark.parametrize("lose", [last_batch, everything, all_files, name])
def test_what_a_cleaned_segment_has_lost_is_damage_and_is_repaired(
    made: Logs, lose: Loss, number: int, ending: str
) -> None:
    copy, expected = copy_of(made), contents(made.log)
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
    lose(made.folder / made.files("*.log")[number])
    made.open(machine_ran_on=True)
    for _ in range(4):
        try:
            served(made.log)
            break
        except DamagedRecords:
            assert made.log.damaged_ranges()
            repair(made.log, copy)
    else:
        pytest.fail("it is not repaired")
    assert contents(made.log) == expected
    assert contents(made.close_and_open()) == expected
    assert not made.log.damaged_ranges()


@pytest.mark.parametrize("content", [b"", b"0\n700\n12345678\n"], ids=["empty", "of a wrong checksum"])
@pytest.mark.parametrize("lose", [last_batch, everything, all_files])
def test_what_a_cleaned_segment_has_lost_is_damage_also_where_the_file_that_says_so_is_damaged(
    made: Logs, lose: Loss, content: bytes
) -> None:
    """The rest looked like the result of compaction, and readers passed over the records."""
    copy, expected = copy_of(made), contents(made.log)
    made.close()
    (made.folder / CLEANED_ENDS_FILE).write_bytes(content)
    assert contents(made.open()) == expected
    served(made.log)
    made.close()
    lose(made.folder / made.files("*.log")[-4])
    made.open()
    with pytest.raises(DamagedRecords):
        served(made.log)
    repair(made.log, copy)
    assert contents(made.log) == expected
    assert contents(made.close_and_open()) == expected


def cease(made: Logs) -> None:
    """The topic is not compacted any more, and a flush has put what explains its gaps on the device."""
    made.config = replace(made.config, cleanup_policy=frozenset({"delete"}))
    made.log.explain_gaps(made.log.log_end_offset, sync=False)
    made.log.set_config(made.config)
    made.log.flush()
    made.directory.write_checkpoints()
    assert (made.path / CLEANER_OFFSET_FILE).read_text() == "0\n0\n"


@pytest.mark.parametrize("is_cleaned", [True, False], ids=["cleaned", "never cleaned"])
@pytest.mark.parametrize("ending", ["after a clean stop", "after a kill"])
@pytest.mark.parametrize("number", [-4, -2])
@pytest.mark.parametrize("lose", [last_batch, everything, all_files])
def test_what_a_segment_has_lost_is_damage_where_the_topic_is_not_compacted_any_more(
    tmp_path: Path, lose: Loss, number: int, ending: str, is_cleaned: bool
) -> None:
    """Each sealed segment that was cut, empty or missing counted as explained, and readers passed over the records."""
    made = Logs(tmp_path / "logs", CONFIG)
    for each in range(90):
        made.append(keyed((f"k{each % 50}", f"{each}" * 10)))
    made.log.roll(NOW)
    if is_cleaned:
        clean(made.log)
    made.append(keyed(("k0", "last")))
    cease(made)
    copy, expected = copy_of(made), contents(made.log)
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
    lose(made.folder / made.files("*.log")[number])
    made.open(machine_ran_on=True)
    with pytest.raises(DamagedRecords):
        served(made.log)
    for _ in range(4):
        repair(made.log, copy)
    assert contents(made.log) == expected
    assert contents(made.close_and_open()) == expected
    served(made.log)
    assert not made.log.damaged_ranges()


@pytest.mark.parametrize("starts", [1, 2])
def test_the_early_ends_that_kafka_has_left_are_no_damage_where_the_topic_is_not_compacted_any_more(
    made: Logs, starts: int
) -> None:
    """Another segment has none then."""
    made.close()
    (made.folder / CLEANED_ENDS_FILE).unlink()
    last_batch(made.folder / made.files("*.log")[0])
    expected = contents(made.open())
    for key in range(30):
        made.append(keyed((f"k{key}", "later" * 10)))
    expected = contents(made.log)
    cease(made)
    for _ in range(starts):
        assert contents(made.close_and_open()) == expected
        served(made.log)
        assert not made.log.damaged_ranges()
    made.close()
    last_batch(made.folder / made.files("*.log")[-2])
    made.open()
    with pytest.raises(DamagedRecords):
        served(made.log)


def test_a_gap_at_the_end_of_a_segment_that_all_replicas_have_is_explained_for_that_segment_alone(
    tmp_path: Path,
) -> None:
    made = Logs(tmp_path / "logs", LogConfig(segment_bytes=1000))
    for _ in range(40):
        made.append(batch(2))
    made.close()
    first, _, third, *_ = made.files("*.log")
    last_batch(made.folder / third)
    log = made.open()
    with pytest.raises(DamagedRecords):
        served(log)
    ((segment, damage),) = log.damaged_ranges()
    log.accept_gap(segment, damage)
    for _ in range(2):
        expected = served(log)
        log = made.close_and_open()
        assert served(log) == expected
        assert not log.damaged_ranges()
    made.close()
    last_batch(made.folder / first)
    with pytest.raises(DamagedRecords):
        served(made.open())


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("place", ["between two batches", "at the end"])
def test_a_gap_is_accepted_without_space_to_note_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int
) -> None:
    """The log directory went offline. The next start asks the other replicas again."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, "simulated", "explained-gaps")

    made = Logs(tmp_path / "logs", LogConfig(segment_bytes=1000))
    for _ in range(40):
        made.append(batch(2))
    made.close()
    path = made.folder / made.files("*.log")[2]
    if place == "at the end":
        last_batch(path)
    else:
        positions = [position for position, _ in iter_headers(path.read_bytes())]
        path.write_bytes(path.read_bytes()[: positions[1]] + path.read_bytes()[positions[2] :])
    log = made.open()
    with pytest.raises(DamagedRecords):
        served(log)
    with monkeypatch.context() as patch:
        patch.setattr(explained_gaps, "replace_file", refuse)
        with pytest.raises(OSError, match="simulated") if code == errno.EIO else nullcontext():
            log.accept_gap(*log.damaged_ranges()[0])
    assert bool(log.damaged_ranges()) == (code == errno.EIO)


def test_a_segment_that_is_appended_to_after_a_truncation_ends_where_the_next_one_begins(tmp_path: Path) -> None:
    """It was one that ended early, and went on to count as one."""
    made = Logs(tmp_path / "logs", LogConfig(segment_bytes=1000))
    for _ in range(40):
        made.append(batch(2))
    made.close()
    third = made.files("*.log")[2]
    last_batch(made.folder / third)
    log = made.open()
    with pytest.raises(DamagedRecords):
        served(log)
    log.accept_gap(*log.damaged_ranges()[0])
    log.truncate_to(int(third.removesuffix(".log")) + 2)
    for _ in range(40):
        made.append(batch(2))
    assert not any(segment.may_end_early for segment in log.segments)


@pytest.mark.parametrize("number", [-4, -2])
def test_what_a_segment_has_lost_is_damage_where_the_policy_was_another_one_for_a_while(
    made: Logs, number: int
) -> None:
    """Then the gaps up to the end of the log are explained. A lost end of a segment was taken for one of them."""
    expected = contents(made.log)
    made.log.explain_gaps(made.log.log_end_offset)  # as where its topic ceases to be compacted
    assert contents(made.close_and_open()) == expected
    made.close()
    last_batch(made.folder / made.files("*.log")[number])
    made.open()
    with pytest.raises(DamagedRecords):
        served(made.log)


def test_a_segment_that_ends_behind_the_explained_gaps_does_not_end_early(made: Logs) -> None:
    """A gap before its end would reach up to the next segment, so it would have to be explained as well."""
    made.log.explain_gaps(made.log.log_end_offset)
    made.append(keyed(("k1", "later")))
    made.append(keyed(("k2", "later")))
    made.log.roll(NOW)
    made.append(keyed(("k3", "later")))
    expected = contents(made.log)
    assert contents(made.close_and_open()) == expected
    made.close()
    last_batch(made.folder / made.files("*.log")[-2])
    made.open()
    with pytest.raises(DamagedRecords):
        served(made.log)


def test_a_cleaned_log_that_lost_nothing_has_no_damage(made: Logs) -> None:
    expected = contents(made.log)
    for _ in range(2):
        log = made.close_and_open()
        served(log)
        assert not log.damaged_ranges()
        clean(log)
        assert contents(log)[-1] == expected[-1]


@pytest.mark.parametrize("is_cut", [False, True])
def test_ends_of_another_cleaning_say_nothing(made: Logs, is_cut: bool) -> None:
    """Kafka's cleaner may remove the last batch of a segment. A later truncation has them say no more."""
    made.close()
    path = made.path / CLEANER_OFFSET_FILE
    path.write_text(path.read_text().replace("t 0 90", "t 0 91"))
    last_batch(made.folder / made.files("*.log")[-3])
    log = made.open()
    if is_cut:
        log.truncate_to(log.segments[-2].base_offset + 1)
        log = made.close_and_open()
    served(log)
    assert not log.damaged_ranges()
    made.close()
    path.write_bytes(b"of a bad sector")
    served(made.open())
    assert not made.log.damaged_ranges()


def assert_whole_at_each_start(made: Logs) -> None:
    expected = contents(made.open())
    for _ in range(2):
        served(made.log)
        assert not made.log.damaged_ranges()
        assert contents(made.close_and_open()) == expected


def shortened_by_kafka(path: Path) -> None:
    """As its cleaner does it. The file gets the time of what it was made from, in milliseconds."""
    last_batch(path)
    os.utime(path, ns=((NOW + 1) * 1_000_000, (NOW + 1) * 1_000_000))


@pytest.mark.parametrize("is_cleaned_beyond", [False, True])
@pytest.mark.parametrize("checkpoint", ["of a cleaning before", "lost"])
def test_what_kafkas_cleaner_has_shortened_is_no_damage_where_no_checkpoint_says_so(
    made: Logs, checkpoint: str, is_cleaned_beyond: bool
) -> None:
    """Kafka was stopped during a cleaning, or its checkpoint is lost: the ends of our last cleaning seemed to count."""
    if is_cleaned_beyond:
        for key in range(30):
            made.append(keyed((f"k{key}", "later" * 10)))
    made.close()
    if checkpoint == "lost":
        (made.path / CLEANER_OFFSET_FILE).unlink()
    first, *_, third, second, _ = made.files("*.log")
    for each in (first, second):
        shortened_by_kafka(made.folder / each)
    cleaned_offset = INT64_MAX if checkpoint == "lost" else 90
    facts = LogFacts(is_clean=True, is_compacted=True, cleaned_offset=cleaned_offset)
    assert RECORDS not in {each.kind for each in StoppedLog(made.disk, str(made.folder), facts).verify()}
    assert_whole_at_each_start(made)
    made.close()
    last_batch(made.folder / third)
    os.utime(made.folder / third, (NOW // 1000, NOW // 1000))  # as an archive sets it that is unpacked
    with pytest.raises(DamagedRecords):
        served(made.open())


def test_no_log_ends_after_a_loss_of_power_where_kafkas_cleaner_has_shortened_a_segment(made: Logs) -> None:
    """What Kafka has cleaned is on the device. All behind it was cut off."""
    for key in range(30):
        made.append(keyed((f"k{key}", "later" * 10)))
    made.close()
    shortened_by_kafka(made.folder / made.files("*.log")[-2])
    expected = contents(made.open())
    made.close()
    (made.path / CLEAN_SHUTDOWN_FILE).unlink()
    (made.path / RECOVERY_POINT_FILE).write_text("0\n1\nt 0 0\n")
    assert contents(made.open()) == expected


@pytest.mark.parametrize("is_compacted_again", [False, True])
def test_an_end_that_all_replicas_lack_is_explained_where_the_log_was_cleaned_before(
    made: Logs, is_compacted_again: bool
) -> None:
    """Since then the topic has ceased to be compacted. What the cleaning left said more than what was accepted."""
    cease(made)
    made.close()
    last_batch(made.folder / made.files("*.log")[0])
    log = made.open()
    with pytest.raises(DamagedRecords):
        served(log)
    ((segment, damage),) = log.damaged_ranges()
    log.accept_gap(segment, damage)
    expected = served(log)
    for _ in range(2):
        log = made.close_and_open()
        assert served(log) == expected
        assert not log.damaged_ranges()
        if is_compacted_again:
            made.config = replace(made.config, cleanup_policy=frozenset({"compact"}))


@pytest.mark.parametrize("starts", [0, 1])
@pytest.mark.parametrize("why", ["it was killed before the checkpoint", "it was cut"])
def test_the_ends_of_a_cleaning_are_known_where_the_checkpoint_is_behind_it(made: Logs, why: str, starts: int) -> None:
    """The lost end of a segment counted as cleaned, until the log was cleaned again."""
    if why == "it was cut":
        made.log.truncate_to(made.log.segments[-2].base_offset + 1)
        made.close()
    else:
        made.kill()
        path = made.path / CLEANER_OFFSET_FILE
        path.write_text(path.read_text().replace("t 0 90", "t 0 80"))
    for _ in range(starts):
        served(made.open(machine_ran_on=True))
        assert not made.log.damaged_ranges()
        made.close()
    last_batch(made.folder / made.files("*.log")[-3])
    with pytest.raises(DamagedRecords):
        served(made.open(machine_ran_on=True))


def test_a_segment_that_ended_early_is_cleaned_up_to_the_next_one_after_a_scan(made: Logs) -> None:
    """The scan took its end for that of its last batch. After the cleaning a reader behind that was refused."""
    made.close()
    (made.folder / CLEANED_ENDS_FILE).unlink()
    (made.path / CLEAN_SHUTDOWN_FILE).unlink()
    (made.path / RECOVERY_POINT_FILE).write_text("0\n1\nt 0 0\n")
    for each in made.files("*.log")[:-1]:
        last_batch(made.folder / each)
    log = made.open(machine_ran_on=True)
    expected = contents(log)
    log.roll(NOW)
    clean(log)
    for _ in range(2):
        served(log)
        assert contents(log)[-1] == expected[-1]
        assert not log.damaged_ranges()
        log = made.close_and_open()


@pytest.mark.parametrize("content", [None, b"of a bad sector"])
def test_segments_that_kafka_has_shortened_are_no_damage_where_the_cleaners_checkpoint_is_lost(
    made: Logs, content: bytes | None
) -> None:
    """The second start took the log for one that was never cleaned; the first one did where the file was there."""
    made.close()
    (made.folder / CLEANED_ENDS_FILE).unlink()
    names = made.files("*.log")
    last_batch(made.folder / names[0])
    (made.path / CLEANER_OFFSET_FILE).unlink()
    if content is not None:
        (made.path / CLEANER_OFFSET_FILE).write_bytes(content)
    assert_whole_at_each_start(made)
    made.close()
    last_batch(made.folder / names[1])
    with pytest.raises(DamagedRecords):
        served(made.open())


def test_epochs_of_deleted_records_do_not_contradict_the_epoch_file(tmp_path: Path) -> None:
    """An examination took an epoch out of the file whose first batches Kafka's cleaner had removed from a segment with
    the log start. The batches of that epoch in the next segments counted as damaged.
    """
    made = Logs(tmp_path / "logs", CONFIG)
    for number in range(60):
        made.append(keyed((f"k{number}", f"{number}" * 10)), epoch=sum(number >= each for each in (5, 10, 13)))
    _, second, *_, last = (int(name[:20]) for name in made.files("*.log"))
    begin_of_epoch = 10
    assert second == 12
    made.log.delete_records(begin_of_epoch - 1)
    made.close()
    (made.path / CLEANER_OFFSET_FILE).write_text(f"0\n1\nt 0 {last}\n")
    first = made.folder / made.files("*.log")[0]
    data = first.read_bytes()
    first.write_bytes(data[: next(at for at, each in iter_headers(data) if each.base_offset == begin_of_epoch)])
    log = made.open()
    log.segments.first.findings = log.segments.first.examine()  # as where an index is damaged
    log.adopt_findings(log.segments.first)
    assert not log.damaged_ranges()
    assert [offset for offset, _, _ in contents(log)] == [begin_of_epoch - 1, *range(second, 60)]
    assert not log.damaged_ranges()


def test_a_segment_that_ended_early_before_stays_so(made: Logs) -> None:
    """Of a log that Kafka has cleaned, or that lost records before the ends were known."""
    made.close()
    (made.folder / CLEANED_ENDS_FILE).unlink()
    names = made.files("*.log")
    last_batch(made.folder / names[1])
    log = made.open()
    log.roll(NOW)
    clean(log)
    log = made.close_and_open()
    served(log)
    assert not log.damaged_ranges()


def test_a_missing_checkpoint_of_the_cleaner_explains_no_gap_in_a_log_that_is_not_compacted(tmp_path: Path) -> None:
    made = Logs(tmp_path / "logs", LogConfig(segment_bytes=1000))
    for _ in range(40):
        made.append(batch(2))
    copy, count = copy_of(made), len(records_of(made.log))
    made.close()
    names = made.files("*.log")
    assert len(names) >= 4
    all_files(made.folder / names[1])
    (made.path / CLEANER_OFFSET_FILE).unlink()
    log = made.open()
    with pytest.raises(DamagedRecords):
        served(log)
    repair(log, copy)
    assert len(records_of(made.close_and_open())) == count


@pytest.mark.parametrize("ending", ["after a clean stop", "after a kill"])
@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "cleaned"])
def test_gaps_of_a_topic_that_became_another_meanwhile_are_no_damage(
    tmp_path: Path, is_copied: bool, ending: str
) -> None:
    """Where the node was down. What is missing behind them later is damage, as in each log that is not compacted."""
    made = copied_with_gaps(tmp_path / "logs", 20)
    made.log.roll(NOW)
    if not is_copied:
        clean(made.log)
    made.directory.write_checkpoints()
    made.config = replace(CONFIG, cleanup_policy=frozenset({"delete"}))
    if ending == "after a clean stop":
        made.close()
    else:
        made.kill()
    log = made.open(machine_ran_on=True)
    assert len(served(log)) == 20
    assert not log.damaged_ranges()
    for _ in range(40):
        made.append(batch(2))
    made.close()
    assert (made.path / CLEANER_OFFSET_FILE).read_text() == "0\n0\n"
    all_files(made.folder / made.files("*.log")[-2])
    with pytest.raises(DamagedRecords):
        served(made.open())


@pytest.mark.parametrize("ending", ["after a kill", "after a loss of power"])
def test_what_is_lost_after_a_topic_has_ceased_to_be_compacted_is_damage(tmp_path: Path, ending: str) -> None:
    """Also without a clean stop since: a flush has put what explains the gaps on the device."""
    made = Logs(tmp_path / "logs", CONFIG)
    for _ in range(20):
        made.append(batch(key=b"key", value=b"." * 100))
    made.config = replace(CONFIG, cleanup_policy=frozenset({"delete"}))
    made.log.set_config(made.config)
    made.log.explain_gaps(made.log.log_end_offset, sync=False)
    made.directory.write_checkpoints()
    assert "t 0" in (made.path / CLEANER_OFFSET_FILE).read_text()
    task = made.log.begin_flush()
    made.append(batch(key=b"key"))
    made.log.explain_gaps(made.log.log_end_offset, sync=False)  # not in the flush
    task.run()
    made.log.finish_flush(task)
    assert made.log.unsynced_gaps_below
    for _ in range(60):
        made.append(batch(key=b"key", value=b"." * 100))
    made.log.flush()
    made.directory.write_checkpoints()
    assert (made.path / CLEANER_OFFSET_FILE).read_text() == "0\n0\n"
    made.kill()
    all_files(made.folder / made.files("*.log")[-3])
    with pytest.raises(DamagedRecords):
        served(made.open(machine_ran_on=ending == "after a kill"))


def test_a_missing_checkpoint_of_the_cleaner_leaves_a_compacted_log_as_it_is(made: Logs) -> None:
    """The ends of its segments are still known."""
    expected = contents(made.log)
    made.close()
    (made.path / CLEANER_OFFSET_FILE).unlink()
    log = made.open()
    assert contents(log) == expected
    assert not log.damaged_ranges()


@pytest.mark.parametrize("lose", [last_batch, all_files])
@pytest.mark.parametrize("ceases", [True, False])
def test_a_verification_of_a_stopped_node_names_what_a_log_that_was_never_cleaned_has_lost(
    tmp_path: Path, lose: Loss, ceases: bool
) -> None:
    """Its gaps come from its leader. They are no damage, also where the topic is not compacted any more."""
    made = copied_with_gaps(tmp_path / "logs", 30)
    if ceases:
        cease(made)
    made.close()
    facts = LogFacts(is_clean=True, is_compacted=not ceases, cleaned_offset=-1 if ceases else 0)
    whole = StoppedLog(made.disk, str(made.folder), facts)
    assert not list(whole.verify())
    lose(made.folder / made.files("*.log")[-2])
    damaged = StoppedLog(made.disk, str(made.folder), facts)
    assert RECORDS in {problem.kind for problem in damaged.verify()}


@pytest.mark.parametrize("lose", [last_batch, all_files])
def test_a_verification_of_a_stopped_node_names_the_loss(made: Logs, lose: Loss) -> None:
    made.close()
    facts = LogFacts(is_clean=True, is_compacted=True, cleaned_offset=90)
    whole = StoppedLog(made.disk, str(made.folder), facts)
    assert not list(whole.verify())
    lose(made.folder / made.files("*.log")[-2])
    damaged = StoppedLog(made.disk, str(made.folder), facts)
    assert RECORDS in {problem.kind for problem in damaged.verify()}


ENDINGS = ["after a clean stop", "after a kill", "after a loss of power"]


@pytest.mark.parametrize("next_ending", ENDINGS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_log_cut_behind_a_segment_that_kafka_has_cleaned_ends_there_at_each_start(
    made: Logs, ending: str, next_ending: str
) -> None:
    """The segment ends before the next one begins, and nothing is missing: the start missed what lies between.

    Only the empty segment says so. Taken by a start, it was missed by the next one.
    """
    made.close()
    (made.folder / CLEANED_ENDS_FILE).unlink()
    *_, cleaned, active = made.files("*.log")
    last_batch(made.folder / cleaned)
    log = made.open()
    offset = int(active.removesuffix(".log"))
    log.truncate_to(offset)
    assert log.log_end_offset == offset
    log.set_high_watermark(offset)
    made.directory.write_checkpoints()
    for each in (ending, next_ending):
        if each == "after a clean stop":
            made.close()
        else:
            made.kill()
        log = made.open(machine_ran_on=each == "after a kill")
        assert not made.directory.shortened_logs
        assert not log.damaged_ranges()
        assert log.log_end_offset == offset
    assert [info.first_offset for info in made.append(keyed(("k1", "next")))] == [offset]


def test_what_a_loss_of_power_took_behind_a_segment_that_kafka_has_cleaned_is_no_gap(made: Logs) -> None:
    """Records were appended to the segment after a truncation. A torn end is where the log ends."""
    made.close()
    (made.folder / CLEANED_ENDS_FILE).unlink()
    *_, cleaned, _ = made.files("*.log")
    log = made.open()
    log.truncate_to([header.base_offset for _, header in iter_headers((made.folder / cleaned).read_bytes())][2])
    log.set_high_watermark(log.log_end_offset)
    made.directory.write_checkpoints()
    while log.segments.active.base_offset == int(cleaned.removesuffix(".log")):
        last = made.append(keyed(("k1", "next" * 10)))[0].first_offset - 1
    made.kill()
    last_batch(made.folder / cleaned)
    assert made.open().log_end_offset == last
    assert not made.log.damaged_ranges()


def cleaned_by_kafka(path: Path, disk: Mortal) -> Logs:
    """Six segments that become one. Kafka's cleaner has removed the last batch of the last of them."""
    made = Logs(path, replace(CONFIG, segment_bytes=100_000), disk)
    for number in range(6):
        made.append(keyed((f"{number}", "1"), ("a", "1")), keyed(("a", f"{number}")), keyed(("a", f"{number}")))
        made.log.roll(NOW)
    made.append(keyed(("z", "1")))
    made.log.cleaned_offset = made.log.segments.active.base_offset
    made.close()
    last_batch(made.folder / made.files("*.log")[5])
    made.open()
    assert made.log.segments[5].may_end_early
    made.log.cleaned_offset = 0
    return made


@pytest.mark.parametrize("ends_at", range(0, 30, 3))
@pytest.mark.parametrize("loses", [False, True])
def test_a_kill_in_the_swap_of_what_kafka_has_cleaned_leaves_no_damage(
    tmp_path: Path, ends_at: int, loses: bool
) -> None:
    """The end of the new segment was none that a start knew, so the replaced segments stayed beside it. `loses`: the
    machine lost power, and of the renames that were not synced each second one."""
    disk = Mortal(10**6)
    made = cleaned_by_kafka(tmp_path, disk)
    expected = {key: value for _, key, value in contents(made.log)}
    cleaning = begin(made.log)
    while not cleaning._ready:
        cleaning.run()
        assert cleaning._ready or cleaning.advance()
    disk.ends_at, disk.is_counting, disk.unsynced = ends_at, True, []
    with suppress(Killed):
        while cleaning.advance():
            cleaning.run()
    made.kill()
    disk.is_counting, disk.ends_at = False, 10**6
    for source, target in reversed(disk.unsynced[::2] if loses else ()):
        Path(target).rename(source)
    log = made.open(machine_ran_on=True)
    assert log.damaged_ranges() == []
    assert {key: value for _, key, value in contents(log)} == expected
    assert made.files("*.swap") == made.files("*.cleaned") == []


@pytest.mark.parametrize("wrong", [16, 18])
def test_a_base_offset_that_is_too_low_says_nothing_against_the_batch_before_it(tmp_path: Path, wrong: int) -> None:
    """That one begins where it must. It counted as damaged, and the records of the wrong one had its offsets."""
    made = Logs(tmp_path / "logs", CONFIG)
    for _ in range(4):
        made.append(batch(10, key=b"key"))
    made.close()
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    position = next(position for position, header in iter_headers(data) if header.base_offset == 20)
    data[position + 7] = wrong
    path.write_bytes(data)
    (damage,) = (each for segment in made.open().segments for each in segment.examine().damage)
    assert (damage.first_offset, damage.end_offset, damage.position) == (20, 30, position)


@pytest.mark.parametrize("wrong", [5, 10, 13])
def test_a_base_offset_that_is_too_low_behind_a_gap_leaves_neither_batch(tmp_path: Path, wrong: int) -> None:
    """Only the right one before it counted as damaged. The records of the wrong one had the offsets of others, and no
    copy of another replica could be put in the place of the damage.
    """
    made = Logs(tmp_path / "logs", CONFIG)
    for base_offset in (0, 10, 40, 60):
        fetched = batch(5, key=b"key", base_offset=base_offset, leader_epoch=0)
        made.log.append_as_follower(fetched, NOW)
    made.log.set_high_watermark(made.log.log_end_offset)
    copy, expected = copy_of(made), contents(made.log)
    made.close()
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    positions = {header.base_offset: position for position, header in iter_headers(data)}
    data[positions[40] + 7] = wrong
    path.write_bytes(data)
    made.open()
    (damage,) = (each for segment in made.log.segments for each in segment.examine().damage)
    assert (damage.first_offset, damage.end_offset, damage.position) == (5, 60, positions[10])
    with pytest.raises(DamagedRecords):
        served(made.log)
    repair(made.log, copy)
    assert contents(made.log) == expected


def test_a_base_offset_that_is_too_high_leaves_the_batch_behind_it(tmp_path: Path) -> None:
    made = Logs(tmp_path / "logs", CONFIG)
    for _ in range(4):
        made.append(batch(10, key=b"key"))
    made.close()
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    position = next(position for position, header in iter_headers(data) if header.base_offset == 20)
    data[position + 7] = 24
    path.write_bytes(data)
    (damage,) = (each for segment in made.open().segments for each in segment.examine().damage)
    assert (damage.first_offset, damage.end_offset, damage.position) == (20, 30, position)


def test_a_log_of_a_directory_whose_formatting_was_interrupted_does_not_count_as_cleaned(tmp_path: Path) -> None:
    """Where there was no cleaner's checkpoint yet, the lost end of a segment was taken for cleaned: a hole was left."""
    path = tmp_path / "logs"
    formatted = LogDirectory.open(QuickDisk(), str(path), node_id=1, cluster_id="cluster")
    formatted._lock.release()
    (path / CLEANER_OFFSET_FILE).unlink()
    made = Logs(path, CONFIG)
    for number in range(40):
        made.append(keyed((f"k{number}", f"{number}" * 10)))
    made.kill()
    first, second, *_ = sorted(made.folder.glob("*.log"))
    end_offset = list(iter_headers(first.read_bytes()))[-1][1].base_offset
    last_batch(first)
    log = made.open()
    assert (log.log_end_offset, second.exists()) == (end_offset, False)
    assert [offset for offset, _, _ in contents(log)] == list(range(end_offset))
