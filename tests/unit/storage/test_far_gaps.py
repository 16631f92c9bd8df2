"""Gaps between offsets that are too far apart for one index: a segment beside such a gap is lost or cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.unit.storage.batches import NOW, TOPIC_ID, Logs, batch, offsets_of, read, records_of
from tests.unit.storage.cleaning import clean
from tests.unit.storage.test_damage import copy_of, repair_range
from tests.unit.storage.test_prefix_copy import copy_prefix
from tidelog.protocol.batches.record_batch import LEADER_EPOCH_OFFSET, BatchHeader, iter_headers
from tidelog.storage.files.checkpoints import EXPLAINED_GAPS_FILE, ExplainedGaps, encode_explained_gaps
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.explained_gaps import is_beyond_index
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.log.repair import CopyRefused
from tidelog.storage.log.scrub import Scrub
from tidelog.storage.log.verification import LogFacts, StoppedLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.segment import Segment

MakeLogs = Callable[..., Logs]

COMPACTED = frozenset({"compact"})
FAR = 2**31 + 50


def follow(log: PartitionLog, *offsets: int) -> None:
    for offset in offsets:
        log.append_as_follower(batch(1, base_offset=offset, leader_epoch=0, key=b"%d" % offset), NOW)


def with_far_gap(made: Logs, *, is_cleaned: bool, batches: int = 1) -> None:
    """Segments of the offsets 0 and 1, 2 and 3 in so many batches, those behind the gap, and two behind them."""
    made.append(batch(2, key=b"a"))
    made.log.roll(NOW)
    made.append(*(batch(2 // batches, key=b"b") for _ in range(batches)))
    follow(made.log, FAR, FAR + 1)
    made.log.roll(NOW)
    follow(made.log, FAR + 2, FAR + 3)
    made.log.roll(NOW)
    follow(made.log, FAR + 4)
    made.log.set_high_watermark(made.log.log_end_offset)
    if is_cleaned:
        made.directory.enter_in_cleaner_checkpoint(made.log)


def as_earlier_versions_wrote_it(made: Logs) -> None:
    """The last segment with records before the gap ended early: no empty one held the gap."""
    for path in made.folder.glob(f"{4:020d}.*"):
        path.unlink()
    content = encode_explained_gaps(ExplainedGaps(0, frozenset({(2, FAR)})))
    (made.folder / EXPLAINED_GAPS_FILE).write_bytes(content)


@pytest.mark.parametrize("lost", [2, FAR])
@pytest.mark.parametrize("ending", ["clean stop", "kill", "loss of power"])
@pytest.mark.parametrize("is_cleaned", [False, True])
@pytest.mark.parametrize("is_of_earlier", [False, True])
def test_a_lost_segment_beside_the_gap_is_damage_in_a_compacted_topic(
    logs: MakeLogs, is_cleaned: bool, ending: str, lost: int, is_of_earlier: bool
) -> None:
    """A reader passed over its records, without an error: before the gap a segment may end at any offset."""
    made = logs(cleanup_policy=COMPACTED)
    with_far_gap(made, is_cleaned=is_cleaned)
    made.log.flush()
    made.directory.write_checkpoints()
    (made.close if ending == "clean stop" else made.kill)()
    if is_of_earlier:
        as_earlier_versions_wrote_it(made)
    (made.folder / f"{lost:020d}.log").unlink()
    facts = LogFacts(is_clean=ending == "clean stop", is_compacted=True, cleaned_offset=0)
    assert list(StoppedLog(made.disk, str(made.folder), facts).verify())
    made.open(machine_ran_on=ending == "kill")
    with pytest.raises(DamagedRecords):
        read(made.log, lost, 100, made.log.log_end_offset)
    expected = (4, FAR + 2) if lost == FAR else (2, FAR) if is_of_earlier else (2, 4)
    assert [(each.first_offset, each.end_offset) for _, each in made.log.damaged_ranges()] == [expected]


@pytest.mark.parametrize("ending", ["clean stop", "kill", "loss of power"])
@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("state", ["not compacted", "compacted", "cleaned"])
def test_a_segment_before_the_gap_that_is_cut_between_two_batches_or_emptied_is_damage(
    logs: MakeLogs, state: str, kept: int, ending: str
) -> None:
    """Readers passed over its records, without an error: before the gap a segment could end at any offset."""
    made = logs(cleanup_policy=frozenset({"delete"}) if state == "not compacted" else COMPACTED)
    if state == "not compacted":
        made.log.explain_gaps(2 * FAR)
    with_far_gap(made, is_cleaned=state == "cleaned", batches=2)
    made.log.flush()
    made.directory.write_checkpoints()
    copy = copy_of(made)
    (made.close if ending == "clean stop" else made.kill)()
    cut_between_batches(made, 2, kept)
    cleaned_offset = -1 if state == "not compacted" else 0
    facts = LogFacts(ending == "clean stop", is_compacted=cleaned_offset == 0, cleaned_offset=cleaned_offset)
    assert list(StoppedLog(made.disk, str(made.folder), facts).verify())
    log = made.open(machine_ran_on=ending == "kill")
    with pytest.raises(DamagedRecords):
        read(log, 2 + kept, 100, log.log_end_offset)
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(2 + kept, 4)]
    repair_range(log, *log.damaged_ranges()[0], copy)
    for _ in range(2):
        assert offsets_of(records_of(made.log)) == [0, 1, 2, 3, *range(FAR, FAR + 5)]
        assert not made.log.damaged_ranges()
        made.close_and_open()


@pytest.mark.parametrize("has_epochs", [True, False])
@pytest.mark.parametrize("ending", ["clean stop", "kill"])
@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_wrong_leader_epoch_of_the_last_batch_before_the_gap_is_damage(
    logs: MakeLogs, is_compacted: bool, ending: str, has_epochs: bool
) -> None:
    """No CRC covers it. The batch behind it is in the segment after the next one, because an empty one holds the gap.

    The log had the wrong epoch as its latest one.
    """
    made = logs(cleanup_policy=COMPACTED if is_compacted else frozenset({"delete"}))
    if not is_compacted:
        made.log.explain_gaps(2 * FAR)
    with_far_gap(made, is_cleaned=False, batches=2)
    made.log.flush()
    copy = copy_of(made)
    (made.close if ending == "clean stop" else made.kill)()
    path = made.folder / f"{2:020d}.log"
    path.write_bytes(with_epoch(path.read_bytes(), 1, 7))
    if not has_epochs:
        (made.folder / "leader-epoch-checkpoint").unlink()
    log = made.open(machine_ran_on=True)
    for segment in list(log.segments):
        scrub(log, segment)
    assert list(log.leader_epochs) == [(0, 0)]
    ((segment, damage),) = log.damaged_ranges()
    assert (damage.first_offset, damage.end_offset) == (3, 4)
    repair = log.repair_of(segment, damage)
    repair.is_committed = True
    with pytest.raises(CopyRefused):
        repair.accept(memoryview(with_epoch(copy[3], 0, 8)))
    repair_range(log, segment, damage, copy)
    assert offsets_of(records_of(log)) == [0, 1, 2, 3, *range(FAR, FAR + 5)]
    assert not log.damaged_ranges()


@pytest.mark.parametrize("has_epochs", [True, False])
def test_a_start_after_a_kill_compares_the_leader_epoch_of_the_last_batch_before_the_gap(
    logs: MakeLogs, has_epochs: bool
) -> None:
    """The next segment is empty. The start compared with nothing: the wrong epoch was the log's latest one."""
    made = logs(cleanup_policy=COMPACTED)
    with_far_gap(made, is_cleaned=False, batches=2)
    made.kill()
    path = made.folder / f"{2:020d}.log"
    path.write_bytes(with_epoch(path.read_bytes(), 1, 7))
    if not has_epochs:
        (made.folder / "leader-epoch-checkpoint").unlink(missing_ok=True)
    log = made.open(machine_ran_on=True)
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(3, 4)]
    assert list(log.leader_epochs) == [(0, 0)]


