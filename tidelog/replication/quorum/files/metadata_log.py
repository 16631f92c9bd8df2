"""`__cluster_metadata-0` on the disk: the log, the snapshots beside it, and the control records in both.

It keeps the voters' history consistent with the log. Other modules decide on appends, truncations and loads. All
methods run on the loop's thread, except those that say so.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tidelog.protocol.batches.control_batches import encode_control_records
from tidelog.protocol.batches.record_batch import (
    LEADER_EPOCH_OFFSET,
    BatchHeader,
    check_crc,
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
from tidelog.replication.quorum.files.records_lost import LACKING_FILE, UNFINISHED, note_loss
from tidelog.replication.quorum.raft.messages import AppendLeaderChange, Bytes, OffsetAndEpoch
from tidelog.replication.quorum.raft.metadata_retention import SNAPSHOTS_KEPT_MIN, MetadataRetention, SnapshotFacts
from tidelog.replication.quorum.raft.snapshot import (
    BOOTSTRAP_NAME,
    SUFFIX,
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
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import describe
from tidelog.storage.segments.examination import UNKNOWN_END, Examiner, WholeBatch
from tidelog.storage.segments.reader import ColdRead, Region, is_whole, position_of, walk
from tidelog.storage.segments.segment import LOG_SUFFIX

if TYPE_CHECKING:
    from tidelog.storage.segments.segment import Segment

logger = logging.getLogger("tidelog.quorum")

CLEANED_AT_ONCE_MAX: Final = 20
READ_BYTES = 4 * 1024 * 1024
SNAPSHOT_HEAD_BYTES = 64 * 1024
OWN_PART = ".part"
KEPT_SUFFIX = ".damaged"
FETCHED_PART = ".fetched.part"  # not OWN_PART, because this node may write the same snapshot meanwhile


class ReplayedBatch(NamedTuple):
    """The values of a batch's metadata records, and the offset of its last record (control records included)."""

    last_offset: int
    epoch: int
    timestamp_ms: int
    values: list[bytes]


