"""Finds batches in a segment and returns their stored bytes, without decoding, and without copying large ones.

The position of an offset comes from the recent batches in memory, from the hint of a previous read, or from the floor
of the sparse index and a walk over batch headers. Small results are read, large ones are slices of a map of the file.
Batches from the device are checked completely. For batches that this process has recently written or checked, only the
headers are checked. Invariants: a result consists of whole batches; it contains no offset at or above the bound and no
damaged batch; a read that would wait for the device raises ColdRead instead.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import (
    ATTRIBUTES_OFFSET,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    MIN_BATCH_LENGTH,
    BatchHeader,
    check_crc,
    iter_headers,
    read_header,
)
from tidelog.protocol.errors import KafkaError
from tidelog.storage.files.disk import File
from tidelog.storage.segments.damage import CorruptIndex, DamagedRecords, bytes_after, damage_at, next_damage
from tidelog.storage.segments.examination import examine
from tidelog.storage.segments.leader_epochs import LeaderEpochs
from tidelog.storage.segments.segment import Segment
from tidelog.storage.segments.segments import Segments

MAP_ABOVE_BYTES: Final = 64 * 1024  # above it slices of a map take a third of a read's CPU
_SURELY_WARM_BYTES: Final = 64 * 1024 * 1024
_WALK_CHUNK_BYTES: Final = 8 * 1024
_WARM_CHUNK_BYTES: Final = 1024 * 1024
_BASE_OFFSET_BYTES: Final = 8
_HINTS_MAX: Final = 8
# The batches per read whose CRCs are checked: for batches of one small record this takes 1 ms instead of 30.
_CHECKED_BATCHES_MAX: Final = 512
# The batches per read of which only the headers are checked.
_LOOKED_AT_MAX: Final = 4096
CHECKED_BYTES_MAX: Final = 8 * 1024 * 1024
"""The bytes that a search by time checks on the loop's thread."""
_WALK: Final = Struct(">qi11xi")  # base offset, batch length, last offset delta
_walk = _WALK.unpack_from
_NEIGHBOURS: Final = Struct(">qiibI2xi")  # base offset, batch length, leader epoch, magic, CRC, last offset delta
_neighbours = _NEIGHBOURS.unpack_from

Region = bytes | memoryview


class ReadResult(NamedTuple):
    """`regions`: bytes to send in order. `size_bytes`: their sum. `next_offset`: the offset after the last batch."""

    regions: list[Region]
    size_bytes: int
    next_offset: int


