"""What metadata.max.retention.* lets go of the metadata log, and where the log begins then, after a crash too."""

from __future__ import annotations

import contextlib
import random

import pytest

from tests.simulation.simulated_disk import PowerLoss, SimulatedDisk
from tests.unit.replication.quorum.quorum_nodes import RefusingDisk
from tidelog.protocol.batches.record_batch import LEADER_EPOCH_OFFSET, iter_headers
from tidelog.replication.ports import Endpoint
from tidelog.replication.quorum.files.metadata_log import CLEANED_AT_ONCE_MAX, MetadataLog, log_start_in
from tidelog.replication.quorum.raft.leading import check_position
from tidelog.replication.quorum.raft.messages import AppendLeaderChange, FetchAnswer
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention, SnapshotFacts
from tidelog.replication.quorum.raft.snapshot import SnapshotId, decode_snapshot, encode_snapshot, snapshot_name
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterHistory, VoterSet, voters_from_record
from tidelog.storage.files.checkpoints import LEADER_EPOCH_FILE
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.segments.log_config import LogConfig

CONFIG = LogConfig(max_message_bytes=1 << 23, segment_bytes=1 << 12, retention_ms=-1, file_delete_delay_ms=0)
NOTHING_KEPT = MetadataRetention(bytes_max=0, age_ms_max=-1)
VALUE = b"v" * 500


class Home:
    """The metadata log of one node, opened as a node does it."""

    def __init__(self, disk, root) -> None:
        self.disk, self.root = disk, str(root)
        self.open()

    def open(self) -> None:
        self.directory = LogDirectory.open(self.disk, self.root, node_id=1, cluster_id="AAAAAAAAAAAAAAAAAAAAAA")
        self.plain = self.directory.open_metadata_log(CONFIG, 0, log_start_in)
        self.log = MetadataLog(self.disk, self.root, self.plain, VoterHistory(VoterSet([])))
        self.found = self.log.load()

    def append(self, count: int, epoch: int = 1) -> None:
        for _ in range(count):
            self.log.append_values([VALUE], epoch, 0)
        self.plain.flush()

    def snapshot(self, end_offset: int, epoch: int = 1, timestamp_ms: int = 0) -> SnapshotId:
        identity = SnapshotId(end_offset, epoch)
        self.log.write_snapshot([b"image"], identity, timestamp_ms, 0)
        self.log.note_snapshot(identity)
        self.plain.set_high_watermark(max(self.plain.high_watermark, end_offset))
        return identity

    def names(self, suffix: str) -> list[str]:
        directory = f"{self.root}/__cluster_metadata-0"
        return sorted(entry.name for entry in self.disk.list_directory(directory) if entry.name.endswith(suffix))


@pytest.fixture
def home(tmp_path):
    return Home(RefusingDisk(), tmp_path / "log")


@pytest.mark.parametrize("damaged", [0, 1, 3])
@pytest.mark.parametrize("epoch", [2, 7, 1 << 20])
def test_a_wrong_leader_epoch_before_a_snapshot_costs_no_record(home, damaged, epoch):
    """The log starts inside of its first segment, where a start reads the epochs from the batches again."""
    home.append(6)
    home.snapshot(2)
    home.snapshot(4)
    home.plain.delete_records(4)
    assert home.log.start_offset == 4
    home.directory.close()
    assert len(home.names(".log")) == 1
    with open(f"{home.log.directory}/{0:020d}.log", "r+b") as file:
        position = [position for position, _ in iter_headers(file.read())][damaged]
        file.seek(position + LEADER_EPOCH_OFFSET)
        file.write(epoch.to_bytes(4, "big"))
    for _ in range(2):
        home.open()
        assert (home.log.last_epoch, home.log.end_offset) == (1, 6)
        assert [batch.values for batch in home.log.read(4, 6)] == [[VALUE]] * 2
        assert home.found is not None
        home.directory.close()


FACTS = [SnapshotFacts(40, 1000), SnapshotFacts(40, 2000), SnapshotFacts(20, 3000)]


@pytest.mark.parametrize(
    ("retention", "log_bytes", "now_ms", "goes"),
    [
        (MetadataRetention(100, -1), 0, 10**9, False),
        (MetadataRetention(100, -1), 1, 10**9, True),
        (MetadataRetention(-1, 500), 10**9, 1500, False),
        (MetadataRetention(-1, 500), 10**9, 1501, True),
        (MetadataRetention(-1, -1), 10**9, 10**9, False),
    ],
)
def test_the_oldest_snapshot_goes_by_size_or_by_age(retention, log_bytes, now_ms, goes):
    assert retention.lets_oldest_go(FACTS, log_bytes, now_ms) is goes
    assert not retention.lets_oldest_go(FACTS[1:], log_bytes, now_ms)


