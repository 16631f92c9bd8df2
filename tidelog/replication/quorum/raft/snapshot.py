"""Snapshots of the metadata log in Kafka's format: `<end offset>-<epoch>.checkpoint`, and `bootstrap.checkpoint`.

A snapshot is a sequence of record batches: a control batch with the header, batches of metadata records that rebuild
the image, a control batch with the footer. This module handles only values; the controller interprets the records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tidelog.protocol.batches.control_batches import encode_control_records
from tidelog.protocol.batches.record_batch import check_crc, iter_headers
from tidelog.protocol.batches.records import (
    ControlRecordType,
    control_record_type,
    decode_batch,
    encode_batch,
    encode_control_batch,
)
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.control_records import (
    KRaftVersionRecord,
    SnapshotFooterRecord,
    SnapshotHeaderRecord,
    VotersRecord,
)

SUFFIX: Final = ".checkpoint"
BOOTSTRAP_NAME: Final = "bootstrap.checkpoint"
RECORDS_PER_BATCH: Final = 1024
MAX_RECORD_BATCH_BYTES: Final = 8 * 1024 * 1024  # Kafka's KafkaRaftClient.MAX_BATCH_SIZE_BYTES

_NAME = re.compile(r"(\d{20})-(\d{10})\.checkpoint")


class CorruptSnapshot(Exception):
    """A checkpoint file is incomplete or damaged."""


class SnapshotId(NamedTuple):
    """`end_offset`: the first offset after the snapshot. `epoch`: the epoch of the last record in the snapshot."""

    end_offset: int
    epoch: int


class Snapshot(NamedTuple):
    """The content of a checkpoint file. `last_timestamp_ms`: the timestamp of the last log record in it."""

    last_timestamp_ms: int
    values: list[bytes]
    kraft_version: int
    voters: VotersRecord | None = None


def snapshot_name(identity: SnapshotId) -> str:
    return f"{identity.end_offset:020d}-{identity.epoch:010d}{SUFFIX}"


def parse_snapshot_name(name: str) -> SnapshotId | None:
    """None for any other file, including incomplete (`.part`) and deleted snapshots."""
    match = _NAME.fullmatch(name)
    return None if match is None else SnapshotId(int(match[1]), int(match[2]))


def decode_snapshot(content: bytes) -> Snapshot:
    """Raises `CorruptSnapshot` for a file that is cut short or damaged."""
    last_timestamp_ms: int | None = None
    values: list[bytes] = []
    kraft_version = 0
    voters: VotersRecord | None = None
    complete = False
    end = 0
    for position, header in iter_headers(content):
        if not check_crc(content, position, header):
            raise CorruptSnapshot(f"wrong CRC at byte {position}")
        end = position + header.size_bytes
        for record in decode_batch(content, position, header):
            if not header.is_control:
                values.append(record.value or b"")
                continue
            kind = control_record_type(record.key)
            if kind is ControlRecordType.SNAPSHOT_HEADER:
                last_timestamp_ms = SnapshotHeaderRecord.decode(record.value or b"", 0).last_contained_log_timestamp
            elif kind is ControlRecordType.KRAFT_VERSION:
                kraft_version = KRaftVersionRecord.decode(record.value or b"", 0).k_raft_version
            elif kind is ControlRecordType.KRAFT_VOTERS:
                voters = VotersRecord.decode(record.value or b"", 0)
            elif kind is ControlRecordType.SNAPSHOT_FOOTER:
                complete = True
    if last_timestamp_ms is None or not complete or end != len(content):
        raise CorruptSnapshot("no header, no footer, or bytes beyond the last batch")
    return Snapshot(last_timestamp_ms, values, kraft_version, voters)


def last_timestamp_in(head: bytes) -> int | None:
    """`last_timestamp_ms` from the first bytes of a checkpoint file; None without a whole and valid header batch."""
    try:
        for position, header in iter_headers(head):
            if not header.is_control or not check_crc(head, position, header):
                return None
            for record in decode_batch(head, position, header):
                if control_record_type(record.key) is ControlRecordType.SNAPSHOT_HEADER:
                    return SnapshotHeaderRecord.decode(record.value or b"", 0).last_contained_log_timestamp
            return None
    except KafkaError:
        pass  # the bytes are no batch
    return None


def encode_snapshot(
    values: Iterable[bytes],
    identity: SnapshotId,
    last_timestamp_ms: int,
    now_ms: int,
    kraft_version: int = 0,
    voters: VotersRecord | None = None,
) -> bytearray:
    """The bytes of a checkpoint file. As in Kafka, offsets start at 0 and every batch has the snapshot's epoch.

    From kraft.version 1 on, the header's batch also contains the version and the voters.
    """
    out = bytearray()
    controls: list[tuple[ControlRecordType, bytes]] = [
        (
            ControlRecordType.SNAPSHOT_HEADER,
            SnapshotHeaderRecord(version=0, last_contained_log_timestamp=last_timestamp_ms).encode(0),
        )
    ]
    if kraft_version > 0:
        record = KRaftVersionRecord(version=0, k_raft_version=kraft_version)
        controls.append((ControlRecordType.KRAFT_VERSION, record.encode(0)))
        if voters is not None:
            controls.append((ControlRecordType.KRAFT_VOTERS, voters.encode(0)))
    out += encode_control_records(controls, timestamp=now_ms, base_offset=0, leader_epoch=identity.epoch)
    offset = len(controls)
    for chunk in _chunks(values):
        records = [(now_ms, None, value, ()) for value in chunk]
        out += encode_batch(records, base_offset=offset, leader_epoch=identity.epoch)
        offset += len(chunk)
    footer = SnapshotFooterRecord(version=0).encode(0)
    out += encode_control_batch(
        ControlRecordType.SNAPSHOT_FOOTER, footer, timestamp=now_ms, base_offset=offset, leader_epoch=identity.epoch
    )
    return out


def _chunks(values: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    chunk: list[bytes] = []
    size_bytes = 0
    for value in values:
        if chunk and (len(chunk) == RECORDS_PER_BATCH or size_bytes + len(value) > MAX_RECORD_BATCH_BYTES):
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(value)
        size_bytes += len(value)
    if chunk:
        yield chunk