def with_epoch(data: bytes, number: int, leader_epoch: int) -> bytes:
    """The batches, of which the one with this number has another leader epoch."""
    at = [position for position, _ in iter_headers(data)][number] + LEADER_EPOCH_OFFSET
    return data[:at] + leader_epoch.to_bytes(4, "big") + data[at + 4 :]


def scrub(log: PartitionLog, segment: Segment) -> None:
    work = Scrub(log, segment)
    while not work.is_done:
        work.run(10**6)
    work.finish()


def cut_between_batches(made: Logs, base_offset: int, count: int) -> None:
    path = made.folder / f"{base_offset:020d}.log"
    data = path.read_bytes()
    path.write_bytes(data[: [*(position for position, _ in iter_headers(data)), len(data)][count]])


@pytest.mark.parametrize("ending", ["clean stop", "kill"])
def test_a_segment_that_is_cut_before_a_gap_that_all_replicas_have_is_damage(logs: MakeLogs, ending: str) -> None:
    """The gap was explained for the segment, and readers passed over the records that it lost later."""
    made = logs()
    follow(made.log, 0, 1)
    made.log.roll(NOW)
    follow(made.log, 2, 3)
    made.log.roll(NOW)
    follow(made.log, 4)
    made.log.set_high_watermark(5)
    made.close()
    cut_between_batches(made, 2, 1)
    log = made.open()
    with pytest.raises(DamagedRecords):
        read(log, 3, 100, 5)
    log.accept_gap(*log.damaged_ranges()[0])
    for _ in range(2):
        assert offsets_of(records_of(made.log)) == [0, 1, 2, 4]
        (made.close if ending == "clean stop" else made.kill)()
        made.open(machine_ran_on=True)
        assert not made.log.damaged_ranges()
    made.log.set_high_watermark(5)
    (made.close if ending == "clean stop" else made.kill)()
    cut_between_batches(made, 2, 0)
    log = made.open(machine_ran_on=True)
    with pytest.raises(DamagedRecords):
        read(log, 2, 100, 5)
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(2, 3)]