def test_the_log_is_shortened_to_the_oldest_snapshot_that_stays(home):
    home.append(40)
    home.snapshot(10)
    second = home.snapshot(30)
    third = home.snapshot(35)
    before = home.names(".log")
    home.log.clean(MetadataRetention(-1, -1), 1)
    assert home.log.start_offset == 0
    assert home.names(".log") == before
    home.log.clean(NOTHING_KEPT, 1)
    home.log.clean(NOTHING_KEPT, 2)  # the delay of the removed files is over
    assert home.log.start_offset == 30
    assert home.log.snapshots == (second, third)
    assert home.names(".checkpoint") == [snapshot_name(second), snapshot_name(third)]
    remaining = home.names(".log")
    assert 0 < len(remaining) < len(before)
    assert remaining == before[-len(remaining) :]
    assert not home.names(".deleted")


def test_many_expired_snapshots_go_a_part_at_a_time(home):
    """A node was down for a week: all but two have expired. Each removal waits for the device, and held up the loop."""
    home.append(50)
    ends = range(1, 51)
    for end_offset in ends:
        home.snapshot(end_offset)
    for cleaned in (CLEANED_AT_ONCE_MAX, 2 * CLEANED_AT_ONCE_MAX, 48, 48):
        home.log.clean(MetadataRetention(-1, 1000), 1001)
        assert home.log.start_offset == ends[cleaned]
        assert len(home.names(".checkpoint")) == 50 - cleaned


def test_an_epoch_that_only_its_file_names_is_not_believed(tmp_path):
    """It has no checksum. A later epoch than the quorum has had would make this the newest log in an election."""
    home = Home(RefusingDisk(), tmp_path / "log")
    home.append(41)
    home.snapshot(10)
    home.snapshot(41)
    home.plain.delete_records(41)
    home.log.clean(MetadataRetention(-1, -1), 1)
    assert home.log.start_offset == home.log.end_offset == 41 > home.plain.segments.first.base_offset
    home.plain.close()
    home.directory.close()
    path = tmp_path / "log" / "__cluster_metadata-0" / LEADER_EPOCH_FILE
    assert path.read_text() == "0\n1\n1 41\n"
    path.write_text("0\n1\n9 41\n")
    home.open()
    assert home.directory.was_clean
    assert home.log.last_epoch == 1


@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
def test_a_snapshot_whose_start_is_damaged_keeps_no_other_from_being_removed(home, damaged):
    """Its age is that of its file. It was an exception, in the task that had written another snapshot."""
    home.append(40)
    identities = [home.snapshot(end_offset) for end_offset in (10, 20, 30, 40)]
    path = home.log.path_of(identities[damaged])
    home.disk.write_file(path, bytes(home.disk.size_of(path)), sync=False)
    home.log.clean(NOTHING_KEPT, 1)
    assert home.log.start_offset == 30


def test_by_age_only_what_is_older_than_the_limit_goes(home):
    home.append(40)
    for end_offset, timestamp_ms in ((10, 100), (20, 200), (30, 300), (40, 400)):
        home.snapshot(end_offset, timestamp_ms=timestamp_ms)
    home.log.clean(MetadataRetention(-1, 1000), 1150)
    assert home.log.start_offset == 20
    assert [one.end_offset for one in home.log._snapshots] == [20, 30, 40]


def test_a_start_begins_where_the_shortened_log_did(home):
    home.append(40)
    home.snapshot(10)
    home.snapshot(30)
    home.snapshot(35)
    home.log.clean(NOTHING_KEPT, 1)
    home.directory.close()
    home.open()
    assert home.log.start_offset == 30
    assert home.log.end_offset == 40
    assert home.plain.segment_count < 10
    identity, _ = home.found
    assert identity == SnapshotId(35, 1)


def test_a_follower_below_the_log_start_is_sent_to_the_snapshot(home):
    home.append(40)
    home.snapshot(10)
    home.snapshot(30)
    newest = home.snapshot(40)
    home.log.clean(NOTHING_KEPT, 1)
    base = FetchAnswer(0, 1, 1, Endpoint("a", 1), 40)
    assert check_position(home.log, 29, 1, base).snapshot == newest
    assert check_position(home.log, 30, 1, base) == base
    assert check_position(home.log, 40, 1, base) == base


def test_nothing_above_the_high_watermark_goes(home):
    home.append(40)
    home.snapshot(10)
    home.log.note_snapshot(SnapshotId(30, 1))
    home.log.note_snapshot(SnapshotId(35, 1))
    home.log.clean(NOTHING_KEPT, 1)
    assert home.log.start_offset == 0


def test_a_removal_that_fails_goes_on_later(home):
    home.append(40)
    home.snapshot(10)
    home.snapshot(30)
    home.snapshot(40)
    home.disk.code, home.disk.kind = 5, "sync_directory"
    with pytest.raises(OSError, match="Input/output"):
        home.log.clean(NOTHING_KEPT, 1)
    home.disk.code = 0
    home.log.clean(NOTHING_KEPT, 2)
    assert home.log.start_offset == 30
    assert home.log.snapshots == (SnapshotId(30, 1), SnapshotId(40, 1))
    assert len(home.names(".log")) < 10


def test_unfinished_snapshots_go_at_a_start(home):
    home.append(1)
    home.log.keep_part(SnapshotId(9, 1), 0, b"begun and never finished")
    assert len(home.names(".part")) == 1
    home.directory.close()
    home.open()
    assert home.names(".part") == []


