"""The content of a data directory's files as rows: record batches, indexes, snapshots, checkpoints.

It only reads, through the storage and protocol packages. A file may be damaged: invalid data becomes a row with
`error`, and the rest of the file is omitted. Every row is a flat mapping, for a line of text or JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from pathlib import PurePath
from struct import Struct
from typing import Any

from tidelog.protocol.batches import compression
from tidelog.protocol.batches.record_batch import BatchHeader, check_crc, check_magic, iter_headers
from tidelog.protocol.batches.records import ControlRecordType, Record, control_record_type, decode_batch
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import KafkaError, MalformedMessage
from tidelog.protocol.messages import control_records, group_records, metadata_records, transaction_records
from tidelog.protocol.messages.coordinator_records import decode_value
from tidelog.protocol.uuids import uuid_to_text
from tidelog.storage.files import checkpoints
from tidelog.storage.files.disk import Disk
from tidelog.storage.producers.producer_snapshots import CorruptSnapshot, decode_snapshot
from tidelog.storage.segments.transaction_index import CorruptTransactionIndex, TransactionIndex

Row = dict[str, Any]
Decoder = Callable[[Record], Row]

_OFFSET_ROW = Struct(">ii")
_TIME_ROW = Struct(">qi")
_CONTROL_VALUES: dict[ControlRecordType, type[Message]] = {
    ControlRecordType.LEADER_CHANGE: control_records.LeaderChangeMessage,
    ControlRecordType.SNAPSHOT_HEADER: control_records.SnapshotHeaderRecord,
    ControlRecordType.SNAPSHOT_FOOTER: control_records.SnapshotFooterRecord,
    ControlRecordType.KRAFT_VERSION: control_records.KRaftVersionRecord,
    ControlRecordType.KRAFT_VOTERS: control_records.VotersRecord,
}


def dump(disk: Disk, path: str, *, records: bool) -> Iterator[Row]:
    """The rows of one file; `records` adds the records of every batch. Raises OSError, ValueError for other files."""
    reader = _reader_of(path)
    if reader is None:
        raise ValueError(f"{path}: not a file of a log directory that can be shown")
    try:
        if reader is _batches:
            yield from _batches(disk, path, records)
        else:
            yield from reader(disk, path)
    except (checkpoints.CorruptCheckpoint, CorruptTransactionIndex, CorruptSnapshot) as error:
        yield {"error": str(error)}


def is_known(path: str) -> bool:
    return _reader_of(path) is not None


def _reader_of(path: str) -> Callable[..., Iterator[Row]] | None:
    name = PurePath(path).name
    if name in _BY_NAME:
        return _BY_NAME[name]
    suffix = PurePath(name.removesuffix(".deleted")).suffix
    return _BY_SUFFIX.get(suffix)


def _batches(disk: Disk, path: str, records: bool) -> Iterator[Row]:
    file = disk.open(path)
    try:
        size_bytes = file.size_bytes()
        if size_bytes == 0:
            return
        mapped = file.map(size_bytes)
        try:
            yield from _batches_in(mapped.view, _decoder_for(path) if records else None)
        finally:
            mapped.close()
    finally:
        file.close()


def _batches_in(view: memoryview, decode: Decoder | None) -> Iterator[Row]:
    end = 0
    try:
        for position, header in iter_headers(view):
            check_magic(header)
            valid = check_crc(view, position, header)
            yield _batch_row(position, header, valid)
            end = position + header.size_bytes
            if decode is not None and valid:
                for record in decode_batch(view, position, header):
                    yield _control_row(record) if header.is_control else decode(record)
    except KafkaError as error:
        yield {"error": f"at position {end}: {error}"}
        return
    if end < len(view):
        yield {"error": f"at position {end}: {len(view) - end} bytes that are no whole batch"}


def _batch_row(position: int, header: BatchHeader, valid: bool) -> Row:
    row: Row = {
        "batch": position,
        "base_offset": header.base_offset,
        "last_offset": header.last_offset,
        "records": header.record_count,
        "leader_epoch": header.partition_leader_epoch,
        "size_bytes": header.size_bytes,
        "compression": compression.NAMES.get(header.compression, header.compression),
        "timestamp_type": "LogAppendTime" if header.timestamp_type else "CreateTime",
        "max_timestamp": header.max_timestamp,
        "crc": f"{header.crc:08x}",
        "crc_valid": valid,
    }
    if header.producer_id >= 0:
        row["producer_id"] = header.producer_id
        row["producer_epoch"] = header.producer_epoch
        row["base_sequence"] = header.base_sequence
    if header.is_transactional:
        row["transactional"] = True
    if header.is_control:
        row["control"] = True
    return row


def _decoder_for(path: str) -> Decoder:
    directory = PurePath(path).parent.name
    if directory.startswith("__consumer_offsets-"):
        return _group_row
    if directory.startswith("__transaction_state-"):
        return _transaction_row
    if directory.startswith("__cluster_metadata-"):
        return _metadata_row
    return _record_row


def _record_row(record: Record) -> Row:
    row: Row = {"offset": record.offset, "timestamp": record.timestamp, **_bytes("key", record.key)}
    row.update(_bytes("value", record.value))
    if record.headers:
        row["headers"] = [{"name": name, **_bytes("value", value)} for name, value in record.headers]
    return row


def _control_row(record: Record) -> Row:
    kind = control_record_type(record.key)
    row: Row = {"offset": record.offset, "timestamp": record.timestamp, "control": kind.name}
    message = _CONTROL_VALUES.get(kind)
    if message is not None and record.value is not None:
        row["value"] = repr(control_records.decode_control_value(message, record.value))
    return row


def _group_row(record: Record) -> Row:
    try:
        key = group_records.decode_key(record.key or b"")
        if key is None:
            return _record_row(record)
        row: Row = {"offset": record.offset, "timestamp": record.timestamp, "key": repr(key), "value": None}
        kind = (
            group_records.OffsetCommitValue
            if isinstance(key, group_records.OffsetCommitKey)
            else group_records.GroupMetadataValue
        )
        if record.value is not None:
            row["value"] = repr(decode_value(kind, record.value))
        return row
    except MalformedMessage as error:
        return {**_record_row(record), "error": str(error)}


def _transaction_row(record: Record) -> Row:
    try:
        key = transaction_records.decode_key(record.key or b"")
        if key is None:
            return _record_row(record)
        row: Row = {"offset": record.offset, "timestamp": record.timestamp, "key": repr(key), "value": None}
        if record.value is not None:
            row["value"] = repr(decode_value(transaction_records.TransactionLogValue, record.value))
        return row
    except MalformedMessage as error:
        return {**_record_row(record), "error": str(error)}


def _metadata_row(record: Record) -> Row:
    try:
        shown = repr(metadata_records.unframe(record.value or b""))
    except MalformedMessage as error:
        return {**_record_row(record), "error": str(error)}
    return {"offset": record.offset, "timestamp": record.timestamp, "record": shown}


def _offset_index(disk: Disk, path: str) -> Iterator[Row]:
    base = _base_offset(path)
    last = (-1, -1)
    for offset, position in _index_rows(disk, path, _OFFSET_ROW):
        yield {"offset": base + offset, "position": position}
        if offset <= last[0] or position <= last[1]:
            yield {"error": "entries must grow"}
            return
        last = offset, position
    yield from _odd_bytes(disk, path, _OFFSET_ROW)


def _time_index(disk: Disk, path: str) -> Iterator[Row]:
    base = _base_offset(path)
    last = (-1, -1)
    for timestamp, offset in _index_rows(disk, path, _TIME_ROW):
        yield {"timestamp": timestamp, "offset": base + offset}
        if timestamp < last[0] or offset < last[1]:
            yield {"error": "entries must not go back"}
            return
        last = timestamp, offset
    yield from _odd_bytes(disk, path, _TIME_ROW)


def _odd_bytes(disk: Disk, path: str, row: Struct) -> Iterator[Row]:
    size_bytes = disk.size_of(path)
    if size_bytes % row.size:
        yield {"error": f"{size_bytes} bytes are no multiple of {row.size}"}


def _index_rows(disk: Disk, path: str, row: Struct) -> Iterator[tuple[int, int]]:
    """The rows up to the unused end, because Kafka preallocates the index files of an active segment."""
    data = disk.read_file(path)
    usable = len(data) - len(data) % row.size
    for number, pair in enumerate(row.iter_unpack(memoryview(data)[:usable])):
        if number and pair == (0, 0):
            return
        yield pair


def _transaction_index(disk: Disk, path: str) -> Iterator[Row]:
    for row in TransactionIndex(disk, path, exists=True).rows:
        yield row._asdict()


def _producer_snapshot(disk: Disk, path: str) -> Iterator[Row]:
    for entry in decode_snapshot(disk.read_file(path)):
        yield {
            "producer_id": entry.producer_id,
            "producer_epoch": entry.epoch,
            "coordinator_epoch": entry.coordinator_epoch,
            "last_sequence": entry.last_sequence,
            "last_offset": entry.batches[-1][3] if entry.batches else -1,
            "last_timestamp": entry.last_timestamp,
            "transaction_first_offset": entry.transaction_first_offset,
        }


def _offsets(disk: Disk, path: str) -> Iterator[Row]:
    for (topic, partition), offset in checkpoints.decode_offsets(disk.read_file(path)).items():
        yield {"topic": topic, "partition": partition, "offset": offset}


def _leader_epochs(disk: Disk, path: str) -> Iterator[Row]:
    for epoch, start_offset in checkpoints.decode_leader_epochs(disk.read_file(path)):
        yield {"leader_epoch": epoch, "start_offset": start_offset}


def _properties(disk: Disk, path: str) -> Iterator[Row]:
    yield dict(checkpoints.decode_properties(disk.read_file(path)))


def _partition_metadata(disk: Disk, path: str) -> Iterator[Row]:
    yield {"topic_id": uuid_to_text(checkpoints.decode_partition_metadata(disk.read_file(path)))}


def _text(disk: Disk, path: str) -> Iterator[Row]:
    yield {"text": disk.read_file(path).decode(errors="replace").strip()}


def _base_offset(path: str) -> int:
    digits = PurePath(path).name.partition(".")[0]
    return int(digits) if digits.isdecimal() else 0


def _bytes(name: str, data: bytes | None) -> Row:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


_BY_SUFFIX: dict[str, Callable[..., Iterator[Row]]] = {
    ".log": _batches,
    ".checkpoint": _batches,
    ".index": _offset_index,
    ".timeindex": _time_index,
    ".txnindex": _transaction_index,
    ".snapshot": _producer_snapshot,
}
_BY_NAME: dict[str, Callable[..., Iterator[Row]]] = {
    checkpoints.RECOVERY_POINT_FILE: _offsets,
    checkpoints.LOG_START_FILE: _offsets,
    checkpoints.HIGH_WATERMARK_FILE: _offsets,
    checkpoints.LEADER_EPOCH_FILE: _leader_epochs,
    checkpoints.META_PROPERTIES_FILE: _properties,
    checkpoints.PARTITION_METADATA_FILE: _partition_metadata,
    checkpoints.CLEAN_SHUTDOWN_FILE: _text,
    "quorum-state": _text,
}