@pytest.mark.parametrize("is_cleaned", [False, True])
@pytest.mark.parametrize("ending", ["clean stop", "kill", "loss of power"])
@pytest.mark.parametrize("emptied", [0, 1])
def test_a_whole_segment_that_all_replicas_lack_is_none_after_a_start(
    logs: MakeLogs, emptied: int, ending: str, is_cleaned: bool
) -> None:
    """Only a name held it. No start believed that beside `cleaned-ends`, and one after a loss of power cut the log."""
    made = logs(cleanup_policy=COMPACTED, segment_bytes=100)
    follow(made.log, 0, 1, 2)
    made.log.set_high_watermark(3)
    if is_cleaned:
        made.directory.enter_in_cleaner_checkpoint(made.log)
        clean(made.log)
    made.close()
    cut_between_batches(made, emptied, 0)
    log = made.open()
    with pytest.raises(DamagedRecords):
        read(log, emptied, 100, 3)
    log.accept_gap(*log.damaged_ranges()[0])
    for _ in range(3):
        assert offsets_of(records_of(log)) == [each for each in range(3) if each != emptied]
        for segment in list(log.segments):
            scrub(log, segment)
        assert not log.damaged_ranges()
        (made.close if ending == "clean stop" else made.kill)()
        log = made.open(machine_ran_on=ending == "kill")


@pytest.mark.parametrize("ending", ["clean stop", "kill"])
def test_a_gap_in_which_a_leader_epoch_begins_is_none_after_a_start(logs: MakeLogs, ending: str) -> None:
    """The batch that held it was of the later epoch, began before that, and counted as damaged at once."""
    made = logs()
    follow(made.log, 0, 1, 2)
    for offset in (3, 4):
        made.log.append_as_follower(batch(1, base_offset=offset, leader_epoch=1), NOW)
        if offset == 3:
            made.log.roll(NOW)
    made.log.set_high_watermark(5)
    made.close()
    cut_between_batches(made, 0, 2)
    log = made.open()
    with pytest.raises(DamagedRecords):
        read(log, 2, 100, 5)
    log.accept_gap(*log.damaged_ranges()[0])
    for _ in range(3):
        assert offsets_of(records_of(log)) == [0, 1, 4]
        for segment in list(log.segments):
            scrub(log, segment)
        assert not log.damaged_ranges()
        (made.close if ending == "clean stop" else made.kill)()
        log = made.open(machine_ran_on=True)


@pytest.mark.parametrize("ending", ["clean stop", "kill"])
def test_a_whole_segment_in_which_a_leader_epoch_begins_and_that_all_replicas_lack_is_none_after_a_start(
    logs: MakeLogs, ending: str
) -> None:
    """No batch can hold it. Its name does, beside the index files of an empty segment."""
    made = logs()
    for offset, epoch in enumerate((0, 0, 0, 1, 1, 1)):
        made.log.append_as_follower(batch(1, base_offset=offset, leader_epoch=epoch), NOW)
        if offset % 2:
            made.log.roll(NOW)
    made.log.set_high_watermark(6)
    made.close()
    for path in made.folder.glob(f"{2:020d}.*index"):
        path.unlink()
    cut_between_batches(made, 2, 0)
    log = made.open()
    with pytest.raises(DamagedRecords):
        read(log, 2, 100, 6)
    ((segment, damage),) = log.damaged_ranges()
    assert (segment.base_offset, damage.first_offset, damage.end_offset) == (2, 2, 4)
    log.accept_gap(segment, damage)
    assert segment.may_end_early
    for _ in range(3):
        assert offsets_of(records_of(log)) == [0, 1, 4, 5]
        for each in list(log.segments):
            scrub(log, each)
        assert not log.damaged_ranges()
        (made.close if ending == "clean stop" else made.kill)()
        log = made.open(machine_ran_on=True)


def last_header(made: Logs, base_offset: int) -> BatchHeader:
    return list(iter_headers((made.folder / f"{base_offset:020d}.log").read_bytes()))[-1][1]


