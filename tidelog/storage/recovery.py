"""Reading a log again: finding its end, scanning for its first bad batch, making indexes and producer state anew.

What is to be done for which segment is decided in `loader.py`. Everything here waits for the device. Follows Kafka's
LogSegment.recover and UnifiedLog.rebuildProducerState.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from struct import error as StructError
from typing import Final

from tidelog.protocol.errors import KafkaError
from tidelog.protocol.record_batch import CONTROL_FLAG, HEADER_SIZE, MAGIC, BatchHeader, check_crc, read_header
from tidelog.protocol.records import ControlRecordType, control_record_type, decode_batch, decode_end_txn_value
from tidelog.storage.append import Batch
from tidelog.storage.disk import Buffer
from tidelog.storage.leader_epochs import LeaderEpochs
from tidelog.storage.producer_state import CompletedTransaction, EndMarker, ProducerState
from tidelog.storage.reader import batch_at, headers, position_of
from tidelog.storage.recall import recall
from tidelog.storage.segment import CorruptIndex, Segment
from tidelog.storage.transaction_index import AbortedTransaction

_log = logging.getLogger("tidelog.storage")

_CHUNK_BYTES: Final = 1024 * 1024


def replay(producers: ProducerState, segments: list[Segment], end_offset: int) -> None:
    """Bring the producer state from its end offset to `end_offset` by the batches in the log."""
    recall(producers, segments)
    for index, segment in enumerate(segments):
        if segment.base_offset >= end_offset:
            break
        if index + 1 < len(segments) and segments[index + 1].base_offset <= producers.end_offset:
            continue
        try:
            start = position_of(segment, producers.end_offset, wait=True)
            for position, header in headers(segment, start):
                if header.last_offset >= end_offset:
                    break
                marker = read_marker(batch_at(segment, position, header), header) if header.is_control else None
                producers.replay(header, marker)
        except CorruptIndex as error:
            _log.warning("producer state is rebuilt only in part: %s", error)
    producers.end_offset = end_offset


def find_end(segment: Segment) -> None:
    """Set `next_offset` of a segment that is known to be whole, by its last index row and the batches after it."""
    row = segment.offset_index.row(segment.offset_index.count - 1) if segment.offset_index.count else None
    try:
        for _, header in headers(segment, row[1] if row else 0):
            segment.next_offset = header.next_offset
        segment.check_indexes_end_below(segment.next_offset)
    except CorruptIndex as error:
        _log.warning("an index is rebuilt: %s", error)
        rebuild_indexes(segment)


def find_end_by_walk(segment: Segment) -> None:
    """The same without an index."""
    try:
        for _, header in headers(segment):
            segment.next_offset = header.next_offset
    except CorruptIndex as error:
        _log.warning("%s", error)


def rebuild_indexes(segment: Segment) -> None:
    """Make both indexes of a segment anew from its batches (not those of aborted transactions)."""
    segment.begin_rebuild()
    try:
        for position, header in headers(segment):
            segment.note_scanned(position, header.size_bytes, header.last_offset, header.max_timestamp)
            segment.next_offset = header.next_offset
    except CorruptIndex as error:
        _log.error("a segment below the recovery point is damaged: %s", error)
    if segment.seal():
        segment.sync_indexes()


def scan_segment(segment: Segment, producers: ProducerState, epochs: LeaderEpochs) -> int:
    """Check every batch and index it; the position before the first bad one, the size when there is none.

    `producers` must stand at the segment's base offset and is brought to the end found.
    """
    segment.begin_rebuild()
    segment.transaction_index.begin_rebuild()
    segment.next_offset = segment.base_offset
    end = 0
    for position, header, batch in verified_batches(segment):
        if header.base_offset < segment.next_offset or header.last_offset > segment.max_offset:
            break
        marker = read_marker(batch, header) if header.is_control else None
        segment.note_scanned(position, header.size_bytes, header.last_offset, header.max_timestamp)
        if header.partition_leader_epoch > epochs.latest:
            epochs.assign(header.partition_leader_epoch, header.base_offset)
        completed = producers.replay(header, marker)
        if completed is not None and completed.is_abort:
            segment.transaction_index.append(aborted(completed))
        segment.next_offset = header.next_offset
        end = position + header.size_bytes
    return end


def verified_batches(segment: Segment) -> Iterator[tuple[int, BatchHeader, memoryview]]:
    """(position, header, bytes) of each batch from the start, up to the first that is not whole or fails its CRC."""
    position, size = 0, segment.size_bytes
    file = segment.file
    chunk, chunk_start = memoryview(b""), 0
    while size - position >= HEADER_SIZE:
        at = position - chunk_start
        if at + HEADER_SIZE > len(chunk):
            chunk, chunk_start, at = memoryview(file.read_at(min(_CHUNK_BYTES, size - position), position)), position, 0
        try:
            header = read_header(chunk, at)
        except KafkaError:
            return
        batch_size = header.size_bytes
        if header.magic != MAGIC or position + batch_size > size or header.last_offset_delta < 0:
            return
        if at + batch_size > len(chunk):
            chunk_size = min(max(_CHUNK_BYTES, batch_size), size - position)
            chunk, chunk_start, at = memoryview(file.read_at(chunk_size, position)), position, 0
        if not check_crc(chunk, at, header):
            return
        yield position, header, chunk[at : at + batch_size]
        position += batch_size


def read_marker(batch: bytes | memoryview, header: BatchHeader) -> EndMarker | None:
    """The transaction marker in a control batch; None for the quorum's control records and for what is unreadable."""
    if header.producer_id < 0:
        return None
    try:
        records = decode_batch(batch, 0, header)
        kind = control_record_type(records[0].key)
        if kind not in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            return None
        epoch = decode_end_txn_value(records[0].value)
    except (KafkaError, IndexError, ValueError, StructError):
        return None
    return EndMarker(
        header.producer_id,
        header.producer_epoch,
        epoch,
        kind == ControlRecordType.ABORT,
        header.base_offset,
        records[0].timestamp,
    )


def aborted(completed: CompletedTransaction) -> AbortedTransaction:
    return AbortedTransaction(
        completed.producer_id, completed.first_offset, completed.last_offset, completed.last_stable_offset
    )


def markers_in(data: Buffer, batches: list[Batch]) -> dict[int, EndMarker]:
    """Position in `data` -> transaction marker, of the control batches among `batches`."""
    markers: dict[int, EndMarker] = {}
    for batch in batches:
        if batch[6] >= 0 and batch[5] & CONTROL_FLAG:
            view = memoryview(data)[batch[0] : batch[0] + batch[1]]
            marker = read_marker(view, read_header(view))
            if marker is not None:
                markers[batch[0]] = marker
    return markers
