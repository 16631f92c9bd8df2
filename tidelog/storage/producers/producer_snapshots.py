"""Producer state on disk: .snapshot files, named by the offset at which they were taken.

Encodes and decodes snapshots, and keeps the needed ones: one per recent segment, one at the log end. An unreadable
snapshot raises CorruptSnapshot, and `load_latest` deletes it: the batches of the log can always rebuild the state.
Layout: docs/formats/producer_snapshot.md (Kafka's ProducerSnapshot, version 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct
from struct import error as StructError
from typing import Final

from tidelog.protocol.batches.crc import crc32c
from tidelog.storage.files.disk import Disk
from tidelog.storage.producers.producer_state import ProducerEntry, ProducerState
from tidelog.storage.segments.segment import DELETED_SUFFIX, file_name

SNAPSHOT_SUFFIX: Final = ".snapshot"
_VERSION: Final = 1
_HEAD: Final = Struct(">hIi")
_CHECKED_FROM: Final = 6
_ENTRY: Final = Struct(">qhiqiqiq")
_SEQUENCE_MODULUS: Final = 2**31


class CorruptSnapshot(Exception):
    pass


def encode_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    rows = []
    for entry in entries:
        last_sequence, last_offset, offset_delta = -1, -1, 0
        if entry.batches:
            _, last_sequence, first_offset, last_offset, _ = entry.batches[-1]
            offset_delta = last_offset - first_offset
        rows.append(
            _ENTRY.pack(
                entry.producer_id,
                entry.epoch,
                last_sequence,
                last_offset,
                offset_delta,
                entry.last_timestamp,
                entry.coordinator_epoch,
                entry.transaction_first_offset,
            )
        )
    data = bytearray(_HEAD.pack(_VERSION, 0, len(rows)) + b"".join(rows))
    data[2:6] = crc32c(bytes(data[_CHECKED_FROM:])).to_bytes(4, "big")
    return bytes(data)


def decode_snapshot(data: bytes) -> list[ProducerEntry]:
    """Raises CorruptSnapshot."""
    try:
        version, crc, count = _HEAD.unpack_from(data)
    except StructError:
        raise CorruptSnapshot(f"{len(data)} bytes") from None
    if version != _VERSION:
        raise CorruptSnapshot(f"unknown version {version}")
    if crc != crc32c(data[_CHECKED_FROM:]):
        raise CorruptSnapshot("the CRC is wrong")
    if len(data) != _HEAD.size + count * _ENTRY.size:
        raise CorruptSnapshot(f"{count} entries in {len(data)} bytes")
    entries = []
    for (
        producer_id,
        epoch,
        last_sequence,
        last_offset,
        delta,
        timestamp,
        coordinator_epoch,
        first_offset,
    ) in _ENTRY.iter_unpack(data[_HEAD.size :]):
        batches = []
        if last_offset >= 0:
            first_sequence = (last_sequence - delta) % _SEQUENCE_MODULUS
            batches.append((first_sequence, last_sequence, last_offset - delta, last_offset, timestamp))
        entries.append(ProducerEntry(producer_id, epoch, coordinator_epoch, timestamp, first_offset, batches))
    return entries


class ProducerSnapshots:
    """The snapshot files of one log."""

    __slots__ = ("_directory", "_disk", "_offsets")

    def __init__(self, disk: Disk, directory: str, offsets: Iterable[int] = ()) -> None:
        self._disk = disk
        self._directory = directory
        self._offsets = sorted(offsets)

    @property
    def offsets(self) -> list[int]:
        return list(self._offsets)

    @property
    def latest(self) -> int:
        """The offset of the newest snapshot, -1 without one."""
        return self._offsets[-1] if self._offsets else -1

    def moved_to(self, directory: str) -> None:
        """The directory was renamed."""
        self._directory = directory

    def path(self, offset: int) -> str:
        return f"{self._directory}/{file_name(offset, SNAPSHOT_SUFFIX)}"

    def take(self, state: ProducerState, *, sync: bool) -> str | None:
        """Write a snapshot at the state's end offset, unless there is one. Returns its path."""
        offset = state.end_offset
        if offset <= self.latest or offset == 0:
            return None
        path = self.path(offset)
        self._disk.write_file(path, encode_snapshot(state.entries.values()), sync=sync)
        self._offsets.append(offset)
        return path

    def load_latest(self, log_start_offset: int, log_end_offset: int) -> tuple[list[ProducerEntry], int]:
        """The newest usable snapshot in (log start, log end] and its offset; ([], log start) without one.

        Snapshots ahead of the log, at or below its start, or unreadable are deleted.
        """
        for offset in list(self._offsets):
            if offset > log_end_offset or offset <= log_start_offset:
                self.delete(offset)
        for offset in reversed(self.offsets):
            try:
                return decode_snapshot(self._disk.read_file(self.path(offset))), offset
            except (CorruptSnapshot, FileNotFoundError):
                self.delete(offset)
        return [], log_start_offset

    def read(self, offset: int) -> list[ProducerEntry]:
        """Raises CorruptSnapshot, FileNotFoundError."""
        return decode_snapshot(self._disk.read_file(self.path(offset)))

    def delete(self, offset: int) -> None:
        self._disk.remove(self.path(offset))
        self._offsets.remove(offset)

    def mark_deleted(self, offset: int) -> list[str]:
        """Rename a snapshot, as Kafka does, so that it can be removed later. The new path, if there is one."""
        if offset not in self._offsets:
            return []
        self._offsets.remove(offset)
        target = self.path(offset) + DELETED_SUFFIX
        try:
            self._disk.rename(self.path(offset), target)
        except FileNotFoundError:
            return []
        return [target]

    def delete_where(self, low: int, high: int) -> None:
        """Delete the snapshots in [low, high)."""
        for offset in [offset for offset in self._offsets if low <= offset < high]:
            self.delete(offset)

    def keep_only(self, base_offsets: Iterable[int]) -> None:
        """Delete strays: snapshots that belong to no segment, except the newest of them when it is ahead of all
        (ProducerStateManager.removeStraySnapshots)."""
        kept_offsets = set(base_offsets)
        last_base = max(kept_offsets, default=0)
        strays = [offset for offset in self._offsets if offset not in kept_offsets]
        for offset in strays:
            if offset != strays[-1] or offset < last_base:
                self.delete(offset)