def test_a_cleaned_segment_ends_where_it_did_before_kafka_removed_its_last_batch(logs: MakeLogs) -> None:
    """In a batch without records, of the leader epoch that began in what is removed."""
    made = logs(cleanup_policy=COMPACTED)
    for epoch, offset in enumerate((0, 1)):
        made.log.append_as_follower(batch(1, base_offset=offset, leader_epoch=epoch, key=b"%d" % offset), NOW)
    made.log.roll(NOW)
    made.log.append_as_follower(batch(1, base_offset=2, leader_epoch=1, key=b"1"), NOW)
    made.log.set_high_watermark(3)
    made.directory.enter_in_cleaner_checkpoint(made.log)
    made.log.flush()
    made.close()
    cut_between_batches(made, 0, 1)
    (made.folder / EXPLAINED_GAPS_FILE).write_bytes(encode_explained_gaps(ExplainedGaps(0, frozenset({(0, 2)}))))
    log = made.open()
    assert not log.damaged_ranges()
    clean(log)
    last = last_header(made, 0)
    assert (last.next_offset, last.record_count, last.partition_leader_epoch) == (2, 0, 1)


def test_a_cleaned_segment_before_a_far_gap_ends_where_its_last_batch_did(logs: MakeLogs) -> None:
    """The cleaner has removed that, and no batch can reach the next segment."""
    made = logs(cleanup_policy=COMPACTED)
    with_far_gap(made, is_cleaned=False, batches=2)
    made.log.append_as_follower(batch(1, base_offset=FAR + 5, leader_epoch=0, key=b"b"), NOW)
    made.log.set_high_watermark(made.log.log_end_offset)
    made.close()
    for path in (*made.folder.glob(f"{4:020d}.*"), made.folder / EXPLAINED_GAPS_FILE):
        path.unlink()
    log = made.open()
    made.directory.enter_in_cleaner_checkpoint(log)
    log.roll(NOW)
    clean(log)
    bases = [each.base_offset for each in log.segments if each.base_offset < FAR]
    last = last_header(made, bases[-1])
    assert (last.next_offset, last.record_count) == (4, 0)


@pytest.mark.parametrize("ending", ["clean stop", "kill"])
def test_a_lost_segment_before_the_gap_that_is_repaired_stays_so(logs: MakeLogs, ending: str) -> None:
    """It becomes a part of the segment before. `explained-gaps` named it still, as missing, to each later start."""
    made = logs(cleanup_policy=COMPACTED)
    with_far_gap(made, is_cleaned=True)
    copy = copy_of(made)
    made.close()
    (made.folder / f"{2:020d}.log").unlink()
    log = made.open()
    with pytest.raises(DamagedRecords):
        read(log, 2, 100, log.log_end_offset)
    repair_range(log, *log.damaged_ranges()[0], copy)
    for _ in range(3):
        assert offsets_of(records_of(made.log)) == [0, 1, 2, 3, *range(FAR, FAR + 5)]
        assert not made.log.damaged_ranges()
        (made.close if ending == "clean stop" else made.kill)()
        made.open(machine_ran_on=True)


@pytest.mark.parametrize("has_later_gap", [False, True])
def test_a_loss_of_power_behind_a_cleaning_takes_no_record_behind_the_gap_that_superseded_another(
    has_later_gap: bool,
) -> None:
    """The file that names the gap was not on the device, and the log was cut before it."""
    config = LogConfig(cleanup_policy=COMPACTED)
    for seed in range(20):
        disk = SimulatedDisk(Random(seed))
        disk.make_directory("/data")
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="c")
        directory.load(lambda topic: config, NOW)
        log = directory.create_log("t", 0, TOPIC_ID, config, NOW)
        log.flush()
        for offset in (0, FAR):
            log.append_as_follower(batch(1, base_offset=offset, leader_epoch=0, key=b"k"), NOW)
        if has_later_gap:
            log.explain_gaps(FAR + 1, sync=False)
        log.roll(NOW)
        follow(log, FAR + 1)
        log.set_high_watermark(log.log_end_offset)
        directory.enter_in_cleaner_checkpoint(log)
        clean(log)
        assert offsets_of(records_of(log)) == [FAR, FAR + 1]
        disk.lose_power()
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="c")
        directory.load(lambda topic: config, NOW)
        log = directory.logs["t", 0]
        assert not log.damaged_ranges(), seed
        assert offsets_of(records_of(log))[:1] == [FAR], seed


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("kept", [2, 4])
def test_a_kill_before_another_far_gap_leaves_no_damage(is_compacted: bool, kept: int) -> None:
    """`explained-gaps` may name segments that were truncated since."""
    config = LogConfig(cleanup_policy=COMPACTED if is_compacted else frozenset({"delete"}))
    for step in range(1, 30):
        disk = SimulatedDisk(Random(step))
        disk.make_directory("/data")
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="c")
        directory.load(lambda topic: config, NOW)
        log = directory.create_log("t", 0, TOPIC_ID, config, NOW)
        log.explain_gaps(3 * FAR)
        follow(log, 0, 1)
        log.roll(NOW)
        follow(log, 2, 3, FAR)
        log.truncate_to(kept)
        disk.fail_after(step)
        with_gap = False
        try:
            if not is_compacted:
                log.explain_gaps(3 * FAR)
            follow(log, 2 * FAR)
            with_gap = True
        except PowerLoss:
            pass
        disk.end_process()
        directory = LogDirectory.open(disk, "/data", node_id=1, cluster_id="c")
        directory.ending = Ending.KILLED
        directory.load(lambda topic: config, NOW)
        log = directory.logs["t", 0]
        assert not log.damaged_ranges(), step
        assert offsets_of(records_of(log)) == [*range(kept), *([2 * FAR] if with_gap else [])]
        if with_gap:
            return
    pytest.fail("the batch was never written")


