"""`__cluster_metadata-0` on the disk, as raft sees it: the log, the snapshots beside it, the control records in both.

Keeps the voters' history in step with the log. What is to be appended, cut or loaded is decided elsewhere. Runs on the
loop's thread; `write_snapshot` and what says so may run on any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from tidelog.protocol.batches.control_batches import encode_control_records
from tidelog.protocol.batches.record_batch import (
    HEADER,
    HEADER_SIZE,
    MAGIC,
    MIN_BATCH_LENGTH,
    BatchHeader,
    iter_headers,
)
from tidelog.protocol.batches.records import ControlRecordType, control_record_type, decode_batch, encode_batch
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.control_records import (
    KRaftVersionRecord,
    LeaderChangeMessage,
    LeaderChangeMessageVoter,
    VotersRecord,
)
from tidelog.replication.quorum.acknowledged import AcknowledgedEnd
from tidelog.replication.quorum.raft.messages import AppendLeaderChange, Bytes, OffsetAndEpoch
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention, SnapshotFacts
from tidelog.replication.quorum.raft.snapshot import (
    BOOTSTRAP_NAME,
    CorruptSnapshot,
    Snapshot,
    SnapshotId,
    decode_snapshot,
    encode_snapshot,
    last_timestamp_in,
    parse_snapshot_name,
    snapshot_name,
)
from tidelog.replication.quorum.raft.voters import VoterHistory, VoterSet, voters_from_record, voters_record
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.loader import Ending
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import describe
from tidelog.storage.segments.reader import ColdRead, Region

if TYPE_CHECKING:
    from tidelog.storage.log.directory import LogDirectory
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.quorum")

READ_BYTES = 4 * 1024 * 1024
SNAPSHOT_HEAD_BYTES = 64 * 1024
OWN_PART = ".part"
LACKING_FILE = "records-lost"
"""There from before damaged records are cut until all that was committed is there again."""
FETCHED_PART = ".fetched.part"  # a name of its own: the same snapshot may be written here meanwhile


UNFINISHED = b"a part of the last batch\n"
"""Content of that file where nothing else was cut, as a kill leaves it in a write, which nothing had acknowledged."""


def note_loss(disk: Disk, directory: str, content: bytes = b"") -> None:
    """Durably: records that were acknowledged are about to be cut from the metadata log in `directory`."""
    path = f"{directory}/{LACKING_FILE}"
    if not disk.exists(path) or (disk.read_file(path) != content and not content):
        disk.write_file(path, content, sync=True)
        disk.sync_directory(directory)


def note_loss_of(disk: Disk, home: LogDirectory) -> Callable[[str], None]:
    """To be called with the directory of the metadata log in `home` before its end is cut."""
    return partial(_note_cut if home.ending is Ending.KILLED else note_loss, disk)


def _note_cut(disk: Disk, directory: str) -> None:
    names = [entry.name for entry in disk.list_directory(directory) if entry.name.endswith(".log")]
    file = disk.open(f"{directory}/{max(names)}")
    try:
        size_bytes, position = file.size_bytes(), 0
        while (
            batch_bytes := _batch_bytes(file.read_at(HEADER_SIZE, position))
        ) and position + batch_bytes <= size_bytes:
            position += batch_bytes
        is_unfinished = bool(batch_bytes) or 0 < size_bytes - position < HEADER_SIZE
        note_loss(disk, directory, UNFINISHED if is_unfinished else b"")
    finally:
        file.close()


def _batch_bytes(header: bytes) -> int:
    """How long the batch is of which these are the first bytes; 0 where they are none, or too few to tell."""
    if len(header) < HEADER_SIZE:
        return 0
    found = BatchHeader._make(HEADER.unpack(header))
    return found.size_bytes if found.magic == MAGIC and found.batch_length >= MIN_BATCH_LENGTH else 0


class ReplayedBatch(NamedTuple):
    """Values of metadata records, and the offset of the last record they come from (control records included)."""

    last_offset: int
    epoch: int
    timestamp_ms: int
    values: list[bytes]


class MetadataLog:
    """`root`: the log directory that holds `__cluster_metadata-0`, whose log is `log`. `load` first."""

    def __init__(self, disk: Disk, root: str, log: PartitionLog, voters: VoterHistory) -> None:
        self._disk = disk
        self._root = root
        self.directory = f"{root}/__cluster_metadata-0"
        self._log = log
        self._voters = voters
        self._snapshots: list[SnapshotId] = []
        self._snapshot_facts: dict[SnapshotId, SnapshotFacts] = {}
        self._acknowledged = AcknowledgedEnd(disk, self.directory)
        self._remembers = False
        self._is_lacking = False
        self._damaged_snapshots: set[SnapshotId] = set()
        self._voters_known_below = 0
        self.damage = ""
        """What is wrong with the files, for people."""

    # -- as raft sees it ---------------------------------------------------------------------------------------------

    @property
    def start_offset(self) -> int:
        return self._log.log_start_offset

    @property
    def end_offset(self) -> int:
        return self._log.log_end_offset

    @property
    def synced_offset(self) -> int:
        return min(self._log.durability.recovery_point, self._log.log_end_offset)

    @property
    def last_epoch(self) -> int:
        latest = max(self._log.leader_epochs.latest, 0)
        newest = self._snapshots[-1] if self._snapshots else None
        if newest is not None and newest.end_offset >= self._log.log_end_offset:
            # No record is younger than the snapshot. What the log's checkpoint says may be of before it was emptied.
            return max(latest, newest.epoch)
        return latest

    @property
    def snapshots(self) -> tuple[SnapshotId, SnapshotId] | None:
        return (self._snapshots[0], self._snapshots[-1]) if self._snapshots else None

    def end_of_epoch(self, epoch: int) -> OffsetAndEpoch:
        found, end_offset = self._log.end_offset_for_epoch(epoch)
        if found < 0:
            return OffsetAndEpoch(self.last_epoch, self.end_offset)
        earliest = self._snapshots[0] if self._snapshots else None
        if earliest is not None and found == epoch and end_offset == earliest.end_offset:
            # Older than all that the log holds: the snapshot at its start is where it may go on.
            return OffsetAndEpoch(earliest.epoch, earliest.end_offset)
        return OffsetAndEpoch(found, end_offset)

    # -- damage ------------------------------------------------------------------------------------------------------

    @property
    def lacks_records(self) -> bool:
        """Damage took records that this replica may have acknowledged."""
        return self._disk.exists(f"{self.directory}/{LACKING_FILE}")

    @property
    def acknowledged_end(self) -> OffsetAndEpoch | None:
        """What this voter has acknowledged at most, also where damage has taken it since; None: unknown."""
        return self._acknowledged.end

    def remember_acknowledged(self, end_offset: int | None = None) -> None:
        """All that is synced, up to `end_offset`, may be acknowledged from now on. Raises OSError."""
        if not self._remembers:
            return
        end_offset = self.synced_offset if end_offset is None else min(end_offset, self.synced_offset)
        epoch = self.last_epoch
        if end_offset < self.end_offset:
            epoch = max(self._log.leader_epochs.epoch_for_offset(end_offset - 1), 0)
        end, lost = OffsetAndEpoch(epoch, end_offset), self._acknowledged.end
        if self._is_lacking:
            if lost is None:
                return
            end = max(end, lost)  # what it lacks stays acknowledged
        self._acknowledged.write(end)

    def _judge_loss(self, may_believe: bool) -> None:
        """After a start: whether what is left is less than this voter has acknowledged."""
        acknowledged = self._acknowledged.read() if may_believe else None
        left = OffsetAndEpoch(self.last_epoch, self.end_offset)
        if acknowledged is None:
            if self.lacks_records:
                self._acknowledged.forget()
        elif left < acknowledged:
            self._acknowledged.write(acknowledged)
            self.lose(f"the log ends at offset {left.end_offset}, up to {acknowledged.end_offset} it was acknowledged")
        elif self.lacks_records:
            self.recovered(f"what is cut off behind offset {left.end_offset} was not acknowledged by this voter")
        self._is_lacking = self.lacks_records
        self.remember_acknowledged()

    def close(self) -> None:
        """The log itself is its directory's to close. Raises OSError."""
        self._acknowledged.close()

    @property
    def lacks_unfinished_batch_only(self) -> bool:
        """All that was cut is a batch of which a part was there, as a kill leaves it in the middle of a write."""
        path = f"{self.directory}/{LACKING_FILE}"
        return self._disk.exists(path) and self._disk.read_file(path) == UNFINISHED

    def lose(self, why: str) -> None:
        """Say so on the device, before anything is cut."""
        self.damage = self.damage or why
        logger.error("%s: %s", self.directory, why)
        note_loss(self._disk, self.directory)
        self._is_lacking = True

    def recovered(self, why: str = "what was lost to damage has been fetched again") -> None:
        """All that was committed is here again, on the device."""
        logger.warning("%s: %s", self.directory, why)
        self._is_lacking = False
        self._disk.remove(f"{self.directory}/{LACKING_FILE}")
        self._disk.sync_directory(self.directory)

    @property
    def is_damaged(self) -> bool:
        """Whether records are known to be damaged."""
        return bool(self._log.damaged_ranges())

    def _examine(self) -> None:
        """Every record is read here, whatever the last stop was like."""
        if self.lacks_records:
            self.damage = "it lacks records that were damaged"
        for segment in self._log.segments:
            segment.findings = segment.examine()
            self._log.adopt_findings(segment)

    def cut_damage(self, committed_offset: int = 0) -> None:
        """End the log before its first damaged record. Raises OSError, CorruptLog.

        What is known of the voters below `committed_offset` stays known.
        """
        ranges = self._log.damaged_ranges()
        if not ranges:
            return
        segment, first = ranges[0]
        self.lose(describe(first))
        self._keep_damaged(segment)
        self._log.truncate_to(first.first_offset)
        if self._log.damaged_ranges():  # the cut was within it
            self._log.truncate_to(max(first.first_offset - 1, self._log.log_start_offset))
        self._voters_known_below = max(self.end_offset, committed_offset)
        self._voters.truncate_to(self._voters_known_below)

    def _keep_damaged(self, segment: Segment) -> None:
        """A copy, for an operator who has no other one."""
        size_bytes = min(segment.size_bytes, self._disk.size_of(segment.path))
        self._disk.copy_prefix(segment.path, f"{segment.path}.damaged", size_bytes)

    def replace_damage(self, identity: SnapshotId) -> bool:
        """Begin the log anew at the end of a whole snapshot that holds all that is damaged; False where none does.

        The records behind the snapshot stay. Raises OSError, CorruptLog.
        """
        ranges = self._log.damaged_ranges()
        if not ranges or ranges[-1][1].end_offset > identity.end_offset or identity.end_offset > self.end_offset:
            return False
        rest, first_offset = bytearray(), identity.end_offset
        for header, region, position in self._batches(identity.end_offset, self.end_offset):
            first_offset = min(first_offset, header.base_offset)
            rest += memoryview(region)[position : position + header.size_bytes]
        if first_offset < identity.end_offset:
            return False  # the snapshot ends within a batch
        logger.warning("%s: %s; snapshot %s has the same", self.directory, describe(ranges[0][1]), identity)
        was_lacking = self.lacks_records
        if rest and not was_lacking:
            note_loss(self._disk, self.directory)  # until those records are on the device again
        self._keep_damaged(ranges[0][0])
        self._log.truncate_fully_and_start_at(identity.end_offset)
        if rest:
            self._log.append_as_follower(memoryview(rest), self._log.clock_ms)
            self._log.flush()
            if not was_lacking:
                self.recovered("the records behind the snapshot are kept")
        self.remember_acknowledged()
        return True

    def check_snapshots(self) -> bool:
        """Whether one of those on the disk is damaged. May run on any thread. Raises OSError."""
        self._damaged_snapshots = {identity for identity in list(self._snapshots) if self._is_damaged(identity)}
        return bool(self._damaged_snapshots)

    def _is_damaged(self, identity: SnapshotId) -> bool:
        try:
            decode_snapshot(self._disk.read_file(self.path_of(identity)))
        except FileNotFoundError:
            return False  # it was removed meanwhile
        except (CorruptSnapshot, KafkaError):
            return True
        return False

    def remove_damaged_snapshots(self) -> None:
        """As far as the log reaches to its start without them. Raises OSError."""
        for identity in sorted(self._damaged_snapshots & set(self._snapshots)):
            logger.error("%s is damaged", self.path_of(identity))
            newest_whole = max((one for one in self._snapshots if one not in self._damaged_snapshots), default=None)
            if self.start_offset == 0 or (newest_whole is not None and newest_whole > identity):
                self._remove_snapshot(identity)
        self._damaged_snapshots.clear()

    def _newest_whole_snapshot(self) -> tuple[SnapshotId, Snapshot] | None:
        """Damaged ones are removed; then an older one, with the records behind it, has the same."""
        while self._snapshots:
            identity = self._snapshots[-1]
            try:
                return identity, decode_snapshot(self._disk.read_file(self.path_of(identity)))
            except (CorruptSnapshot, KafkaError) as error:
                logger.error("%s is removed: %s", self.path_of(identity), error)
                self.damage = self.damage or f"{snapshot_name(identity)} is damaged"
                self._remove_snapshot(identity)
        return None

    # -- reading -----------------------------------------------------------------------------------------------------

    def load(self, *, is_voter: bool = False, keeps_writes: bool = False) -> tuple[SnapshotId, Snapshot] | None:
        """The newest snapshot, and the voters out of it and the log. Raises CorruptSnapshot, CorruptLog.

        `keeps_writes`: all that the last process wrote is in its files.
        """
        self._remembers = is_voter
        newest = self._load()
        if is_voter:
            self._judge_loss(keeps_writes)
        return newest

    def _load(self) -> tuple[SnapshotId, Snapshot] | None:
        names = [entry.name for entry in self._disk.list_directory(self.directory)]
        for name in names:
            if ".checkpoint." in name:  # `.part`: not finished; `.deleted`: Kafka's, about to be removed
                self._disk.remove(f"{self.directory}/{name}")
        found = [identity for identity in map(parse_snapshot_name, names) if identity is not None]
        self._snapshots = sorted(identity for identity in found if identity.end_offset >= self.start_offset)
        for identity in found:
            if identity.end_offset < self.start_offset:  # the records between it and the log are gone
                self._disk.remove(self.path_of(identity))
        self._examine()
        had_snapshots = bool(self._snapshots)
        newest = self._newest_whole_snapshot()
        if newest is None or not self.replace_damage(newest[0]):
            self.cut_damage()
        if newest is None:
            if self.start_offset > 0:
                if not had_snapshots:
                    self.damage = f"starts at {self.start_offset} and there is no snapshot before"
                self.lose(self.damage)
                self._log.truncate_fully_and_start_at(0)
            self._scan(0)
            return None
        self._adopt(*newest)
        return newest

    def _adopt(self, identity: SnapshotId, snapshot: Snapshot) -> None:
        if not self.holds(identity):
            self._log.truncate_fully_and_start_at(identity.end_offset)
        self._voters.clear()
        self._voters_known_below = 0
        if snapshot.kraft_version > 0:
            self._voters.add_version(identity.end_offset - 1, snapshot.kraft_version)
        if snapshot.voters is not None:
            self._voters.add_voters(identity.end_offset - 1, voters_from_record(snapshot.voters))
        self._scan(max(self.start_offset, identity.end_offset))

    def holds(self, identity: SnapshotId) -> bool:
        """Whether the log begins where the snapshot ends, or has the record that the snapshot ends with.

        Else the log ends before it, or went another way: the snapshot is of what was committed, so the log begins anew
        behind it. (Kafka compares the last epochs, and keeps a log that ends below the snapshot in a later epoch.)
        """
        if identity.end_offset <= self.start_offset:
            return True
        if identity.end_offset > self.end_offset:
            return False
        return self._log.leader_epochs.epoch_for_offset(identity.end_offset - 1) in (identity.epoch, -1)

    def _scan(self, offset: int) -> None:
        """Take over the voters that control records from `offset` on name."""
        for header, region, position in self._batches(offset, self.end_offset):
            self._take_over(region, position, header)

    def _take_over(self, batches: Bytes, position: int, header: BatchHeader) -> None:
        for record in decode_batch(batches, position, header) if header.is_control else ():
            if record.offset < self._voters_known_below:
                continue
            kind = control_record_type(record.key)
            if kind is ControlRecordType.KRAFT_VERSION:
                version = KRaftVersionRecord.decode(record.value or b"", 0).k_raft_version
                self._voters.add_version(record.offset, version)
            elif kind is ControlRecordType.KRAFT_VOTERS:
                voters = voters_from_record(VotersRecord.decode(record.value or b"", 0))
                self._voters.add_voters(record.offset, voters)

    def read(self, offset: int, end_offset: int) -> Iterator[ReplayedBatch]:
        for header, region, position in self._batches(offset, end_offset):
            values: list[bytes] = []
            if not header.is_control:
                values = [record.value or b"" for record in decode_batch(region, position, header)]
            yield ReplayedBatch(header.last_offset, header.partition_leader_epoch, header.max_timestamp, values)

    def _batches(self, offset: int, end_offset: int) -> Iterator[tuple[BatchHeader, Region, int]]:
        while offset < end_offset:
            try:
                result = self._log.read(offset, READ_BYTES, end_offset)
            except ColdRead as cold:
                cold.warm()
                continue
            assert result.regions, "a read below the log end finds a batch"
            for region in result.regions:
                for position, header in iter_headers(region):
                    if header.last_offset >= offset:
                        yield header, region, position
                        offset = header.next_offset

    def records_from(self, offset: int, bytes_max: int) -> bytes:
        """Whole batches, as they lie. Raises ColdRead."""
        return b"".join(self._log.read(offset, bytes_max, self.end_offset).regions)

    def bootstrap_values(self) -> list[bytes]:
        """What Kafka's `format` left for the first start; empty where Tidelog formats by itself."""
        path = f"{self._root}/{BOOTSTRAP_NAME}"
        if not self._disk.exists(path):
            return []
        try:
            return decode_snapshot(self._disk.read_file(path)).values
        except (CorruptSnapshot, KafkaError) as error:
            raise CorruptSnapshot(f"{path}: {error}. Format the directory again, it holds no metadata yet") from None

    # -- writing -----------------------------------------------------------------------------------------------------

    def append_values(self, values: Sequence[bytes], epoch: int, now_ms: int) -> int:
        """One batch, all or nothing; the offset of its last record."""
        return self._append(encode_batch([(now_ms, None, value, ()) for value in values]), epoch, now_ms)

    def append_leader_change(self, change: AppendLeaderChange, leader_id: int, now_ms: int) -> int:
        # Version 1 would name directories, but Kafka 4.3 writes 0 and takes whatever it finds for 0.
        message = LeaderChangeMessage(
            version=0,
            leader_id=leader_id,
            voters=[LeaderChangeMessageVoter(voter_id=one.key.id) for one in change.voters],
            granting_voters=[LeaderChangeMessageVoter(voter_id=key.id) for key in change.granting],
        )
        records = [(ControlRecordType.LEADER_CHANGE, message.encode(0))]
        if change.voters_now is not None:
            records += _voters_records(self._voters.kraft_version, change.voters_now)
        return self._append_control(records, change.epoch, now_ms)

    def append_voters(self, voters: VoterSet, epoch: int, now_ms: int) -> int:
        record = (ControlRecordType.KRAFT_VOTERS, voters_record(voters).encode(0))
        return self._append_control([record], epoch, now_ms)

    def _append_control(self, records: Sequence[tuple[ControlRecordType, bytes]], epoch: int, now_ms: int) -> int:
        batch = encode_control_records(records, timestamp=now_ms)
        last = self._append(batch, epoch, now_ms)
        for position, header in iter_headers(batch):
            self._take_over(batch, position, header)
        return last

    def _append(self, batch: bytearray, epoch: int, now_ms: int) -> int:
        return self._log.append_as_leader(memoryview(batch), epoch, now_ms, from_client=False).last_offset

    def append_replicated(self, records: Bytes, now_ms: int) -> None:
        """What the leader sent. Raises KafkaError for what is damaged, OSError; part of it may be in the log then."""
        first = self.end_offset
        try:
            self._log.append_as_follower(memoryview(records), now_ms)
        finally:
            # Not read back: whoever is out of descriptors would have a log whose voters he does not know.
            for position, header in iter_headers(records) if self.end_offset > first else ():
                if header.base_offset < self.end_offset:
                    self._take_over(records, position, header)

    def truncate_to(self, end_offset: int) -> None:
        self.remember_acknowledged(end_offset)  # first: else a kill in between would look like a loss
        self._log.truncate_to(end_offset)
        self._voters.truncate_to(self.end_offset)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def path_of(self, identity: SnapshotId) -> str:
        return f"{self.directory}/{snapshot_name(identity)}"

    def write_snapshot(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> None:
        """Beside the log, complete or not at all. May run on any thread: touches nothing but its own file."""
        kraft_version, voters = self._voters.at(identity.end_offset)
        record = None if voters is None else voters_record(voters)
        content = encode_snapshot(values, identity, last_timestamp_ms, now_ms, kraft_version, record)
        self._disk.write_file(self.path_of(identity) + OWN_PART, content, sync=True)
        self._rename_part(identity, OWN_PART)

    def _rename_part(self, identity: SnapshotId, suffix: str) -> None:
        path = self.path_of(identity)
        self._disk.rename(path + suffix, path)
        self._disk.sync_directory(self.directory)

    def snapshot_part(self, identity: SnapshotId, position: int, bytes_max: int) -> tuple[int, bytes] | None:
        """(size of the whole, bytes from `position` on); None when it is not there. Raises OSError."""
        if identity not in self._snapshots:
            return None
        try:
            size_bytes = self._disk.size_of(self.path_of(identity))
            file = self._disk.open(self.path_of(identity))
        except FileNotFoundError:
            return None
        try:
            # Beyond the end the system may take the position itself for an error.
            return size_bytes, file.read_at(bytes_max, position) if position < size_bytes else b""
        finally:
            file.close()

    def keep_part(self, identity: SnapshotId, position: int, data: Bytes) -> None:
        """A piece of a snapshot that is being fetched; the first one begins it anew."""
        path = self.path_of(identity) + FETCHED_PART
        if position == 0:
            self._disk.write_file(path, bytes(data), sync=False)
            return
        file = self._disk.open(path)
        try:
            data = memoryview(data)
            while data:
                written = file.write_at(data, position)
                data, position = data[written:], position + written
        finally:
            file.close()

    def finish_part(self, identity: SnapshotId) -> Snapshot:
        """Check and sync what was fetched; any thread. Raises CorruptSnapshot."""
        path = self.path_of(identity) + FETCHED_PART
        snapshot = decode_snapshot(self._disk.read_file(path))
        self._disk.sync_file(path)
        self._rename_part(identity, FETCHED_PART)
        return snapshot

    def install(self, identity: SnapshotId, snapshot: Snapshot, now_ms: int) -> None:
        """Begin the log at the end of a snapshot that was fetched; on the loop's thread."""
        self._adopt(identity, snapshot)
        self.note_snapshot(identity)
        self.remember_acknowledged()
        for older in [one for one in self._snapshots if one.end_offset < self.start_offset]:
            self._remove_snapshot(older)
        self._log.segments.remove_doomed(now_ms)

    def note_snapshot(self, identity: SnapshotId) -> None:
        """It is on the disk, whole, and can be fetched from now on."""
        if identity.end_offset < self.start_offset:
            # The log was begun anew behind a fetched one while it was written: nothing leads from it to the log.
            self._disk.remove(self.path_of(identity))
            return
        if identity not in self._snapshots:
            self._snapshots = sorted([*self._snapshots, identity])

    # -- retention ---------------------------------------------------------------------------------------------------

    def clean(self, retention: MetadataRetention, now_ms: int) -> None:
        """Remove old snapshots and the segments below them as far as `retention` says; then files whose time has come.

        The log start only ever moves to the end of a snapshot that stays: there a follower that is further behind goes
        on. Raises OSError; the next call goes on where this one stopped.
        """
        while len(self._snapshots) > 1:
            oldest, successor = self._snapshots[:2]
            facts = [self._facts_of(identity) for identity in self._snapshots]
            if not retention.lets_oldest_go(facts, self._log.size_bytes, now_ms):
                break
            if successor.end_offset > self._log.high_watermark:
                break  # of the records below nothing is known yet
            self._log.delete_records(successor.end_offset)
            self._voters.forget_before(successor.end_offset)
            self._remove_snapshot(oldest)
            self._drop_segments(now_ms)
        self._drop_segments(now_ms)

    def _drop_segments(self, now_ms: int) -> None:
        """Those below the log start, one by one and durably: a crash leaves a log without gaps."""
        segments = self._log.segments
        if self.start_offset > 0:
            self._log.maintain(now_ms)
        for end_offset in sorted(segment.next_offset for segment in segments.condemned):
            segments.rename_condemned(end_offset, now_ms + self._log.config.file_delete_delay_ms)
            self._disk.sync_directory(self.directory)
        segments.remove_doomed(now_ms)

    def _remove_snapshot(self, identity: SnapshotId) -> None:
        """Durably, before any segment goes: after a crash the log begins at the end of the oldest snapshot."""
        self._disk.remove(self.path_of(identity))
        self._disk.sync_directory(self.directory)
        self._snapshots.remove(identity)
        self._snapshot_facts.pop(identity, None)

    def _facts_of(self, identity: SnapshotId) -> SnapshotFacts:
        facts = self._snapshot_facts.get(identity)
        if facts is None:
            part = self.snapshot_part(identity, 0, SNAPSHOT_HEAD_BYTES)
            size_bytes, head = part if part is not None else (0, b"")
            timestamp_ms = last_timestamp_in(head)
            if timestamp_ms is None:  # damaged: it goes by the age of its file
                timestamp_ms = self._disk.modified_ms(self.path_of(identity)) if part is not None else 0
            facts = self._snapshot_facts[identity] = SnapshotFacts(size_bytes, timestamp_ms)
        return facts


def log_start_in(names: Iterable[str]) -> int:
    """Where the log begins whose directory holds files of these names: the file names are all that remembers it.

    A log whose first segment is gone begins at the end of the oldest snapshot that reaches to its segments.
    """
    names = list(names)
    bases = [int(name[:20]) for name in names if name.endswith(".log") and name[:20].isdecimal()]
    first = min(bases, default=0)
    snapshots = (parse_snapshot_name(name) for name in names)
    ends = [one.end_offset for one in snapshots if one is not None and one.end_offset >= first]
    return min(ends, default=0) if first else 0


def _voters_records(kraft_version: int, voters: VoterSet) -> list[tuple[ControlRecordType, bytes]]:
    version = KRaftVersionRecord(version=0, k_raft_version=kraft_version)
    return [
        (ControlRecordType.KRAFT_VERSION, version.encode(0)),
        (ControlRecordType.KRAFT_VOTERS, voters_record(voters).encode(0)),
    ]


__all__ = ["CorruptSnapshot", "MetadataLog", "ReplayedBatch", "log_start_in"]
