"""The load of a coordinator from its partition's log, in steps short enough for the event loop.

This module iterates over batches; the runtime chooses the log and schedules the steps. Invariant:
a load replays the records that a running coordinator replays after their commit, in the same order,
with the transaction markers between them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Final

from tidelog.broker.coordinators.outcome import Coordinator
from tidelog.protocol.batches.record import Record
from tidelog.protocol.batches.record_batch import BatchHeader, check_magic, iter_headers
from tidelog.protocol.batches.records import (
    ControlRecordType,
    control_record_type,
    decode_in_pieces,
    record_section,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.segments.inspection import is_decompressed_at_once

RECORDS_PER_STEP = 500
# So many bytes of a value count as one more record: a group with hundreds of members takes milliseconds to decode.
BYTES_PER_RECORD = 500
# A larger record section is decompressed on a thread.
DECOMPRESSED_AT_ONCE_BYTES_MAX: Final = 1024 * 1024
STEP_DONE = -1
# A thread still reads the next chunk or decompresses a section.
NOT_READY = -2

OnThread = Callable[[Callable[[], bytes]], Callable[[], bytes | None]]
"""Starts the work on a thread. What it returns gives the result, or None before, or raises the error of the work."""


def at_once(work: Callable[[], bytes]) -> Callable[[], bytes]:
    """An `OnThread` without a thread."""
    section = work()
    return lambda: section


class LargeSections:
    """Decompresses large record sections for all loads of a runtime, of which one at a time has such a section."""

    def __init__(self, on_thread: OnThread) -> None:
        self._on_thread = on_thread
        self.is_held = False

    def decompress(self, chunk: memoryview, position: int, header: BatchHeader) -> Generator[int, None, bytes]:
        section_when_ready = self._on_thread(partial(record_section, chunk, position, header))
        while (section := section_when_ready()) is None:
            yield NOT_READY
        return section


def replay_log(
    coordinator: Coordinator,
    chunks: Iterable[memoryview],
    records_per_step: int = RECORDS_PER_STEP,
    large_sections: LargeSections | None = None,
) -> Iterator[int]:
    """Replay the batches of `chunks`.

    Yields STEP_DONE after each step, NOT_READY for an empty chunk and while it waits for a large section, and last the
    log end offset. Skips records of unknown kinds. Raises KafkaError or MalformedMessage for a malformed log: the
    coordinator then has the records before, and must not be used.
    """
    replay = _LogReplay(coordinator, records_per_step, large_sections or LargeSections(at_once))
    end_offset = 0
    for chunk in chunks:
        if not chunk:
            yield NOT_READY
        for position, header in iter_headers(chunk):
            end_offset = header.next_offset
            yield from replay.replay_batch(chunk, position, header)
    yield end_offset


class _LogReplay:
    """Replays batch after batch, and yields STEP_DONE each time that so many records are replayed."""

    def __init__(self, coordinator: Coordinator, records_per_step: int, large_sections: LargeSections) -> None:
        self._coordinator = coordinator
        self._records_per_step = self._remaining = records_per_step
        self._large_sections = large_sections

    def replay_batch(self, chunk: memoryview, position: int, header: BatchHeader) -> Iterator[int]:
        section = _section_at_once(chunk, position, header)
        if section is not None:
            yield from self._replay_section(section, header)
            return
        while self._large_sections.is_held:
            yield NOT_READY
        self._large_sections.is_held = True
        try:
            section = yield from self._large_sections.decompress(chunk, position, header)
            yield from self._replay_section(section, header)
        finally:
            self._large_sections.is_held = False

    def _replay_section(self, section: bytes, header: BatchHeader) -> Iterator[int]:
        coordinator = self._coordinator
        producer_id = header.producer_id if header.is_transactional else -1
        # Decoded in pieces, because all records of a batch may take seconds and a gigabyte.
        for records in decode_in_pieces(section, header, RECORDS_PER_STEP):
            for record in records:
                self._remaining -= 1 if record.value is None else 1 + len(record.value) // BYTES_PER_RECORD
                if self._remaining <= 0:
                    self._remaining = self._records_per_step
                    yield STEP_DONE
                if header.is_control:
                    yield from self._replay_control_record(record, header.producer_id)
                elif record.key is not None:
                    decoded = coordinator.decode(record.key, record.value)
                    if decoded is not None:
                        coordinator.replay(record.offset, decoded, producer_id)

    def _replay_control_record(self, record: Record, producer_id: int) -> Iterator[int]:
        kind = control_record_type(record.key)
        if kind not in (ControlRecordType.ABORT, ControlRecordType.COMMIT):
            return
        is_commit = kind is ControlRecordType.COMMIT
        while True:
            self._remaining -= self._coordinator.replay_end_transaction(producer_id, is_commit, self._remaining)
            if self._remaining > 0:
                return
            self._remaining = self._records_per_step
            yield STEP_DONE


def _section_at_once(chunk: memoryview, position: int, header: BatchHeader) -> bytes | None:
    """The decompressed record section of a batch, None if it is large. Raises KafkaError."""
    check_magic(header)
    if not is_decompressed_at_once(header):
        return None
    try:
        return record_section(chunk, position, header, DECOMPRESSED_AT_ONCE_BYTES_MAX)
    except KafkaError as error:
        if error.code is not ErrorCode.MESSAGE_TOO_LARGE:
            raise
        return None