FARTHER = 2**32 + 100


@pytest.mark.parametrize("pieces", range(7))
@pytest.mark.parametrize("is_of_earlier", [False, True])
def test_a_kill_during_the_copy_of_a_log_with_gaps_leaves_no_mixture_of_two_cleanings(
    tmp_path: Path, is_of_earlier: bool, pieces: int
) -> None:
    """The new segment that holds a gap is empty: a start took it for damaged, and kept the old ones from there on, or
    for one of a finished swap. A deleted key was back for good.
    """
    config = LogConfig(cleanup_policy=COMPACTED)
    here, other = Logs(tmp_path / "here", config), Logs(tmp_path / "other", config)
    follow(other.log, 0, 1)
    other.log.append_as_follower(batch(1, base_offset=FAR, leader_epoch=0, key=b"0", value=None), NOW)
    follow(here.log, 1)
    for made in (here, other):
        follow(made.log, FARTHER)
        made.log.roll(NOW)
        follow(made.log, FARTHER + 1)
        made.log.set_high_watermark(FARTHER + 2)
    if is_of_earlier:
        here.close()
        for path in here.folder.glob(f"{2:020d}.*"):
            path.unlink()
        content = encode_explained_gaps(ExplainedGaps(0, frozenset({(0, FARTHER)})))
        (here.folder / EXPLAINED_GAPS_FILE).write_bytes(content)
        here.open()
    here.log.flush()
    here.directory.write_checkpoints()
    old, new = offsets_of(records_of(here.log)), offsets_of(records_of(other.log))
    assert (old, new) == ([1, FARTHER, FARTHER + 1], [0, 1, FAR, FARTHER, FARTHER + 1])
    copy = PrefixCopy(here.log, next(each for each in here.log.segments if each.next_offset == FARTHER), NOW)
    while copy._swap is None or copy._swap._next < pieces:
        wanted = copy.wants_from
        copy.data = b"".join(map(bytes, read(other.log, wanted, 500, FARTHER + 2).regions)) if wanted >= 0 else b""
        copy.run()
        if not copy.advance():
            break
    here.kill()
    log = here.open(machine_ran_on=True)
    assert offsets_of(records_of(log)) == (new if pieces > 1 else old)
    assert not log.damaged_ranges()
    assert here.files("*.cleaned") == here.files("*.swap") == []


def test_a_gap_that_is_explained_is_none_of_a_log_that_a_start_has_begun_anew(logs: MakeLogs) -> None:
    """A loss of power took all records above its log start. The first batch behind the gap counted as damaged."""
    made = logs()
    made.append(batch(2))
    made.log.delete_records(2)
    made.log.explain_gaps(5)
    made.directory.write_checkpoints()
    made.kill()
    (made.folder / f"{0:020d}.log").write_bytes(b"")
    log = made.open()
    # Records before the gap may be lost with the others: the replicas are asked about it again.
    assert (log.log_start_offset, log.log_end_offset, log.gaps_explained_below) == (2, 2, 2)
    log.explain_gaps(5)
    follow(log, 5, 6)
    scrub(log, log.segments.active)
    assert not log.damaged_ranges()
    assert offsets_of(records_of(log)) == [5, 6]


class SimulatedLog:
    """One log on the simulated disk, whose process is killed or loses power."""

    def __init__(self, seed: int, config: LogConfig) -> None:
        self.config, self.disk = config, SimulatedDisk(Random(seed))
        self.disk.make_directory("/data")
        self.open(create=True)
        self.log.flush()

    def open(self, ending: Ending = Ending.POWER_LOSS, *, create: bool = False) -> PartitionLog:
        self.directory = LogDirectory.open(self.disk, "/data", node_id=1, cluster_id="c")
        if not create:
            self.directory.ending = ending
        self.directory.load(lambda topic: self.config, NOW)
        if create:
            self.directory.create_log("t", 0, TOPIC_ID, self.config, NOW)
        self.log = self.directory.logs["t", 0]
        return self.log

    def lose_power(self) -> PartitionLog:
        self.disk.lose_power()
        return self.open()

    def kill(self) -> PartitionLog:
        self.disk.end_process()
        return self.open(Ending.KILLED)


