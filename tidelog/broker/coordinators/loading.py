"""Rebuilding a coordinator from its partition's log, in steps short enough for the event loop.

Here lives the walk over batches; which log, and when to go on, is the runtime's business. The invariant: every record
that a coordinator would have replayed when it was committed is replayed here, in the same order, and markers end
their transactions in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.broker.coordinators.outcome import Coordinator
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import ControlRecordType, control_record_type, decode_batch

RECORDS_PER_STEP = 500
MORE_TO_COME = -1
NOT_YET = -2


def replay_log(
    coordinator: Coordinator, chunks: Iterable[memoryview], records_per_step: int = RECORDS_PER_STEP
) -> Iterator[int]:
    """Replay whole batches; yields MORE_TO_COME after each step, NOT_YET while the next chunk is awaited (it is empty),
    and last the offset at which the log ends.

    Raises KafkaError or MalformedMessage for a log that cannot be understood. Records of unknown kinds are passed over.
    """
    left = records_per_step
    end_offset = 0
    for chunk in chunks:
        if not chunk:
            yield NOT_YET
        for position, header in iter_headers(chunk):
            end_offset = header.next_offset
            for record in decode_batch(chunk, position, header):
                left -= 1
                if left <= 0:
                    left = records_per_step
                    yield MORE_TO_COME
                if header.is_control:
                    kind = control_record_type(record.key)
                    if kind in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
                        coordinator.replay_end_transaction(header.producer_id, kind is ControlRecordType.COMMIT)
                elif record.key is not None:
                    decoded = coordinator.decode(record.key, record.value)
                    if decoded is not None:
                        producer_id = header.producer_id if header.is_transactional else -1
                        coordinator.replay(record.offset, decoded, producer_id)
    yield end_offset
