"""Starts of a node whose metadata snapshots are damaged, or whose log lacks what is before its newest snapshot."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.unit.replication.quorum.quorum_nodes import Member, Quorum, RefusingDisk, stop_all
from tests.unit.replication.quorum.test_metadata_damage import committed, logs_of
from tests.unit.replication.quorum.test_metadata_retention import CONFIG, NOTHING_KEPT, Home
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.replication.quorum.files.metadata_log import MetadataLog, log_start_in
from tidelog.replication.quorum.files.records_lost import LACKING_FILE
from tidelog.replication.quorum.raft.snapshot import SnapshotId
from tidelog.replication.quorum.raft.voters import VoterHistory, VoterSet
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.partition_log import CorruptLog


class VoterHome(Home):
    """One that remembers what it has acknowledged."""

    def open(self) -> None:
        self.directory = LogDirectory.open(self.disk, self.root, node_id=1, cluster_id="AAAAAAAAAAAAAAAAAAAAAA")
        self.plain = self.directory.open_metadata_log(CONFIG, 0, log_start_in)
        self.log = MetadataLog(self.disk, self.root, self.plain, VoterHistory(VoterSet([])))
        self.found = self.log.load(is_voter=True, keeps_writes=True)

    def close(self) -> None:
        self.log.remember_acknowledged()
        self.log.close()
        self.directory.close()

    @property
    def files(self) -> Path:
        return Path(self.log.directory)

    def replayed(self) -> int:
        """The offset up to which the newest snapshot and the records behind it reach without a gap."""
        end = self.found[0].end_offset if self.found is not None else 0
        for batch in self.log.read(end, self.log.end_offset):
            assert batch.last_offset == end
            end += 1
        return end


@pytest.fixture
def shortened(tmp_path) -> VoterHome:
    """The log ends at 45 and begins at the snapshot at 30, in a later segment than the first. The newest one ends at
    40.
    """
    home = VoterHome(RefusingDisk(), tmp_path / "log")
    home.append(45)
    for end_offset in (10, 30, 40):
        home.snapshot(end_offset)
    for now_ms in (1, 2):
        home.log.clean(NOTHING_KEPT, now_ms)
    assert int(home.names(".log")[0][:20]) > 10
    home.close()
    return home


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def snapshot_path(home: VoterHome, end_offset: int) -> Path:
    return Path(home.log.path_of(SnapshotId(end_offset, 1)))


def test_a_start_with_a_damaged_newest_snapshot_loads_the_one_before(shortened):
    damage(snapshot_path(shortened, 40))
    shortened.open()
    assert shortened.found is not None
    assert shortened.found[0] == SnapshotId(30, 1)
    assert (shortened.log.start_offset, shortened.replayed()) == (30, 45)
    assert not shortened.log.lacks_records
    assert not shortened.names(".damaged")
    assert shortened.log.check_snapshots()  # another one is due
    shortened.snapshot(45)
    assert not shortened.log.check_snapshots()


def test_the_snapshot_at_the_log_start_is_not_needed(shortened):
    damage(snapshot_path(shortened, 30))
    shortened.open()
    assert shortened.found is not None
    assert (shortened.found[0], shortened.replayed()) == (SnapshotId(40, 1), 45)
    assert shortened.log.check_snapshots()
    shortened.log.remove_damaged_snapshots()
    assert shortened.log.snapshots == (SnapshotId(40, 1), SnapshotId(40, 1))
    assert shortened.log.check_snapshots()


def test_without_a_whole_snapshot_a_start_keeps_all_files(shortened):
    """The log begins at offset 0, to fetch everything again. A single voter says what it has kept."""
    names = [*shortened.names(".checkpoint"), *shortened.names(".log")]
    for end_offset in (30, 40):
        damage(snapshot_path(shortened, end_offset))
    content = {name: (shortened.files / name).read_bytes() for name in names}
    for _ in range(2):
        shortened.open()
        assert (shortened.found, shortened.log.end_offset) == (None, 0)
        assert shortened.log.lacks_records
        assert shortened.log.kept_files == sorted(f"{name}.damaged" for name in names)
        assert {name: (shortened.files / f"{name}.damaged").read_bytes() for name in names} == content
        shortened.close()


def test_without_its_first_segment_a_log_begins_at_the_newest_snapshot(tmp_path):
    """It was removed, for the records between it and the log are lost, and nothing was left."""
    home = VoterHome(RefusingDisk(), tmp_path / "log")
    home.append(45)
    for end_offset in (10, 30):
        home.snapshot(end_offset)
    home.close()
    kept = home.names(".log")[-1]
    for name in home.names(".log")[:-1]:
        (home.files / name).unlink()
    for _ in range(2):
        home.open()
        assert home.found is not None
        assert home.found[0] == SnapshotId(30, 1)
        assert (home.log.start_offset, home.replayed()) == (30, 30)
        assert home.log.lacks_records
        assert home.log.kept_files == [f"{kept}.damaged"]
        home.close()


def test_a_lost_end_is_noted_though_a_snapshot_replaces_other_damage(shortened):
    """What was left counted as all that was acknowledged."""
    first, *_, last = shortened.names(".log")
    damage(shortened.files / first)
    path = shortened.files / last
    os.truncate(path, list(iter_headers(path.read_bytes()))[-1][0])
    for _ in range(2):
        shortened.open()
        assert shortened.replayed() == shortened.log.end_offset < 45
        assert shortened.log.lacks_records
        shortened.close()


def test_a_single_voter_without_a_whole_snapshot_says_what_it_has_kept(tmp_path):
    async def run() -> None:
        quorum = Quorum(tmp_path, {}, segment_bytes=1 << 10)
        quorum.format_dynamic(1)
        member = await Member(quorum, 1).start()
        await committed(quorum, 30)
        await stop_all(quorum)
        directory = logs_of(tmp_path, 1)
        first, *others = sorted(path.name for path in directory.glob("*.log"))
        (directory / first).unlink()
        for path in directory.glob("*.checkpoint"):
            path.unlink()
        with pytest.raises(CorruptLog, match=rf"kept: {others[0]}\.damaged, .*as an empty cluster"):
            await Member(quorum, 1).start()
        assert (directory / LACKING_FILE).exists()
        assert member.raft.log.kept_files == [f"{name}.damaged" for name in others]

    asyncio.run(run())