class ColdRead(Exception):
    """The bytes are not in memory. The caller runs `warm()` on a thread, with the file pinned, and reads again."""

    examined: tuple[Segment, int] | None = None
    """The segment that `warm` examines, and its generation: one examination does for all who would have the same."""

    def __init__(self, segment: Segment, position: int, size_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes at {position} of {segment.path} are not in memory")
        self.path = segment.path
        self._segment = segment
        self._file = segment.file
        self._position = position
        self._size_bytes = size_bytes

    def pin(self) -> None:
        self._file.pin()

    def unpin(self) -> None:
        self._file.unpin()

    def warm(self) -> None:
        """Read the range and wait for the device. The next read raises a failure."""
        position, end = self._position, self._position + self._size_bytes
        try:
            while position < end:
                data = self._file.read_at(min(_WARM_CHUNK_BYTES, end - position), position)
                if not data:
                    return
                position += len(data)
        except (OSError, MemoryError) as error:
            self._segment.unread = _as_shortage(error, self.path)


class Examination(ColdRead):
    """The segment contradicts its index or its neighbours. `warm` examines all of it, for `Segment.adopt`."""

    def __init__(self, segment: Segment, epoch_max: int = -1) -> None:
        super().__init__(segment, 0, segment.size_bytes)
        self._epoch_max = epoch_max
        self._end_offset = segment.next_offset
        self._generation = segment.generation
        self.examined = segment, segment.generation
        self._gaps = segment.may_have_gaps, segment.may_end_early
        self._proven = segment.proven
        self._named = segment.named_batches()

    def warm(self) -> None:
        segment = self._segment
        try:
            findings = examine(
                self._file, self._size_bytes, segment.base_offset, self._end_offset, segment.index_interval_bytes,
                may_have_gaps=self._gaps[0], may_end_early=self._gaps[1], epoch_max=self._epoch_max,
                proven=self._proven, named=self._named,
            )  # fmt: skip
            findings.generation = self._generation
            segment.findings = findings
        except (OSError, MemoryError) as error:
            segment.unread = _as_shortage(error, self.path)


def _as_shortage(error: OSError | MemoryError, path: str) -> OSError:
    """Without an error the next read would have the segment examined again at once, for as long as clients ask."""
    return error if isinstance(error, OSError) else OSError(errno.ENOMEM, "no memory for a read", path)


def _cold(segment: Segment, position: int, size_bytes: int) -> ColdRead | OSError:
    """The exception for bytes that are not in memory: the failure of the last background read, once, or ColdRead."""
    failure, segment.unread = segment.unread, None
    segment.distrust()
    return failure or ColdRead(segment, position, size_bytes)


def read(
    segment: Segment, offset: int, max_bytes: int, upper_offset: int, min_one_batch: bool, epochs: LeaderEpochs
) -> ReadResult:
    """Batches from the one that holds `offset` (or the next) to `upper_offset`, at most `max_bytes`.

    With `min_one_batch` the first batch is returned even if it is larger. The result ends before damage. Raises
    ColdRead, CorruptIndex, and DamagedRecords if `offset` is damaged, or if no batch is left between it and damage.
    """
    damage = None
    if segment.damage:
        damage = damage_at(segment.damage, offset)
        if damage is not None:
            raise DamagedRecords(segment.path, damage)
        damage = next_damage(segment.damage, offset)
        if damage is not None and damage.first_offset >= upper_offset:
            damage = None
    size = segment.size_bytes
    start = position_of(segment, offset)
    if damage is not None:
        end, next_offset = damage.position, damage.first_offset
    elif upper_offset >= segment.next_offset:
        end, next_offset = size, segment.next_offset
    else:
        end, next_offset = position_of(segment, upper_offset), upper_offset
    if end - start > max_bytes:
        end, next_offset = _whole_batches(segment, start, end, max_bytes, min_one_batch)
    length = end - start
    if length <= 0:
        if damage is not None and start >= damage.position:  # a cleaner has removed all before it: empty for ever
            raise DamagedRecords(segment.path, damage)
        return ReadResult([], 0, offset)
    region = _bytes(segment, start, length)
    is_trusted = segment.is_trusted(start, end)
    checked_bytes, expected = _skim(region, length, offset, epochs) if is_trusted else (0, -1)
    if not checked_bytes or (checked_bytes == length and expected != next_offset):
        checked_bytes, expected = _verify(segment, region, start, offset, next_offset, epochs, is_trusted)
    if checked_bytes < length:
        length, end, next_offset = checked_bytes, start + checked_bytes, expected
        region = region[:length]
    elif end == size and expected != segment.next_offset and not (segment.may_end_early or ends_damaged(segment)):
        raise CorruptIndex(segment.path, f"ends at offset {expected}, not {segment.next_offset}")
    if segment.may_have_gaps and not is_trusted and end < size and bytes_after(segment.damage, end) == end:
        _check_next(segment, end, expected)
    if not is_trusted:
        segment.trust(start, end)
    hints = segment.hints
    hints[next_offset] = end
    if len(hints) > _HINTS_MAX:
        del hints[next(iter(hints))]
    return ReadResult([region], length, next_offset)


def _check_next(segment: Segment, position: int, expected: int) -> None:
    """The next batch must begin behind those that are read: where there may be gaps, only it shows that the last one of
    them has a base offset that is too high. Raises ColdRead, CorruptIndex.
    """
    data = segment.file.read_at_nowait(_BASE_OFFSET_BYTES, position)
    if data is None:
        raise _cold(segment, position, _BASE_OFFSET_BYTES)
    if int.from_bytes(data, "big") < expected:
        raise CorruptIndex(segment.path, f"base offset {int.from_bytes(data, 'big')} at {position}, after {expected}")


def is_whole(result: ReadResult) -> bool:
    """Whether all CRCs are right, including those of trusted bytes, which a read does not check again.

    For readers whose state one wrong record would spoil for good. If the result is False, they `distrust` the segments
    and read again, which finds the damage.
    """
    return all(check_crc(region, at, header) for region in result.regions for at, header in iter_headers(region))


def read_tail(segment: Segment, offset: int, max_bytes: int, upper_offset: int, epochs: LeaderEpochs) -> bytes | None:
    """The bytes from `offset` to the end of the segment, if they are recent and few; None otherwise.

    The fast path of `read` for consumers that keep up. It does not wait for the device, because this process has just
    written the bytes. Raises OSError.
    """
    recent = segment.recent_offsets
    if segment.damage or upper_offset < segment.next_offset or not recent or offset < recent[0]:
        return None
    start = segment.recent_positions[bisect_right(recent, offset) - 1]
    length = segment.size_bytes - start
    if start < segment.warm_from or length > max_bytes or length > MAP_ABOVE_BYTES:
        return None
    data = segment.file.read_at(length, start)
    if len(data) != length or _skim(data, length, offset, epochs) != (length, segment.next_offset):
        return None
    return data


def ends_damaged(segment: Segment) -> bool:
    """Whether the segment ends in known damage."""
    return bool(segment.damage) and segment.damage[-1].end_position >= segment.size_bytes


def _skim(region: Region, size: int, offset: int, epochs: LeaderEpochs) -> tuple[int, int]:
    """`_verify` for trusted batches of one epoch without gaps, in half the time.

    (0, -1) for other batches, and if a check fails.
    """
    if size < HEADER_SIZE:
        return 0, -1
    expected, _, first_epoch, _, _, last_delta = _neighbours(region, 0)
    if not expected <= offset <= expected + last_delta or first_epoch != epochs.epoch_for_offset(expected) >= 0:
        return 0, -1
    position, last = 0, size - HEADER_SIZE
    for _ in range(_LOOKED_AT_MAX):
        base_offset, length, epoch, magic, _, last_delta = _neighbours(region, position)
        if (
            base_offset != expected or magic != MAGIC or epoch != first_epoch
            or length < MIN_BATCH_LENGTH or last_delta < 0
        ):  # fmt: skip
            return 0, -1
        expected += last_delta + 1
        position += length + LOG_OVERHEAD
        if position > last:
            return (size, expected) if position == size else (0, -1)
    return position, expected


def _verify(
    segment: Segment, region: Region, start: int, offset: int, next_offset: int, epochs: LeaderEpochs, is_trusted: bool
) -> tuple[int, int]:
    """Check whole batches, up to the bound for one read. Raises CorruptIndex.

    Returns the number of checked bytes, and the offset after them.

    The CRC does not cover base offset, length, epoch and magic. So offsets must be contiguous, and the first batch must
    hold `offset`, unless compaction may have left gaps; epochs must agree with the log's. The CRC of trusted bytes is
    not computed, because it was right a short time ago. Their headers are still checked: a file that another process
    truncated and that was then appended to has zeros in place of trusted batches, and zeros crash librdkafka.
    """
    position, size, expected, epoch_before = 0, len(region), -1, -2
    view = memoryview(region)
    may_have_gaps = segment.may_have_gaps
    left = _LOOKED_AT_MAX if is_trusted else _CHECKED_BATCHES_MAX
    while position < size:
        if not left:
            return position, expected
        left -= 1
        if size - position < HEADER_SIZE:
            raise CorruptIndex(segment.path, f"no batch at {start + position}")
        base_offset, length, epoch, magic, crc, last_delta = _neighbours(view, position)
        end = position + length + LOG_OVERHEAD
        if magic != MAGIC or length < MIN_BATCH_LENGTH or end > size or last_delta < 0:
            raise CorruptIndex(segment.path, f"no batch at {start + position}")
        if not is_trusted and crc32c(view[position + ATTRIBUTES_OFFSET : end]) != crc:
            raise CorruptIndex(segment.path, f"the CRC of the batch at {start + position} is wrong")
        if base_offset != expected or expected < 0:
            if expected < 0:
                is_next = base_offset <= offset <= base_offset + last_delta or (may_have_gaps and base_offset > offset)
            else:
                is_next = may_have_gaps and base_offset > expected
            if not is_next:
                raise CorruptIndex(segment.path, f"base offset {base_offset} at {start + position}")
        if epoch != epoch_before or not is_trusted:
            if epoch != epochs.epoch_for_offset(base_offset) >= 0:
                raise CorruptIndex(segment.path, f"leader epoch {epoch} of offset {base_offset}")
            epoch_before = epoch
        expected = base_offset + last_delta + 1
        position = end
    if (
        expected != next_offset
        and not (may_have_gaps and expected < next_offset)
        and not _is_bound_within_batch(segment, start + size, expected, next_offset)
    ):
        raise CorruptIndex(segment.path, f"the batches before {start + size} end at offset {expected}")
    return size, expected


def _is_bound_within_batch(segment: Segment, position: int, base_offset: int, bound: int) -> bool:
    """Whether the batch at `position` begins with `base_offset` and holds the record at `bound`."""
    if base_offset < bound:
        for _, first_offset, last_offset, _ in walk(segment, position):
            return first_offset == base_offset and bound <= last_offset
    return False


def read_from(segments: Segments, offset: int, max_bytes: int, upper_offset: int, min_one_batch: bool) -> ReadResult:
    """`read` for a whole log: from the segment that holds `offset`, or the next one with a batch. Where there is none
    below `upper_offset`, `next_offset` is this bound: the log may end behind a gap.
    """
    if offset >= upper_offset:
        return ReadResult([], 0, offset)
    epochs = segments.leader_epochs
    if offset >= segments.active.base_offset:
        return read(segments.active, offset, max_bytes, upper_offset, min_one_batch, epochs)
    index = max(0, segments.floor_index(offset))
    result = read(segments[index], offset, max_bytes, upper_offset, min_one_batch, epochs)
    # A segment whose last offsets were compacted away or truncated has no batch for `offset`: try the next one.
    while not result.regions and index + 1 < len(segments):
        index += 1
        segment = segments[index]
        before = segments[index - 1]
        if position_of(before, offset) < before.size_bytes:
            break
        if not before.may_end_early and offset < segment.base_offset:
            raise CorruptIndex(before.path, f"holds nothing at offset {offset}")
        if segment.base_offset >= upper_offset:
            return ReadResult([], 0, upper_offset)
        result = read(segment, max(offset, segment.base_offset), max_bytes, upper_offset, min_one_batch, epochs)
    return result


def _bytes(segment: Segment, start: int, length: int) -> Region:
    is_warm = start >= segment.warm_from and segment.size_bytes - start <= _SURELY_WARM_BYTES
    if length > MAP_ABOVE_BYTES:
        if segment.file.size_bytes() < start + length:
            raise CorruptIndex(segment.path, f"is shorter than {start + length} bytes")
        if not is_warm and not segment.file.is_warm(length, start):
            raise _cold(segment, start, length)
        return segment.view(start + length)[start : start + length]
    data = segment.file.read_at(length, start) if is_warm else segment.file.read_at_nowait(length, start)
    if data is None:
        raise _cold(segment, start, length)
    if len(data) != length:
        raise CorruptIndex(segment.path, f"{length} bytes at {start} should be there, {len(data)} are")
    return data


def position_of(segment: Segment, offset: int, *, wait: bool = False) -> int:
    """The position of the batch that holds `offset` or of the next one; the segment's end if there is none.

    For an offset in a damaged range: the start of the range. Waits for the device with `wait`, else raises ColdRead.
    """
    if segment.damage:
        damage = damage_at(segment.damage, offset)
        if damage is not None:
            return damage.position
    recent = segment.recent_offsets
    if recent and offset >= recent[0]:
        if offset >= segment.next_offset:
            return segment.size_bytes
        return segment.recent_positions[bisect_right(recent, offset) - 1]
    position = segment.hints.get(offset)
    if position is not None:
        return bytes_after(segment.damage, position)
    if offset <= segment.base_offset:
        return bytes_after(segment.damage, 0)
    if offset >= segment.next_offset:
        return segment.size_bytes
    if not segment.size_bytes and segment.may_end_early:
        return 0  # a cleaner had removed all of it from the replica that it was repaired from
    row = segment.offset_index.floor(offset)
    start = row[1] if row is not None else 0
    if start >= segment.size_bytes:
        raise CorruptIndex(segment.path, f"the index has offset {offset} at {start}, behind its end")
    for position, base_offset, last_offset, _ in walk(segment, start, wait=wait):
        if row is not None and position == start and last_offset != row[0]:
            raise CorruptIndex(segment.path, f"the index has offset {row[0]} at {start}, there is {base_offset}")
        if last_offset >= offset:
            return position
    return segment.size_bytes


def _whole_batches(segment: Segment, start: int, end: int, max_bytes: int, min_one_batch: bool) -> tuple[int, int]:
    """(the last batch boundary in (start, start + max_bytes], the offset after it)."""
    bound = min(end, start + max(max_bytes, 0))  # a client may name any number
    recent = segment.recent_positions
    if recent and start >= recent[0]:
        at = bisect_right(recent, bound) - 1
        if recent[at] > start or not min_one_batch:
            return recent[at], segment.recent_offsets[at]
        if at + 1 < len(recent):
            return recent[at + 1], segment.recent_offsets[at + 1]
        return segment.size_bytes, segment.next_offset
    row = segment.offset_index.floor_value(bound)
    from_position = row[1] if row is not None and row[1] > start else start
    start_position, next_offset = start, -1
    for position, base_offset, last_offset, batch_end in walk(segment, from_position):
        if row is not None and position == row[1] and last_offset != row[0]:
            raise CorruptIndex(segment.path, f"the index has offset {row[0]} at {position}, there is {base_offset}")
        if position > start and position <= bound and start_position < position:
            start_position, next_offset = position, base_offset
        if batch_end > bound:
            if start_position == start and min_one_batch:
                return batch_end, last_offset + 1
            return start_position, next_offset
        start_position, next_offset = batch_end, last_offset + 1
    return start_position, next_offset


def walk(segment: Segment, position: int, *, wait: bool = False) -> Iterator[tuple[int, int, int, int]]:
    """(position, base offset, last offset, end position) of each batch from `position` on.

    With `wait` a range that is not in memory is read from the device. Raises ColdRead, and CorruptIndex if no batch is
    at a position, or one whose offsets were passed.
    """
    size, damage = segment.size_bytes, segment.damage
    file = segment.file
    chunk, chunk_start, offset = b"", position, segment.base_offset
    while position < size:
        if damage:
            position = bytes_after(damage, position)
            if position >= size:
                return
        at = position - chunk_start
        if at < 0 or at + _WALK.size > len(chunk):
            data = _chunk(segment, file, position, size, wait)
            chunk, chunk_start, at = data, position, 0
            if len(chunk) < _WALK.size:
                raise CorruptIndex(segment.path, f"no batch at {position} of {size}")
        base_offset, length, last_delta = _walk(chunk, at)
        end = position + length + LOG_OVERHEAD
        if length < MIN_BATCH_LENGTH or end > size or base_offset < offset or last_delta < 0:
            raise CorruptIndex(segment.path, f"no batch at {position} of {size}")
        offset = base_offset + last_delta + 1
        yield position, base_offset, offset - 1, end
        position = end


def _chunk(segment: Segment, file: File, position: int, size: int, wait: bool) -> bytes:
    length = min(_WALK_CHUNK_BYTES, size - position)
    if wait or position >= segment.warm_from:
        return file.read_at(length, position)
    data = file.read_at_nowait(length, position)
    if data is None:
        raise _cold(segment, position, length)
    return data


def headers(segment: Segment, position: int = 0, *, wait: bool = True) -> Iterator[tuple[int, BatchHeader]]:
    """(position, header) of each batch from `position` on. Waits for the device with `wait`, else raises ColdRead.

    Known damage is left out. Raises CorruptIndex if no batch is at a position: the caller's index is wrong, or the
    segment has more damage.
    """
    size, damage = segment.size_bytes, segment.damage
    file = segment.file
    chunk, chunk_start = b"", position
    while position < size:
        if damage:
            position = bytes_after(damage, position)
            if position >= size:
                return
        at = position - chunk_start
        if at + HEADER_SIZE > len(chunk):
            chunk, chunk_start, at = _chunk(segment, file, position, size, wait), position, 0
        try:
            header = read_header(chunk, at)
        except KafkaError as error:
            raise CorruptIndex(segment.path, f"{error.message} at {position} of {size}") from None
        end = position + header.size_bytes
        if end > size or header.base_offset < segment.base_offset or header.last_offset_delta < 0:
            raise CorruptIndex(segment.path, f"no batch at {position} of {size}")
        yield position, header
        position = end


def header_at(file: File, position: int) -> BatchHeader | None:
    """The bytes at `position` as a batch header, unchecked. None if the file ends within them. Raises OSError."""
    data = file.read_at(HEADER_SIZE, position)
    return BatchHeader._make(HEADER.unpack(data)) if len(data) == HEADER_SIZE else None


def batch_at(segment: Segment, position: int, header: BatchHeader, *, wait: bool = True) -> bytes:
    file, size_bytes = segment.file, header.size_bytes
    wait = wait or position >= segment.warm_from
    data = file.read_at(size_bytes, position) if wait else file.read_at_nowait(size_bytes, position)
    if data is None:
        raise _cold(segment, position, size_bytes)
    if len(data) < size_bytes:
        raise CorruptIndex(segment.path, f"{size_bytes} bytes at {position} should be there, {len(data)} are")
    return data


def checked_headers(
    segment: Segment,
    offset: int,
    *,
    wait: bool,
    epochs: LeaderEpochs | None = None,
    bytes_max: int = CHECKED_BYTES_MAX,
) -> Iterator[tuple[int, BatchHeader]]:
    """`headers` from the batch that holds `offset` on, each checked as for a reader: offsets, CRC, with `epochs` these.

    For decisions that pass over records, or remove them. Raises CorruptIndex, too, where more than `bytes_max` are to
    be checked, which would block the loop: an examination, on a thread, checks them.
    """
    start = position_of(segment, offset, wait=wait)
    is_hidden = damage_at(segment.damage, offset) is not None
    end, expected, left = start, segment.base_offset, bytes_max
    for position, header in headers(segment, start, wait=wait):
        is_next = header.base_offset == expected
        if position != end or (position == start and is_hidden):  # behind damage
            is_next = header.base_offset >= expected
        elif position == start and not is_next:
            is_next = header.base_offset <= offset <= header.last_offset
        if not is_next and not (segment.may_have_gaps and header.base_offset > expected):
            raise CorruptIndex(segment.path, f"base offset {header.base_offset} at {position}, not {expected}")
        if epochs and header.partition_leader_epoch != epochs.epoch_for_offset(header.base_offset) >= 0:
            reason = f"leader epoch {header.partition_leader_epoch} of offset {header.base_offset}"
            raise CorruptIndex(segment.path, reason)
        end, expected = position + header.size_bytes, header.next_offset
        if not segment.is_trusted(position, end):
            left -= header.size_bytes
            if left < 0:
                raise CorruptIndex(segment.path, "is checked as a whole")
            if not check_crc(batch_at(segment, position, header, wait=wait), 0, header):
                raise CorruptIndex(segment.path, f"the CRC of the batch at {position} is wrong")
        yield position, header
    if start < end == segment.size_bytes and expected != segment.next_offset and not segment.may_end_early:
        raise CorruptIndex(segment.path, f"ends at offset {expected}, not {segment.next_offset}")
