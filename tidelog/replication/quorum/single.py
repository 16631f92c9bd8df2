"""A quorum of one: this node alone writes the metadata log, so what it has synced is committed.

Reads back what a log directory holds (the newest snapshot, then the log behind it), starts a new epoch with a
LeaderChange record, appends batches of record values. Epochs, files and control records are Kafka's: a Kafka node of
the same id can take the directory over, and the reverse. What the values mean is the controller's. Synchronous: the
caller decides on which thread a sync runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog.protocol.messages.control_records import (
    KRaftVersionRecord,
    LeaderChangeMessage,
    LeaderChangeMessageVoter,
    VotersRecord,
)
from tidelog.protocol.record_batch import BatchHeader, iter_headers
from tidelog.protocol.records import (
    ControlRecordType,
    Record,
    control_record_type,
    decode_batch,
    encode_batch,
    encode_control_batch,
)
from tidelog.protocol.uuids import ZERO_UUID
from tidelog.replication.quorum.snapshot import (
    BOOTSTRAP_NAME,
    SnapshotId,
    decode_snapshot,
    encode_snapshot,
    parse_snapshot_name,
    snapshot_name,
)
from tidelog.replication.quorum.vote_store import QuorumState, VoteStore
from tidelog.storage.disk import Disk
from tidelog.storage.log import PartitionLog
from tidelog.storage.reader import ColdRead

READ_BYTES = 4 * 1024 * 1024


class NotAlone(Exception):
    """The log belongs to a quorum of several voters, or to another one."""


class ReplayedBatch(NamedTuple):
    """Values of metadata records, and the offset of the last record they come from (control records included)."""

    last_offset: int
    epoch: int
    timestamp_ms: int
    values: list[bytes]
    is_snapshot: bool = False


class QuorumOfOne:
    """`directory`: the log directory that holds `__cluster_metadata-0`, whose log is `log`."""

    def __init__(self, disk: Disk, directory: str, log: PartitionLog, node_id: int, directory_id: bytes) -> None:
        self._disk = disk
        self._root = directory
        self._directory = f"{directory}/__cluster_metadata-0"
        self._votes = VoteStore(disk, self._directory)
        self._node_id = node_id
        self._directory_id = directory_id
        self._kraft_version = 0
        self._last_epoch = 0
        self.log = log
        self.epoch = -1
        log.set_high_watermark(log.log_end_offset)

    @property
    def end_offset(self) -> int:
        return self.log.log_end_offset

    # -- what is there -----------------------------------------------------------------------------------------------

    def replay(self) -> Iterator[ReplayedBatch]:
        """The newest snapshot, then the log from its end on.

        Raises `CorruptSnapshot`, `CorruptLog`, `NotAlone`.
        """
        start = self.log.log_start_offset
        identity = max(self.snapshots(), default=None)
        if identity is not None:
            if identity.end_offset > self.end_offset:
                # A snapshot fetched from a leader, and the log not yet moved to it (Kafka does the same).
                self.log.truncate_fully_and_start_at(identity.end_offset)
            snapshot = decode_snapshot(self._disk.read_file(f"{self._directory}/{snapshot_name(identity)}"))
            self._kraft_version = snapshot.kraft_version
            self._last_epoch = identity.epoch
            start = max(start, identity.end_offset)
            yield ReplayedBatch(
                identity.end_offset - 1, identity.epoch, snapshot.last_timestamp_ms, snapshot.values, True
            )
        elif start > 0:
            raise NotAlone(f"the metadata log starts at offset {start} and there is no snapshot of what came before")
        for header, records in self._read(start):
            self._last_epoch = max(self._last_epoch, header.partition_leader_epoch)
            values: list[bytes] = []
            if header.is_control:
                for record in records:
                    self._control(record)
            else:
                values = [record.value or b"" for record in records]
            yield ReplayedBatch(header.last_offset, header.partition_leader_epoch, header.max_timestamp, values)

    def bootstrap_values(self) -> list[bytes]:
        """What Kafka's `format` left for the first start; empty where Tidelog formats by itself."""
        path = f"{self._root}/{BOOTSTRAP_NAME}"
        return decode_snapshot(self._disk.read_file(path)).values if self._disk.exists(path) else []

    def snapshots(self) -> list[SnapshotId]:
        """Complete ones, in no order."""
        found = (parse_snapshot_name(entry.name) for entry in self._disk.list_directory(self._directory))
        return [identity for identity in found if identity is not None]

    def _read(self, offset: int) -> Iterator[tuple[BatchHeader, list[Record]]]:
        while offset < self.end_offset:
            try:
                result = self.log.read(offset, READ_BYTES, self.end_offset)
            except ColdRead as cold:
                cold.warm()
                continue
            assert result.regions, "a read below the log end finds a batch"
            for region in result.regions:
                for position, header in iter_headers(region):
                    yield header, decode_batch(region, position, header)
                    offset = header.next_offset

    def _control(self, record: Record) -> None:
        kind = control_record_type(record.key)
        if kind is ControlRecordType.KRAFT_VERSION:
            self._kraft_version = KRaftVersionRecord.decode(record.value or b"", 0).k_raft_version
        elif kind is ControlRecordType.KRAFT_VOTERS:
            self._check_voters([voter.voter_id for voter in VotersRecord.decode(record.value or b"", 0).voters])

    def _check_voters(self, voters: Sequence[int]) -> None:
        if voters and list(voters) != [self._node_id]:
            raise NotAlone(f"the metadata log belongs to the voters {sorted(voters)}, this node is {self._node_id}")

    # -- what is added -----------------------------------------------------------------------------------------------

    def lead(self, now_ms: int) -> None:
        """Begin a new epoch: `quorum-state` and a LeaderChange record. To be called once, after `replay`.

        The file is not synced: with no other voter the record in the log, synced before anything is told, suffices to
        never use the epoch again.
        """
        before = self._votes.read()
        if before is not None:
            self._check_voters(before.voter_ids)
            self._last_epoch = max(self._last_epoch, before.leader_epoch)
        self.epoch = self._last_epoch + 1
        version = 1 if self._kraft_version > 0 else 0
        state = QuorumState(
            leader_id=self._node_id, leader_epoch=self.epoch, voter_ids=(self._node_id,), data_version=version
        )
        self._votes.write(state, sync=False)
        voter = LeaderChangeMessageVoter(
            voter_id=self._node_id, voter_directory_id=self._directory_id if version else ZERO_UUID
        )
        message = LeaderChangeMessage(version=version, leader_id=self._node_id, voters=[voter], granting_voters=[voter])
        self._append(
            encode_control_batch(ControlRecordType.LEADER_CHANGE, message.encode(version), timestamp=now_ms), now_ms
        )

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        """One batch, all or nothing; returns the offset of its last record. Not committed before a sync."""
        assert self.epoch >= 0, "appending without having the lead"
        return self._append(encode_batch([(now_ms, None, value, ()) for value in values]), now_ms)

    def _append(self, batch: bytearray, now_ms: int) -> int:
        return self.log.append_as_leader(memoryview(batch), self.epoch, now_ms, from_client=False).last_offset

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def write_snapshot(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> None:
        """Beside the log, complete or not at all. May run on any thread: touches nothing but its own file."""
        path = f"{self._directory}/{snapshot_name(identity)}"
        self._disk.write_file(f"{path}.part", encode_snapshot(values, identity, last_timestamp_ms, now_ms), sync=True)
        self._disk.rename(f"{path}.part", path)
        self._disk.sync_directory(self._directory)

    def forget_before(self, identity: SnapshotId, now_ms: int) -> None:
        """Remove what a snapshot on disk makes superfluous: older snapshots, whole segments below its end."""
        for older in self.snapshots():
            if older < identity:
                self._disk.remove(f"{self._directory}/{snapshot_name(older)}")
        if self.log.segment_count > 1:
            self.log.delete_records(identity.end_offset)
            self.log.segments.rename_condemned(self.log.log_start_offset, now_ms + self.log.config.file_delete_delay_ms)
        self.log.segments.remove_doomed(now_ms)