def test_a_snapshot_fetched_while_the_same_one_is_written_leaves_it_whole(home):
    home.append(12)
    identity = SnapshotId(10, 1)
    rename = home.disk.rename

    def meanwhile(source: str, target: str) -> None:
        home.log.keep_part(identity, 0, b"the first piece of many")
        rename(source, target)

    class Meanwhile(RefusingDisk):
        def rename(self, source: str, target: str) -> None:
            meanwhile(source, target)

    home.log._disk = Meanwhile()
    home.log.write_snapshot([b"image"], identity, 0, 0)
    home.directory.close()
    home.open()
    assert home.found is not None
    assert home.found[1].values == [b"image"]


@pytest.mark.parametrize("seed", range(40))
def test_a_loss_of_power_while_it_is_shortened_leaves_a_log_without_gaps(seed):
    rng = random.Random(seed)
    disk = SimulatedDisk(rng)
    home = Home(disk, "/log")
    home.append(60)
    for end_offset in (10, 30, 50, 60):
        home.snapshot(end_offset)
    disk.fail_after(rng.randrange(1, 30))
    with contextlib.suppress(PowerLoss):
        home.log.clean(NOTHING_KEPT, 1)
        home.log.clean(NOTHING_KEPT, 2)
    disk.lose_power()
    home.open()
    start = home.log.start_offset
    assert start in (0, 10, 30, 50)
    assert home.log.end_offset == 60
    replayed = [value for batch in home.log.read(start, 60) for value in batch.values]
    assert replayed == [VALUE] * (60 - start)


def test_a_log_that_went_another_way_is_moved_behind_the_snapshot(home):
    home.append(10, epoch=1)
    home.append(5, epoch=7)  # it led for a moment, and nothing of that was committed
    identity = SnapshotId(40, 5)
    home.log.keep_part(identity, 0, bytes(_content(identity)))
    home.log.install(identity, home.log.finish_part(identity), 1)
    assert (home.log.start_offset, home.log.end_offset, home.log.last_epoch) == (40, 40, 5)


def test_a_longer_log_that_went_another_way_is_moved_too(home):
    home.append(10, epoch=1)
    home.append(50, epoch=7)
    identity = SnapshotId(40, 5)
    home.log.keep_part(identity, 0, bytes(_content(identity)))
    home.log.install(identity, home.log.finish_part(identity), 1)
    assert (home.log.start_offset, home.log.end_offset) == (40, 40)


def test_a_snapshot_written_while_the_log_was_begun_anew_behind_a_later_one_goes(home):
    home.append(12)
    earlier, fetched = SnapshotId(10, 1), SnapshotId(40, 5)
    home.log.write_snapshot([b"image"], earlier, 0, 0)
    home.log.keep_part(fetched, 0, bytes(_content(fetched)))
    home.log.install(fetched, home.log.finish_part(fetched), 1)
    home.log.note_snapshot(earlier)
    assert home.log.snapshots == (fetched, fetched)
    assert home.names(".checkpoint") == [snapshot_name(fetched)]


def test_a_snapshot_has_its_voters_though_the_log_begins_anew_while_a_thread_writes_it(home):
    """The thread read the history of the voters, which was empty at that moment: a snapshot without voters."""
    key = ReplicaKey(1, b"d" * 16)
    voters = VoterSet([Voter(key, (("CONTROLLER", Endpoint("a", 1)),))])
    home.append(12)
    home.log._voters.add_version(0, 1)
    home.log._voters.add_voters(1, voters)
    identity, fetched = SnapshotId(home.log.end_offset, 1), SnapshotId(40, 5)

    work = home.log.snapshot_writer([b"image"], identity, 0, 0)  # for a thread, which comes to it later
    home.log.keep_part(fetched, 0, bytes(_content(fetched)))
    home.log.install(fetched, home.log.finish_part(fetched), 1)
    work()
    written = decode_snapshot(home.disk.read_file(home.log.path_of(identity)))
    assert written.kraft_version == 1
    assert written.voters is not None
    assert voters_from_record(written.voters) == voters


def test_a_log_that_holds_the_end_of_its_snapshot_stays(home):
    home.append(10, epoch=1)
    home.append(50, epoch=5)
    home.snapshot(40, epoch=5)
    home.directory.close()
    home.open()
    assert (home.log.start_offset, home.log.end_offset) == (0, 60)


def _content(identity: SnapshotId) -> bytearray:
    return encode_snapshot([b"image"], identity, 0, 0)


def test_voters_named_below_the_new_start_stay_known(home):
    key = ReplicaKey(1, b"d" * 16)
    voters = VoterSet([Voter(key, (("CONTROLLER", Endpoint("a", 1)),))])
    home.log.append_leader_change(AppendLeaderChange(1, voters, (key,), voters), 1, 0)
    home.append(40)
    home.snapshot(10)
    home.snapshot(30)
    home.snapshot(35)
    home.log.clean(NOTHING_KEPT, 1)
    assert home.log._voters.latest.ids == [1]
    assert home.log._voters.at(30)[1] is not None