class MetadataLog:
    """`root`: the log directory that holds `__cluster_metadata-0`, whose log is `log`. Call `load` first."""

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
        self._epoch_max: int | None = None
        """The bound of the records' leader epochs; None while nothing contradicts them."""
        self.damage = ""
        """A description of the damage for the operator."""

    # -- raft's view -------------------------------------------------------------------------------------------------

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
            # No record is newer than the snapshot. The log's epoch checkpoint may date from before it was emptied.
            return max(latest, newest.epoch)
        return latest

    @property
    def snapshots(self) -> tuple[SnapshotId, SnapshotId] | None:
        return (self._snapshots[0], self._snapshots[-1]) if self._snapshots else None

    def end_of_epoch(self, epoch: int) -> OffsetAndEpoch:
        end_epoch, end_offset = self._log.end_offset_for_epoch(epoch)
        if end_epoch < 0:
            return OffsetAndEpoch(self.last_epoch, self.end_offset)
        earliest = self._snapshots[0] if self._snapshots else None
        if earliest is not None and end_epoch == epoch and end_offset == earliest.end_offset:
            # The epoch is older than all records, and the snapshot at the log start holds its end.
            return OffsetAndEpoch(earliest.epoch, earliest.end_offset)
        return OffsetAndEpoch(end_epoch, end_offset)

    def identity_of(self, end_offset: int) -> SnapshotId:
        end_offset = max(end_offset, self.start_offset)
        for identity in self._snapshots:
            if identity.end_offset == end_offset:
                return identity
        return SnapshotId(end_offset, self._log.leader_epochs.epoch_for_offset(end_offset - 1))

    # -- damage ------------------------------------------------------------------------------------------------------

    @property
    def lacks_records(self) -> bool:
        """Whether damage has removed records that this replica may have acknowledged."""
        return self._disk.exists(f"{self.directory}/{LACKING_FILE}")

    @property
    def acknowledged_end(self) -> OffsetAndEpoch | None:
        """The upper bound of this voter's acknowledgements, lost records included; None if unknown."""
        return self._acknowledged.end

    def remember_acknowledged(self, end_offset: int | None = None) -> None:
        """Record that synced records up to `end_offset` may be acknowledged. Raises OSError."""
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
            end = max(end, lost)  # lost records stay acknowledged
        self._acknowledged.write(end)

    def _judge_loss(self, may_believe: bool) -> None:
        """At a start, detect whether the log is shorter than this voter has acknowledged."""
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
        """Close the file of acknowledgements; the log directory closes the log. Raises OSError."""
        self._acknowledged.close()

    @property
    def lacks_unfinished_batch_only(self) -> bool:
        """Whether only an incomplete last batch was truncated, which a kill during a write leaves."""
        path = f"{self.directory}/{LACKING_FILE}"
        return self._disk.exists(path) and self._disk.read_file(path) == UNFINISHED

    def lose(self, why: str) -> None:
        """Record a loss durably, before the truncation."""
        self.damage = self.damage or why
        logger.error("%s: %s", self.directory, why)
        note_loss(self._disk, self.directory)
        self._is_lacking = True

    def recovered(self, why: str = "what was lost to damage has been fetched again") -> None:
        """Record that all committed records are on the device again."""
        logger.warning("%s: %s", self.directory, why)
        self._is_lacking = False
        self._disk.remove(f"{self.directory}/{LACKING_FILE}")
        self._disk.sync_directory(self.directory)

    @property
    def is_damaged(self) -> bool:
        """Whether records are known to be damaged."""
        return bool(self._log.damaged_ranges())

    def _examine(self) -> None:
        """Check every record, even after a clean stop."""
        if self.lacks_records:
            self.damage = "it lacks records that were damaged"
        for segment in self._log.segments:
            segment.findings = segment.examine()
            self._log.adopt_findings(segment)
        if self._epoch_max is not None:
            self._log.doubt_epochs_above(self._epoch_max)

    def _credible_epoch(self, may_believe: bool) -> int:
        """The leader epoch of the last record, or the one before it if nothing confirms the last.

        No CRC covers the epoch, and no record follows the last one. A later epoch than the quorum has had would make
        this replica's log the newest of all: it would be elected without records that the others have committed.
        """
        acknowledged = self._acknowledged.read() if may_believe else None
        if acknowledged is not None and acknowledged.end_offset == self.end_offset:
            return acknowledged.epoch
        epochs = list(self._log.leader_epochs)
        if not epochs or not self.start_offset <= epochs[-1][1] < self.end_offset:
            return self.last_epoch
        epoch, start = epochs.pop()
        earlier = [each for each, _ in epochs] or [one.epoch for one in self._snapshots if one.end_offset == start]
        if not earlier or epoch <= earlier[-1] or self._begins_epoch(start):
            return self.last_epoch
        return earlier[-1]

    def _write_last_epoch(self, epoch: int) -> None:
        """Write this epoch into the batches of the last, false one. No CRC covers it. Raises OSError."""
        _, start = list(self._log.leader_epochs)[-1]
        logger.error("%s: the records from offset %d on are of leader epoch %d", self.directory, start, epoch)
        for segment in self._log.segments.from_offset(start):
            for position, base_offset, _, _ in walk(segment, position_of(segment, start, wait=True), wait=True):
                if base_offset >= start:
                    segment.file.write_at(struct.pack(">i", epoch), position + LEADER_EPOCH_OFFSET)
            segment.file.sync()
        self._log.leader_epochs.forget_above(epoch, ())

    def _begins_epoch(self, offset: int) -> bool:
        """Whether the batch at `offset` has a LeaderChange record. A leader appends it before any other record."""
        header, region, position = next(self._batches(offset, self.end_offset))
        records = decode_batch(region, position, header) if header.is_control else ()
        return any(control_record_type(record.key) is ControlRecordType.LEADER_CHANGE for record in records)

    def cut_damage(self, committed_offset: int = 0) -> None:
        """Truncate the log before its first damaged record. Raises OSError, CorruptLog.

        The voters' history below `committed_offset` stays.
        """
        ranges = self._log.damaged_ranges()
        if not ranges:
            return
        segment, first = ranges[0]
        if not self.lacks_records:  # copies of an earlier loss, which was repaired, may have been truncated since
            self._remove_kept_copies()
        self.lose(describe(first))
        for each in self._log.segments.from_offset(segment.base_offset):
            if not self._disk.exists(each.path + KEPT_SUFFIX):  # the copy of a loss that is not repaired has more
                self._keep_damaged(each)
        self._log.truncate_to(first.first_offset)
        if self._log.damaged_ranges():  # the damaged range began before the truncation offset
            self._log.truncate_to(max(first.first_offset - 1, self._log.log_start_offset))
        self._voters_known_below = max(self.end_offset, committed_offset)
        self._voters.truncate_to(self._voters_known_below)

    def _keep_damaged(self, segment: Segment) -> None:
        """Copy the damaged segment, because the operator may have no other copy."""
        size_bytes = min(segment.size_bytes, self._disk.size_of(segment.path))
        self._disk.copy_prefix(segment.path, f"{segment.path}{KEPT_SUFFIX}", size_bytes)

    @property
    def is_restored(self) -> bool:
        """Whether the log, on the device, reaches as far again as this voter has acknowledged."""
        lost = self._acknowledged.end
        is_synced = self.synced_offset >= self.end_offset
        return lost is not None and is_synced and OffsetAndEpoch(self.last_epoch, self.end_offset) >= lost

    def restore(self, records: Bytes, now_ms: int) -> int:
        """Append another voter's records from the log end on. Returns the new log end.

        They are appended up to the end that this voter has acknowledged, if they have the same leader epoch there. Or
        they are appended up to a batch that the kept copy of this log has too, and then the rest comes from the copy.
        If neither is in the records, the log stays as it is.

        Raises KafkaError for damaged records, OSError, CorruptLog; the log may then have a part.
        """
        fetched: dict[int, memoryview] = {}
        offset = self.end_offset
        for position, header in iter_headers(records):
            if header.base_offset != offset or not check_crc(records, position, header):
                break
            fetched[offset] = memoryview(records)[position : position + header.size_bytes]
            offset = header.next_offset
            if OffsetAndEpoch(header.partition_leader_epoch, offset) == self._acknowledged.end:
                self.append_replicated(b"".join(fetched.values()), now_ms)
                return self.end_offset
        for header, batch in self._kept_batches():
            if header.base_offset > self.end_offset and fetched.get(header.base_offset) == batch:
                for base_offset in [each for each in fetched if each < header.base_offset]:
                    self.append_replicated(fetched[base_offset], now_ms)
                fetched.clear()
            # A later leader may have replaced what was kept. Then the kept batches are of an earlier epoch.
            is_of_log = header.partition_leader_epoch >= self.last_epoch
            if header.base_offset == self.end_offset and not fetched and is_of_log:
                self.append_replicated(batch, now_ms)
        return self.end_offset

    def _kept_names(self) -> list[str]:
        return [name for name in self.kept_files if name.endswith(LOG_SUFFIX + KEPT_SUFFIX) and name[:20].isdecimal()]

    @property
    def kept_files(self) -> list[str]:
        """The names of what a start has kept of damaged files."""
        names = [entry.name for entry in self._disk.list_directory(self.directory)]
        return sorted(name for name in names if name.endswith((LOG_SUFFIX + KEPT_SUFFIX, SUFFIX + KEPT_SUFFIX)))

    def _remove_kept_copies(self) -> None:
        for name in self.kept_files:
            self._disk.remove(f"{self.directory}/{name}")

    def _kept_batches(self) -> Iterator[tuple[BatchHeader, memoryview]]:
        """The whole batches in the copies of damaged segments."""
        for name in self._kept_names():
            file = self._disk.open(f"{self.directory}/{name}")
            try:
                for each in Examiner(file.read_at, file.size_bytes(), int(name[:20]), end_offset=UNKNOWN_END).run():
                    if isinstance(each, WholeBatch):
                        yield each.header, each.data[: each.header.size_bytes]
            finally:
                file.close()

    def replace_damage(self, identity: SnapshotId) -> bool:
        """Restart the log at the end of a snapshot that covers all damaged records. Returns False if it does not.

        The records after the snapshot stay. Raises OSError, CorruptLog.
        """
        ranges = self._log.damaged_ranges()
        if not ranges or ranges[-1][1].end_offset > identity.end_offset or identity.end_offset > self.end_offset:
            return False
        rest, first_offset = bytearray(), identity.end_offset
        for header, region, position in self._batches(identity.end_offset, self.end_offset):
            first_offset = min(first_offset, header.base_offset)
            rest += memoryview(region)[position : position + header.size_bytes]
        if first_offset < identity.end_offset:
            return False  # the snapshot ends inside a batch
        logger.warning("%s: %s; snapshot %s has the same", self.directory, describe(ranges[0][1]), identity)
        was_lacking = self.lacks_records
        if rest and not was_lacking:
            note_loss(self._disk, self.directory)  # until the records after the snapshot are on the device again
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
        """Whether a snapshot on the disk is damaged, or there are too few. May run on any thread. Raises OSError."""
        self._damaged_snapshots = {identity for identity in list(self._snapshots) if self._is_damaged(identity)}
        usable = [each for each in self._snapshots if each.end_offset >= self.start_offset]
        is_last = self.start_offset > 0 and len(usable) < SNAPSHOTS_KEPT_MIN
        return bool(self._damaged_snapshots) or (is_last and all(each.end_offset < self.end_offset for each in usable))

    def _is_damaged(self, identity: SnapshotId) -> bool:
        try:
            decode_snapshot(self._disk.read_file(self.path_of(identity)))
        except FileNotFoundError:
            return False  # it was removed meanwhile
        except (CorruptSnapshot, KafkaError):
            return True
        return False

    def remove_damaged_snapshots(self) -> None:
        """Remove the damaged snapshots, if the newest whole one and the records after it, or a log that starts at
        offset 0, have the same content. Raises OSError.
        """
        whole = [one for one in self._snapshots if one not in self._damaged_snapshots]
        for identity in sorted(self._damaged_snapshots & set(self._snapshots)):
            logger.error("%s is damaged", self.path_of(identity))
            if self.start_offset <= (whole[-1].end_offset if whole else 0):
                self._remove_snapshot(identity)
        self._damaged_snapshots.clear()

    def _newest_whole_snapshot(self) -> tuple[SnapshotId, Snapshot] | None:
        """Load the newest whole snapshot and remove damaged ones, if it and the records after it, or a log that starts
        at offset 0, have the same content. Otherwise they stay.
        """
        newest, damaged = None, []
        for identity in reversed(self._snapshots):
            try:
                newest = identity, decode_snapshot(self._disk.read_file(self.path_of(identity)))
                break
            except (CorruptSnapshot, KafkaError) as error:
                logger.error("%s: %s", self.path_of(identity), error)
                self.damage = self.damage or f"{snapshot_name(identity)} is damaged"
                damaged.append(identity)
        for identity in damaged if self.start_offset <= _end_of(newest) else ():
            self._remove_snapshot(identity)
        return newest

    def _begin_anew(self, end_offset: int) -> None:
        """Records before the log start are in no whole snapshot: the newest one ends at `end_offset`, 0 without one.
        Keep all files, and begin the log there.
        """
        damaged = [each for each in self._snapshots if each.end_offset > end_offset]
        if not damaged:
            before = f"the newest snapshot ends at {end_offset}" if end_offset else "there is no snapshot before"
            self.damage = f"starts at {self.start_offset} and {before}"
        if not self.lacks_records:
            self._remove_kept_copies()
        self.lose(self.damage)
        for segment in self._log.segments:
            if not self._disk.exists(segment.path + KEPT_SUFFIX):
                self._keep_damaged(segment)
        for identity in damaged:
            self._disk.rename(self.path_of(identity), self.path_of(identity) + KEPT_SUFFIX)
            self._snapshots.remove(identity)
        self._log.truncate_fully_and_start_at(end_offset)

    # -- reading -----------------------------------------------------------------------------------------------------

    def load(self, *, is_voter: bool = False, keeps_writes: bool = False) -> tuple[SnapshotId, Snapshot] | None:
        """Return the newest snapshot, and load the voters from it and the log. Raises CorruptSnapshot, CorruptLog.

        `keeps_writes`: the files contain all writes of the previous process.
        """
        newest = self._load()
        epoch_max = self._credible_epoch(is_voter and keeps_writes)
        if epoch_max < self.last_epoch:
            if is_voter and len(self._voters.latest.ids) <= 1:
                self._write_last_epoch(epoch_max)  # no other voter has a copy
            else:
                self._epoch_max = epoch_max
            newest = self._load()
        self._remembers = is_voter  # not before: the end of a log that damage has shortened would hide the loss
        if is_voter:
            self._judge_loss(keeps_writes)
        return newest

    def _load(self) -> tuple[SnapshotId, Snapshot] | None:
        names = [entry.name for entry in self._disk.list_directory(self.directory)]
        for name in names:
            # `.part`: incomplete; `.deleted`: Kafka would remove it soon
            if ".checkpoint." in name and not name.endswith(KEPT_SUFFIX):
                self._disk.remove(f"{self.directory}/{name}")
        self._snapshots = sorted(identity for identity in map(parse_snapshot_name, names) if identity is not None)
        self._examine()
        newest = self._newest_whole_snapshot()
        if self.start_offset > _end_of(newest):
            self._begin_anew(_end_of(newest))
        elif newest is None or not self.replace_damage(newest[0]):
            self.cut_damage()
        for older in [each for each in self._snapshots if each.end_offset < self.start_offset]:
            self._remove_snapshot(older)  # the records between it and the log are gone
        if newest is None:
            self._forget_voters()
            self._scan(0)
            return None
        self._adopt(*newest)
        return newest

    def _adopt(self, identity: SnapshotId, snapshot: Snapshot) -> None:
        if not self.holds(identity):
            self._log.truncate_fully_and_start_at(identity.end_offset)
        self._forget_voters()
        if snapshot.kraft_version > 0:
            self._voters.add_version(identity.end_offset - 1, snapshot.kraft_version)
        if snapshot.voters is not None:
            self._voters.add_voters(identity.end_offset - 1, voters_from_record(snapshot.voters))
        self._scan(max(self.start_offset, identity.end_offset))

    def _forget_voters(self) -> None:
        """Before they are read from the snapshot and the log: what a cut has left was known only to a running node."""
        self._voters.clear()
        self._voters_known_below = 0

    def holds(self, identity: SnapshotId) -> bool:
        """Whether the log starts at or after the snapshot's end, or has the snapshot's last record.

        Otherwise the log ends before the snapshot or has diverged from it. A snapshot is committed, so the log must
        restart at its end. (Kafka compares the last epochs, and keeps a log that ends below the snapshot in a later
        epoch.)
        """
        if identity.end_offset <= self.start_offset:
            return True
        if identity.end_offset > self.end_offset:
            return False
        return self._log.leader_epochs.epoch_for_offset(identity.end_offset - 1) in (identity.epoch, -1)

    def _scan(self, offset: int) -> None:
        """Adopt the voters in the control records from `offset` on."""
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
            if not is_whole(result):
                self._log.segments.distrust_from(offset)
                continue
            for region in result.regions:
                for position, header in iter_headers(region):
                    if header.last_offset >= offset:
                        yield header, region, position
                        offset = header.next_offset

    def records_from(self, offset: int, bytes_max: int, end_offset: int) -> bytes:
        """The bytes of whole batches from `offset` to `end_offset`. Raises ColdRead."""
        return b"".join(self._log.read(offset, bytes_max, end_offset).regions)

    def bootstrap_values(self) -> list[bytes]:
        """The records that Kafka's `format` wrote for the first start; empty if Tidelog formatted the directory."""
        path = f"{self._root}/{BOOTSTRAP_NAME}"
        if not self._disk.exists(path):
            return []
        try:
            return decode_snapshot(self._disk.read_file(path)).values
        except (CorruptSnapshot, KafkaError) as error:
            raise CorruptSnapshot(f"{path}: {error}. Format the directory again, it holds no metadata yet") from None

    # -- writing -----------------------------------------------------------------------------------------------------

    def append_values(self, values: Sequence[bytes], epoch: int, now_ms: int) -> int:
        """Append one atomic batch; returns the offset of its last record."""
        return self._append(encode_batch([(now_ms, None, value, ()) for value in values]), epoch, now_ms)

    def append_leader_change(self, change: AppendLeaderChange, leader_id: int, now_ms: int) -> int:
        # Version 1 has directory ids, but Kafka 4.3 writes version 0 and reads every version as 0.
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
        """Append the leader's records. Raises KafkaError for damaged records, OSError; the log may then have a part."""
        first = self.end_offset
        try:
            self._log.append_as_follower(memoryview(records), now_ms)
        finally:
            # Take the voters from `records`: without descriptors, reading the log back would fail and lose them.
            for position, header in iter_headers(records) if self.end_offset > first else ():
                if header.base_offset < self.end_offset:
                    self._take_over(records, position, header)

    def truncate_to(self, end_offset: int) -> None:
        self.remember_acknowledged(end_offset)  # first, or a kill in between would look like a loss
        self._log.truncate_to(end_offset)
        self._voters.truncate_to(self.end_offset)
        self._voters_known_below = min(self._voters_known_below, self.end_offset)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def path_of(self, identity: SnapshotId) -> str:
        return f"{self.directory}/{snapshot_name(identity)}"

    def write_snapshot(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> None:
        """Write a snapshot beside the log, completely or not at all."""
        self.snapshot_writer(values, identity, last_timestamp_ms, now_ms)()

    def snapshot_writer(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> Callable[[], None]:
        """`write_snapshot` as work for any thread. It uses the voters of now.

        While the thread encodes the values, the log may begin anew behind a fetched snapshot, or read its records
        again after damage. Then the voters are unknown for a while.
        """
        kraft_version, voters = self._voters.at(identity.end_offset)
        record = None if voters is None else voters_record(voters)

        def write() -> None:
            content = encode_snapshot(values, identity, last_timestamp_ms, now_ms, kraft_version, record)
            self._disk.write_file(self.path_of(identity) + OWN_PART, content, sync=True)
            self._rename_part(identity, OWN_PART)

        return write

    def _rename_part(self, identity: SnapshotId, suffix: str) -> None:
        path = self.path_of(identity)
        self._disk.rename(path + suffix, path)
        self._disk.sync_directory(self.directory)

    def snapshot_part(self, identity: SnapshotId, position: int, bytes_max: int) -> tuple[int, bytes] | None:
        """(size of the snapshot, its bytes from `position` on), or None if it does not exist. Raises OSError."""
        if identity not in self._snapshots:
            return None
        try:
            size_bytes = self._disk.size_of(self.path_of(identity))
            file = self._disk.open(self.path_of(identity))
        except FileNotFoundError:
            return None
        try:
            # The system may refuse a read at a position far beyond the end.
            return size_bytes, file.read_at(bytes_max, position) if position < size_bytes else b""
        finally:
            file.close()

    def keep_part(self, identity: SnapshotId, position: int, data: Bytes) -> None:
        """Store a part of a fetched snapshot; a part at position 0 starts a new file."""
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
        """Check and sync a fetched snapshot. May run on any thread. Raises CorruptSnapshot."""
        path = self.path_of(identity) + FETCHED_PART
        snapshot = decode_snapshot(self._disk.read_file(path))
        self._disk.sync_file(path)
        self._rename_part(identity, FETCHED_PART)
        return snapshot

    def install(self, identity: SnapshotId, snapshot: Snapshot, now_ms: int) -> None:
        """Restart the log at the end of a fetched snapshot. Runs on the loop's thread."""
        self._adopt(identity, snapshot)
        self.note_snapshot(identity)
        self.remember_acknowledged()
        for older in [one for one in self._snapshots if one.end_offset < self.start_offset]:
            self._remove_snapshot(older)
        self._log.segments.remove_doomed(now_ms)

    def note_snapshot(self, identity: SnapshotId) -> None:
        """Offer a complete snapshot on the disk to followers."""
        if identity.end_offset < self.start_offset:
            # The log has restarted after a newer, fetched snapshot meanwhile, so records between the two are missing.
            self._disk.remove(self.path_of(identity))
            return
        if identity not in self._snapshots:
            self._snapshots = sorted([*self._snapshots, identity])

    # -- retention ---------------------------------------------------------------------------------------------------

    def clean(self, retention: MetadataRetention, now_ms: int) -> None:
        """Remove old snapshots and the segments below them by `retention`, then doomed files whose delay has ended.

        The log start moves only to the end of a remaining snapshot, so that a follower further behind can load that
        snapshot and continue. Each snapshot waits for the device, so one call removes CLEANED_AT_ONCE_MAX. Raises
        OSError; the next call continues where this one stopped.
        """
        facts = [self._facts_of(identity) for identity in self._snapshots]
        for _ in range(min(len(facts) - SNAPSHOTS_KEPT_MIN, CLEANED_AT_ONCE_MAX)):
            oldest, successor = self._snapshots[:2]
            if not retention.lets_oldest_go(facts, self._log.size_bytes, now_ms):
                break
            if successor.end_offset > self._log.high_watermark:
                break  # the records below are not known to be committed yet
            self._log.delete_records(successor.end_offset)
            self._voters.forget_before(successor.end_offset)
            self._remove_snapshot(oldest)
            del facts[0]
            self._drop_segments(now_ms)
        self._drop_segments(now_ms)

    def _drop_segments(self, now_ms: int) -> None:
        """Remove the segments below the log start one by one, durably, so that a crash leaves a log without gaps."""
        segments = self._log.segments
        if self.start_offset > 0:
            self._log.maintain(now_ms)
        for end_offset in sorted(segment.next_offset for segment in segments.condemned):
            self._log.rename_condemned(end_offset, now_ms)
            self._disk.sync_directory(self.directory)
        segments.remove_doomed(now_ms)

    def _remove_snapshot(self, identity: SnapshotId) -> None:
        """Remove a snapshot durably, before any segment, because after a crash the log starts at the end of the oldest
        snapshot.
        """
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
            if timestamp_ms is None:  # a damaged header: use the age of the file
                timestamp_ms = self._disk.modified_ms(self.path_of(identity)) if part is not None else 0
            facts = self._snapshot_facts[identity] = SnapshotFacts(size_bytes, timestamp_ms)
        return facts


def log_start_in(names: Iterable[str]) -> int:
    """The log start offset of a directory with these file names, because no file stores it.

    A log without its first segment starts at the end of the oldest snapshot that reaches its segments.
    """
    names = list(names)
    bases = [int(name[:20]) for name in names if name.endswith(".log") and name[:20].isdecimal()]
    first = min(bases, default=0)
    snapshots = (parse_snapshot_name(name) for name in names)
    ends = [one.end_offset for one in snapshots if one is not None and one.end_offset >= first]
    return min(ends, default=0) if first else 0


def _end_of(newest: tuple[SnapshotId, Snapshot] | None) -> int:
    return 0 if newest is None else newest[0].end_offset


def _voters_records(kraft_version: int, voters: VoterSet) -> list[tuple[ControlRecordType, bytes]]:
    version = KRaftVersionRecord(version=0, k_raft_version=kraft_version)
    return [
        (ControlRecordType.KRAFT_VERSION, version.encode(0)),
        (ControlRecordType.KRAFT_VOTERS, voters_record(voters).encode(0)),
    ]


__all__ = ["CorruptSnapshot", "MetadataLog", "ReplayedBatch", "log_start_in"]