JUST_FITS = 2**31 - 1


@pytest.mark.parametrize("is_compacted", [False, True])
@pytest.mark.parametrize("first", [1, 2, JUST_FITS - 1, JUST_FITS, JUST_FITS + 1, JUST_FITS + 2])
def test_flushed_records_behind_a_gap_that_fits_the_index_alone_survive_a_loss_of_power(
    first: int, is_compacted: bool
) -> None:
    """The batches behind the gap did not fit. A start did not believe the name of a gap that does: it cut the log."""
    config = LogConfig(cleanup_policy=COMPACTED if is_compacted else frozenset({"delete"}))
    for seed in range(4):
        made = SimulatedLog(seed, config)
        follow(made.log, 0)
        made.log.explain_gaps(3 * FAR)
        last = max(first + 2, JUST_FITS)
        data = b"".join(batch(each, base_offset=offset, leader_epoch=4) for offset, each in ((first, 2), (last, 3)))
        made.log.append_as_follower(memoryview(bytearray(data)), NOW)
        made.log.flush()
        for _ in range(2):
            log = made.lose_power()
            assert offsets_of(records_of(log)) == [0, first, first + 1, *range(last, last + 3)]
            assert list(log.leader_epochs) == [(0, 0), (4, 1)]
            for segment in list(log.segments):
                scrub(log, segment)
            assert not log.damaged_ranges()


def copy_whole(log: PartitionLog, end_offset: int, other: PartitionLog) -> None:
    """Replace the segments up to the one that ends at `end_offset`."""
    copy_from(
        log, end_offset, lambda wanted: b"".join(map(bytes, read(other, wanted, 500, other.log_end_offset).regions))
    )


def copy_from(log: PartitionLog, end_offset: int, sent: Callable[[int], bytes]) -> None:
    """`sent`: the batches from an offset on."""
    copy = PrefixCopy(log, next(each for each in log.segments if each.next_offset == end_offset), NOW)
    while True:
        wanted = copy.wants_from
        copy.data = sent(wanted) if wanted >= 0 else b""
        copy.run()
        if not copy.advance():
            return


def test_a_leader_epoch_that_begins_at_a_gap_stays_known_where_a_copy_of_the_log_ends_behind_the_gap(
    tmp_path: Path,
) -> None:
    """The copy has no batch of it, and it was forgotten. The first batch behind the copy contradicted the epochs."""
    config = LogConfig(cleanup_policy=COMPACTED)
    here, other = Logs(tmp_path / "here", config), Logs(tmp_path / "other", config)
    follow(other.log, 0)
    for made in (here, other):
        follow(made.log, 1)
        made.log.append_as_follower(batch(2, base_offset=FAR, leader_epoch=3), NOW)
        made.log.set_high_watermark(made.log.log_end_offset)
    copy_whole(here.log, FAR, other.log)
    assert list(here.log.leader_epochs) == [(0, 0), (3, 2)]
    assert offsets_of(records_of(here.log)) == [0, 1, FAR, FAR + 1]


def test_a_leader_epoch_that_begins_at_a_gap_inside_of_a_copy_begins_there(tmp_path: Path) -> None:
    """It began behind the gap, as after a kill."""
    config = LogConfig(cleanup_policy=COMPACTED)
    here, other = Logs(tmp_path / "here", config), Logs(tmp_path / "other", config)
    for made in (here, other):
        for epoch, offset in enumerate([0, 1, FAR, FARTHER]):
            if made is other or offset != 1:
                data = batch(1, base_offset=offset, leader_epoch=epoch)
                made.log.append_as_follower(data, NOW)
        made.log.set_high_watermark(made.log.log_end_offset)
    assert list(here.log.leader_epochs) == [(0, 0), (2, 1), (3, FAR + 1)]
    copy_whole(here.log, FARTHER, other.log)
    assert list(here.log.leader_epochs) == list(other.log.leader_epochs) == [(0, 0), (1, 1), (2, 2), (3, FAR + 1)]
    assert offsets_of(records_of(here.log)) == [0, 1, FAR, FARTHER]


def test_a_leader_epoch_that_only_the_replaced_log_has_is_forgotten_up_to_the_end_of_the_copy(tmp_path: Path) -> None:
    """The parts are copied from the last to the first."""
    config = LogConfig(cleanup_policy=COMPACTED)
    here, other = Logs(tmp_path / "here", config), Logs(tmp_path / "other", config)
    for made in (here, other):
        for epoch, offset in ((0, 0), (1 if made is here else 0, FAR), (2, FARTHER)):
            made.log.append_as_follower(batch(1, base_offset=offset, leader_epoch=epoch), NOW)
        made.log.set_high_watermark(made.log.log_end_offset)
    assert list(here.log.leader_epochs) == [(0, 0), (1, 1), (2, FAR + 1)]
    copy_whole(here.log, FARTHER, other.log)
    assert list(here.log.leader_epochs) == list(other.log.leader_epochs) == [(0, 0), (2, FAR + 1)]


