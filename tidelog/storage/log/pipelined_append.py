"""Appends several batches of pipelined requests with one write.

A fast path for batches in the usual form. The log afterwards is the same as after one append for each batch. What it
does not cover is left to `PartitionLog.append_as_leader`: other forms, repeated batches, a new segment, failures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tidelog.protocol.batches.record_batch import LOG_OVERHEAD, stamp_head
from tidelog.protocol.errors import KafkaError
from tidelog.storage.segments.append import Batch, admit_usual

if TYPE_CHECKING:
    from tidelog.storage.log.partition_log import PartitionLog


def append_pipelined(
    log: PartitionLog, batches: Sequence[memoryview], leader_epoch: int, now_ms: int
) -> tuple[bytes, list[Batch]]:
    """Append the batches at the start of `batches` that are in the usual form, at least two.

    Returns the bytes in the log and the appended batches. There are none, and nothing has changed, if
    `append_as_leader` must take the first batch. `batches` must be writable; they are stamped in place.
    """
    segment = log.segments.active
    if (
        not segment.size_bytes
        or segment.is_full
        or now_ms > segment.roll_above_now
        or leader_epoch != log.leader_epochs.latest
        or log.failure is not None
    ):
        return b"", []
    admitted = _admit(log, batches, leader_epoch, now_ms)
    if len(admitted) < 2:
        return b"", []
    for batch, (_, size, base_offset, *_) in zip(batches, admitted):
        stamp_head(batch, 0, base_offset, size - LOG_OVERHEAD, leader_epoch)
    data = b"".join(batches[: len(admitted)])
    try:
        log.append_admitted(data, admitted, now_ms, None)
    except OSError:
        # `append_as_leader` tries again, handles the failure, and expects the batches as the client has sent them.
        for batch, (_, size, *_) in zip(batches, admitted):
            stamp_head(batch, 0, 0, size - LOG_OVERHEAD, leader_epoch)
        return b"", []
    return data, admitted


def _admit(log: PartitionLog, batches: Sequence[memoryview], leader_epoch: int, now_ms: int) -> list[Batch]:
    """The batches at the start that fit the active segment and need no other path. Changes nothing."""
    segment, rules = log.segments.active, log.rules
    room_bytes = log.config.segment_bytes - segment.size_bytes
    timestamp_max, offset_max = segment.roll_above_timestamp, segment.max_offset
    position, next_offset = 0, log.log_end_offset
    producer, next_sequence = (-1, -1), -1
    admitted: list[Batch] = []
    for batch in batches:
        try:
            usual = admit_usual(batch, now_ms, rules)
            if usual is None:
                break
            last_delta, max_timestamp, producer_id, producer_epoch, sequence = usual
            size, last_offset = len(batch), next_offset + last_delta
            if position + size > room_bytes or max_timestamp > timestamp_max or last_offset > offset_max:
                break
            if producer_id >= 0:
                if not admitted:
                    producer = producer_id, producer_epoch
                    if log.lacks_producers or log.producers.check(*producer, sequence, last_delta, False, True, now_ms):
                        break
                elif sequence != next_sequence or producer != (producer_id, producer_epoch):
                    break
                next_sequence = sequence + last_delta + 1  # one past the maximum is never sent, so it ends the batches
        except KafkaError:
            break  # `append_as_leader` raises it again, for this request alone
        admitted.append(
            (position, size, next_offset, last_offset, max_timestamp, 0, producer_id, producer_epoch, sequence,
             leader_epoch)
        )  # fmt: skip
        position += size
        next_offset = last_offset + 1
    return admitted
