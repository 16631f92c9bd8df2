"""The files of a replica, read without any code of the broker: batches, CRCs, offsets, indexes, checkpoints.

`read_log` walks the segments of one replica; `check_replicas` compares those of all, `check_compacted` those of a
compacted topic; `check_companions` looks at the files beside a log. Each returns what is wrong, one sentence each; no
sentence means whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import crc32c

BATCH_HEADER_BYTES = 61
_HEADER = struct.Struct(">qiibIhiqqqhii")
_INDEX_ROW = struct.Struct(">ii")
_TIME_ROW = struct.Struct(">qi")


class Batch(NamedTuple):
    """`position` is within its file."""

    base_offset: int
    next_offset: int
    leader_epoch: int
    crc: int
    max_timestamp_ms: int
    position: int
    size_bytes: int
    file: str


@dataclass(slots=True)
class Log:
    """`faults`: what is wrong with the bytes. Batches end with the first fault of each file."""

    directory: Path
    batches: list[Batch] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    """The bytes of the files of a compacted log, because its cleaner may replace them meanwhile."""

    @property
    def end(self) -> int:
        return self.batches[-1].next_offset if self.batches else 0


def parse_batches(data: bytes | memoryview, name: str, faults: list[str]) -> list[Batch]:
    """The batches of one file or of one answer, up to the first that is not whole, which becomes a fault."""
    found: list[Batch] = []
    position = 0
    while position < len(data):
        rest = len(data) - position
        if rest < BATCH_HEADER_BYTES:
            faults.append(f"{name}: {rest} bytes at {position} are no batch header")
            break
        base, length, epoch, magic, crc, _, delta, _, max_ms, _, _, _, count = _HEADER.unpack_from(data, position)
        size = 12 + length
        if magic != 2 or length < BATCH_HEADER_BYTES - 12 or size > rest:
            faults.append(f"{name}: at {position}: offset {base}, magic {magic}, length {length} of {rest} bytes")
            break
        if crc32c.crc32c(bytes(data[position + 21 : position + size])) != crc:
            faults.append(f"{name}: the CRC of the batch at {position} (offset {base}) is wrong")
            break
        if count > 0 and delta < count - 1:
            faults.append(f"{name}: the batch at {position} has {count} records and last offset delta {delta}")
        found.append(Batch(base, base + delta + 1, epoch, crc, max_ms, position, size, name))
        position += size
    return found


def read_log(directory: Path, *, compacted: bool = False) -> Log:
    """Every segment of a replica: named by its first offset, and each offset once."""
    log = Log(directory)
    for file in sorted(directory.glob("*.log")):
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            continue
        if compacted:
            log.contents[file.name] = data
        batches = parse_batches(data.rstrip(b"\0") if _is_preallocated(data) else data, file.name, log.faults)
        if batches and batches[0].base_offset < int(file.stem):
            log.faults.append(f"{file.name} begins with offset {batches[0].base_offset}")
        log.batches += batches
    for before, after in zip(log.batches, log.batches[1:]):
        gap = after.base_offset - before.next_offset
        if gap < 0 or (gap > 0 and not compacted):
            log.faults.append(f"{after.file}: offset {before.next_offset - 1} is followed by {after.base_offset}")
        if after.leader_epoch < before.leader_epoch:
            log.faults.append(
                f"{after.file}: leader epoch {after.leader_epoch} at {after.base_offset} behind {before.leader_epoch}"
            )
    return log


def _is_preallocated(data: bytes) -> bool:
    """Whether the file was made longer than what is written, as Kafka's metadata log is."""
    return len(data) >= 1 << 20 and data.endswith(bytes(1 << 12))


def check_replicas(logs: Mapping[int, Log], start: int, end: int) -> list[str]:
    """Every replica is whole and has the same batches between two offsets."""
    wrong = [f"node {node}: {log.directory.name}/{fault}" for node, log in logs.items() for fault in log.faults]
    contents = {
        node: [one[:5] for one in log.batches if one.base_offset >= start and one.next_offset <= end]
        for node, log in logs.items()
    }
    for node, log in logs.items():
        first = log.batches[0].base_offset if log.batches else 0
        if log.end < end or first > start:
            wrong.append(f"node {node}: {log.directory.name} holds {first} to {log.end} of {start} to {end}")
    (one, expected), *others = contents.items()
    for node, found in others:
        if found != expected:
            at = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), min(len(found), len(expected)))
            wrong.append(
                f"nodes {one} and {node}: {logs[node].directory.name} differs from batch {at} on: "
                f"{expected[at : at + 1]} and {found[at : at + 1]}"
            )
    return wrong


def check_compacted(logs: Mapping[int, Log], end: int) -> list[str]:
    """Every replica is whole, and has the same last record of each key: each node cleans its own log in its own time.

    A repair may seal a segment on one node alone, which that node then cleans. Deleted keys do not count.
    """
    wrong = [f"node {node}: {log.directory.name}/{fault}" for node, log in logs.items() for fault in log.faults]
    wrong += [
        f"node {node}: {log.directory.name} ends at {log.end} of {end}" for node, log in logs.items() if log.end < end
    ]
    (one, expected), *others = ((node, _last_of_keys(log, end)) for node, log in logs.items())
    for node, found in others:
        different = sorted(key for key in {*expected, *found} if expected.get(key) != found.get(key))
        if different:
            key = different[0]
            wrong.append(
                f"nodes {one} and {node}: {logs[node].directory.name} differs in {len(different)} keys: of {key!r} "
                f"they have {expected.get(key)} and {found.get(key)}"
            )
    return wrong