@pytest.mark.parametrize("files", ["on the device", "lost", "from before the gap"])
@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_leader_epoch_that_begins_at_a_gap_begins_there_after_a_kill(
    logs: MakeLogs, is_flushed: bool, files: str
) -> None:
    """It began behind the gap: a follower with records of another history in the gap was to keep them."""
    made = logs(cleanup_policy=COMPACTED)
    follow(made.log, 0, 1)
    made.log.flush()
    path = made.folder / "leader-epoch-checkpoint"
    before = path.read_bytes()
    made.log.append_as_follower(batch(2, base_offset=FAR, leader_epoch=3), NOW)
    made.log.flush()
    if is_flushed:
        made.directory.write_checkpoints()
    made.kill()
    if files == "lost":
        path.unlink()
    elif files == "from before the gap":
        path.write_bytes(before)
    log = made.open(machine_ran_on=True)
    assert list(log.leader_epochs) == [(0, 0), (3, 2)]
    assert log.end_offset_for_epoch(0) == (0, 2)


def test_a_copy_of_a_log_names_no_gap_that_fits_the_index_alone(tmp_path: Path) -> None:
    config = LogConfig(cleanup_policy=COMPACTED)
    here, other = Logs(tmp_path / "here", config), Logs(tmp_path / "other", config)
    for made in (here, other):
        follow(made.log, 0)
        if made is other:
            made.log.append_as_follower(batch(3, base_offset=JUST_FITS, leader_epoch=0), NOW)
        follow(made.log, FARTHER)
        made.log.set_high_watermark(made.log.log_end_offset)
    copy_whole(here.log, FARTHER, other.log)
    for _ in range(2):
        early = [each for each in here.log.segments if each.may_end_early]
        assert all(is_beyond_index(each.base_offset, each.next_offset) for each in early)
        assert offsets_of(records_of(here.log)) == [0, *range(JUST_FITS, JUST_FITS + 3), FARTHER]
        here.kill_and_open()
        assert not here.log.damaged_ranges()


def test_flushed_records_of_a_copy_behind_a_gap_that_fits_the_index_alone_survive_a_loss_of_power() -> None:
    """A segment of the copy holds the gap. Without a batch there, a start after a loss of power cuts the log."""
    made = SimulatedLog(1, LogConfig(cleanup_policy=COMPACTED))
    follow(made.log, 0, FARTHER)
    made.log.set_high_watermark(made.log.log_end_offset)
    counts = {0: 1, JUST_FITS: 3, FARTHER: 1}
    batches = {offset: bytes(batch(count, base_offset=offset, leader_epoch=0)) for offset, count in counts.items()}
    copy_from(made.log, FARTHER, lambda wanted: b"".join(batches[each] for each in batches if each >= wanted))
    early = [each for each in made.log.segments if each.may_end_early]
    assert all(is_beyond_index(each.base_offset, each.next_offset) for each in early)
    made.log.flush()
    for _ in range(2):
        log = made.lose_power()
        assert offsets_of(records_of(log)) == [0, *range(JUST_FITS, JUST_FITS + 3), FARTHER]
        assert not log.damaged_ranges()


def test_the_epoch_of_a_batch_without_records_is_known_where_the_batches_behind_it_are_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimulatedLog(1, LogConfig(cleanup_policy=COMPACTED))
    follow(made.log, 0)
    roll, rolled = PartitionLog.roll, list[int]()

    def roll_once(log: PartitionLog, now_ms: int, base_offset: int = -1) -> Segment:
        rolled.append(base_offset)
        if len(rolled) == 2:
            raise OSError("no space")
        return roll(log, now_ms, base_offset)

    monkeypatch.setattr(PartitionLog, "roll", roll_once)
    with pytest.raises(OSError, match="no space"):
        made.log.append_as_follower(batch(3, base_offset=JUST_FITS, leader_epoch=4), NOW)
    assert made.log.log_end_offset == JUST_FITS
    assert list(made.log.leader_epochs) == [(0, 0), (4, 1)]


def test_the_segment_of_a_gap_is_empty_after_a_kill_and_a_loss_of_power() -> None:
    """Its preallocated bytes came back: no flush synced the file without batches. They counted as damaged."""
    config = LogConfig(cleanup_policy=COMPACTED, segment_bytes=1000, preallocate=True)
    for seed in range(10):
        made = SimulatedLog(seed, config)
        follow(made.log, 0, FAR)
        made.kill()
        follow(made.log, FAR + 1)
        made.log.flush()
        made.directory.write_checkpoints()
        log = made.lose_power()
        for segment in list(log.segments):
            scrub(log, segment)
        assert not log.damaged_ranges(), seed
        assert offsets_of(records_of(log)) == [0, FAR, FAR + 1]


