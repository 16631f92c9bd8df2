"""The load of a coordinator from its partition's log, in steps short enough for the event loop.

This module iterates over batches; the runtime chooses the log and schedules the steps. Invariant:
a load replays the records that a running coordinator replays after their commit, in the same order,
with the transaction markers between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.broker.coordinators.outcome import Coordinator
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import ControlRecordType, control_record_type, decode_batch

RECORDS_PER_STEP = 500
# So many bytes of a value count as one more record: a group with hundreds of members takes milliseconds to decode.
BYTES_PER_RECORD = 500
STEP_DONE = -1
CHUNK_NOT_READY = -2


def replay_log(
    coordinator: Coordinator, chunks: Iterable[memoryview], records_per_step: int = RECORDS_PER_STEP
) -> Iterator[int]:
    """Replay the batches of `chunks`.

    Yields STEP_DONE after each step, CHUNK_NOT_READY for an empty chunk, and last the log end
    offset. Skips records of unknown kinds. Raises KafkaError or MalformedMessage for a malformed
    log.
    """
    remaining = records_per_step
    end_offset = 0
    for chunk in chunks:
        if not chunk:
            yield CHUNK_NOT_READY
        for position, header in iter_headers(chunk):
            end_offset = header.next_offset
            for record in decode_batch(chunk, position, header):
                remaining -= 1 if record.value is None else 1 + len(record.value) // BYTES_PER_RECORD
                if remaining <= 0:
                    remaining = records_per_step
                    yield STEP_DONE
                if header.is_control:
                    kind = control_record_type(record.key)
                    if kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
                        is_commit = kind is ControlRecordType.COMMIT
                        while True:
                            remaining -= coordinator.replay_end_transaction(header.producer_id, is_commit, remaining)
                            if remaining > 0:
                                break
                            remaining = records_per_step
                            yield STEP_DONE
                elif record.key is not None:
                    decoded = coordinator.decode(record.key, record.value)
                    if decoded is not None:
                        producer_id = header.producer_id if header.is_transactional else -1
                        coordinator.replay(record.offset, decoded, producer_id)
    yield end_offset