def _last_of_keys(log: Log, end: int) -> dict[bytes, tuple[int, bytes]]:
    """Key -> offset and value of its last record below `end`."""
    last: dict[bytes, tuple[int, bytes]] = {}
    for batch in log.batches:
        for offset, key, value in _records(log.contents[batch.file], batch):
            if offset >= end or key is None:
                continue
            if value is None:
                last.pop(key, None)
            else:
                last[key] = offset, value
    return last


def _records(data: bytes, batch: Batch) -> Iterator[tuple[int, bytes | None, bytes | None]]:
    attributes, at = data[batch.position + 22], batch.position + BATCH_HEADER_BYTES
    assert attributes & 7 == 0, "records of internal topics are not compressed here"
    end = batch.position + batch.size_bytes
    while at < end and not attributes & 32:
        size, at = _varint(data, at)
        following = at + size
        _, at = _varint(data, at + 1)
        delta, at = _varint(data, at)
        fields: list[bytes | None] = []
        for _ in range(2):
            length, at = _varint(data, at)
            fields.append(None if length < 0 else data[at : at + length])
            at += max(0, length)
        yield batch.base_offset + delta, fields[0], fields[1]
        at = following


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value >> 1 ^ -(value & 1), at


def check_companions(log: Log) -> list[str]:
    """Indexes, snapshots and the file of epochs of a stopped node agree with the batches beside them."""
    wrong: list[str] = []
    directory = log.directory
    by_file: dict[str, list[Batch]] = {}
    for batch in log.batches:
        by_file.setdefault(batch.file.removesuffix(".log"), []).append(batch)
    for file in sorted(directory.glob("*.index")):
        wrong += _check_index(file, by_file.get(file.stem, []))
    for file in sorted(directory.glob("*.timeindex")):
        wrong += _check_time_index(file, by_file.get(file.stem, []))
    for file in sorted(directory.glob("*.snapshot")):
        data = file.read_bytes()
        if len(data) < 10 or crc32c.crc32c(data[6:]) != struct.unpack_from(">I", data, 2)[0]:
            wrong.append(f"{directory.name}/{file.name}: the CRC of the producer snapshot is wrong")
    for file in sorted(directory.glob("*.txnindex")):
        if file.stat().st_size % 34:
            wrong.append(f"{directory.name}/{file.name}: {file.stat().st_size} bytes are no rows of 34")
    return wrong + _check_epochs(directory / "leader-epoch-checkpoint", log.batches)


def _check_index(file: Path, batches: list[Batch]) -> list[str]:
    name, data, base = f"{file.parent.name}/{file.name}", _without_zero_rows(file.read_bytes(), 8), int(file.stem)
    if len(data) % 8:
        return [f"{name}: {len(data)} bytes are no rows of 8"]
    at = {one.position: one for one in batches}
    before = (-1, -1)
    for row in _INDEX_ROW.iter_unpack(data):
        batch = at.get(row[1])
        if row[0] <= before[0] or row[1] <= before[1]:
            return [f"{name}: row {row} behind {before}"]
        if batch is None or row[0] + base < batch.base_offset:
            return [f"{name}: row {row} points to {batch}"]
        if row[0] + base >= batches[-1].next_offset:
            return [f"{name}: row {row} lies behind the end at {batches[-1].next_offset}"]
        before = row
    return []


def _check_time_index(file: Path, batches: list[Batch]) -> list[str]:
    name, data, base = f"{file.parent.name}/{file.name}", _without_zero_rows(file.read_bytes(), 12), int(file.stem)
    if len(data) % 12:
        return [f"{name}: {len(data)} bytes are no rows of 12"]
    before = (-1, -1)
    for row in _TIME_ROW.iter_unpack(data):
        if row[0] < before[0] or row[1] < before[1]:
            return [f"{name}: row {row} behind {before}"]
        so_far = [one for one in batches if one.base_offset <= row[1] + base]
        if so_far and max(one.max_timestamp_ms for one in so_far) != row[0]:
            return [f"{name}: row {row}, but the latest time so far is {max(one.max_timestamp_ms for one in so_far)}"]
        if batches and row[1] + base >= batches[-1].next_offset:
            return [f"{name}: row {row} lies behind the end at {batches[-1].next_offset}"]
        before = row
    return []


def _without_zero_rows(data: bytes, width: int) -> bytes:
    """Kafka does not cut the indexes of segments that it did not close."""
    while len(data) > width and not any(data[-width:]):
        data = data[:-width]
    return data


def _check_epochs(file: Path, batches: list[Batch]) -> list[str]:
    name = f"{file.parent.name}/{file.name}"
    if not batches:
        return []
    try:
        version, count, *lines = file.read_text().splitlines()
        rows = [(int(line.split()[0]), int(line.split()[1])) for line in lines]
    except (OSError, ValueError, IndexError) as error:
        return [f"{name}: {error!r}"]
    if int(version) != 0 or int(count) != len(rows):
        return [f"{name}: says version {version}, {count} rows, and has {len(rows)}"]
    if rows != sorted(set(rows)) or [row[1] for row in rows] != sorted(row[1] for row in rows):
        return [f"{name}: rows out of order: {rows}"]
    for batch in batches:
        epoch = max(
            (row for row in rows if row[1] <= batch.base_offset), default=(None, 0), key=lambda row: (row[1], row[0])
        )[0]
        if epoch != batch.leader_epoch:
            return [f"{name}: {rows} says epoch {epoch} of offset {batch.base_offset}, which has {batch.leader_epoch}"]
    return []