def test_flushed_records_behind_a_gap_survive_a_loss_of_power_after_the_topic_ceased_to_be_compacted() -> None:
    """The file that named the gap was replaced without a sync, and was empty. The log was cut before the gap."""
    for seed in range(20):
        made = SimulatedLog(seed, LogConfig(cleanup_policy=COMPACTED))
        follow(made.log, 0, FAR)
        made.log.flush()
        made.directory.enter_in_cleaner_checkpoint(made.log)
        made.config = LogConfig()
        made.log.explain_gaps(made.log.log_end_offset, sync=False)
        made.log.set_config(made.config)
        log = made.lose_power()
        assert offsets_of(records_of(log)) == [0, FAR], seed
        assert not log.damaged_ranges(), seed


@pytest.mark.parametrize("is_compacted", [False, True])
def test_flushed_records_behind_a_gap_that_all_replicas_have_survive_a_loss_of_power(is_compacted: bool) -> None:
    """A start did not believe the name of the empty segment that holds the gap: it cut the log before it."""
    for seed in range(5):
        made = SimulatedLog(seed, LogConfig(cleanup_policy=COMPACTED if is_compacted else frozenset({"delete"})))
        follow(made.log, 0, 1)
        made.log.roll(NOW)
        follow(made.log, 2, 3)
        made.log.roll(NOW)
        follow(made.log, 4)
        path = f"{made.log.directory}/{2:020d}.log"
        data = made.disk.read_file(path)
        made.disk.write_file(path, data[: [each for each, _ in iter_headers(data)][1]], sync=True)
        log = made.kill()
        assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(3, 4)]
        log.accept_gap(*log.damaged_ranges()[0])
        for _ in range(2):
            made.log.flush()
            log = made.lose_power()
            assert offsets_of(records_of(log)) == [0, 1, 2, 4], seed
            for segment in list(log.segments):
                scrub(log, segment)
            assert not log.damaged_ranges()


@pytest.mark.parametrize("is_cleaned", [False, True])
@pytest.mark.parametrize("ending", ["clean stop", "kill", "loss of power"])
def test_a_lost_segment_behind_a_cleaned_one_of_many_offsets_is_damage(
    tmp_path: Path, ending: str, is_cleaned: bool
) -> None:
    """The one before it seemed to end before a gap that is too large for an index: readers passed over its records."""
    made, other = (Logs(tmp_path / name, LogConfig(cleanup_policy=COMPACTED)) for name in ("made", "other"))
    for each in (made, other):
        for offsets in ((0, 2**31 - 100), (2**31 - 50, 2**31 + 10), (2**31 + 11,)):
            follow(each.log, *offsets)
            each.log.roll(NOW)
            each.log.set_high_watermark(each.log.log_end_offset)
            if is_cleaned or not offsets[0]:
                each.directory.enter_in_cleaner_checkpoint(each.log)
                clean(each.log)
    lost, behind = (each.base_offset for each in list(made.log.segments)[1:3])
    assert is_beyond_index(0, behind)
    assert not is_beyond_index(0, lost)
    made.log.flush()
    made.directory.write_checkpoints()
    (made.close if ending == "clean stop" else made.kill)()
    (made.folder / f"{lost:020d}.log").unlink()
    log = made.open(machine_ran_on=ending == "kill")
    with pytest.raises(DamagedRecords):
        read(log, lost, 100, log.log_end_offset)
    assert [(each.first_offset, each.end_offset) for _, each in log.damaged_ranges()] == [(lost, behind)]
    copy_prefix(log, other.log, 0)
    for _ in range(2):
        assert offsets_of(records_of(made.log)) == offsets_of(records_of(other.log))
        assert not made.log.damaged_ranges()
        made.close_and_open()


@pytest.mark.parametrize("ending", ["clean stop", "kill", "loss of power"])
def test_a_cleaning_names_the_far_gaps_that_kafka_has_left(logs: MakeLogs, ending: str) -> None:
    """Kafka begins no empty segment for them, and has no file that names them."""
    made = logs(cleanup_policy=COMPACTED)
    with_far_gap(made, is_cleaned=False)
    made.close()
    for path in (*made.folder.glob(f"{4:020d}.*"), made.folder / EXPLAINED_GAPS_FILE):
        path.unlink()
    for _ in range(3):
        log = made.open(machine_ran_on=ending == "kill")
        assert {1, 3, *range(FAR, FAR + 5)} <= {*offsets_of(records_of(log))}
        for segment in list(log.segments):
            scrub(log, segment)
        assert not log.damaged_ranges()
        made.directory.enter_in_cleaner_checkpoint(log)
        clean(log)
        log.flush()
        made.directory.write_checkpoints()
        (made.close if ending == "clean stop" else made.kill)()
