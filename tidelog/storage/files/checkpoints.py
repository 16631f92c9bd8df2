"""Kafka's small text files: offset and leader-epoch checkpoints, partition.metadata, meta.properties, the clean marker.

Encoders and parsers, and the one way a small file is replaced: written beside, renamed over. A file that cannot be
parsed raises CorruptCheckpoint, and its reader decides what it can be rebuilt from. Layouts: docs/formats/.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from typing import Final

from tidelog.protocol.uuids import ZERO_UUID, uuid_from_text, uuid_to_text
from tidelog.storage.files.disk import Disk

RECOVERY_POINT_FILE: Final = "recovery-point-offset-checkpoint"
LOG_START_FILE: Final = "log-start-offset-checkpoint"
HIGH_WATERMARK_FILE: Final = "replication-offset-checkpoint"
CLEANER_OFFSET_FILE: Final = "cleaner-offset-checkpoint"
LEADER_EPOCH_FILE: Final = "leader-epoch-checkpoint"
PARTITION_METADATA_FILE: Final = "partition.metadata"
META_PROPERTIES_FILE: Final = "meta.properties"
CLEAN_SHUTDOWN_FILE: Final = ".kafka_cleanshutdown"
EXPLAINED_GAPS_FILE: Final = "explained-gaps"

logger = logging.getLogger("tidelog.storage")

_VERSION: Final = "0"
_MAX_CHECKPOINT_LINES: Final = 10_000_000


class CorruptCheckpoint(Exception):
    """A small file of ours whose content is not what its format allows."""


def replace_file(disk: Disk, directory: str, name: str, data: bytes, *, sync: bool = True) -> None:
    """Put `data` in place of the file, so that a reader finds the old content or the new, never a part.

    With `sync` the new content is on the device when this returns; without, a power loss may leave anything.
    """
    path = f"{directory}/{name}"
    disk.write_file(path + ".tmp", data, sync=sync)
    disk.rename(path + ".tmp", path)
    if sync:
        disk.sync_directory(directory)


def read_if_exists(disk: Disk, path: str) -> bytes | None:
    try:
        return disk.read_file(path)
    except FileNotFoundError:
        return None


def require_formatted(disk: Disk, directory: str) -> None:
    """OSError where the log directory has vanished, or where another is in its place, such as an empty mount point.

    The files that are open do not show it: what is written to them succeeds, and no later start finds it.
    """
    disk.size_of(f"{directory}/{META_PROPERTIES_FILE}")


Offsets = Mapping[tuple[str, int], int]


def write_epochs(disk: Disk, epochs: Mapping[str, bytes]) -> None:
    """Log's directory -> the content of its epoch file. One that is gone was deleted meanwhile."""
    for directory, data in epochs.items():
        try:
            replace_file(disk, directory, LEADER_EPOCH_FILE, data)
        except FileNotFoundError:
            pass


class CheckpointTask:
    """Offset checkpoints as they were when it was made; `run` puts them on the device, beside those in force."""

    def __init__(
        self, disk: Disk, directory: str, files: Mapping[str, Offsets], number: int, epochs: Mapping[str, bytes]
    ) -> None:
        """`epochs`: log's directory -> its leader epochs, written first (`log/directory.py` says why)."""
        self._disk = disk
        self._directory = directory
        self._epochs = epochs
        self.files = files
        self.number = number
        self.error: OSError | None = None

    def run(self) -> None:
        """May wait for the device; any thread, once. A failure is kept for `finish`.

        Also where no file is to be written this finds out whether the directory is still there.
        """
        try:
            require_formatted(self._disk, self._directory)
            write_epochs(self._disk, self._epochs)
            for name, offsets in self.files.items():
                self._disk.write_file(f"{self._directory}/{name}.next.tmp", encode_offsets(offsets), sync=True)
        except OSError as error:
            self.error = error

    def put_in_place(self) -> None:
        # After a crash either content is right, so nobody waits for the directory.
        for name in self.files:
            self._disk.rename(f"{self._directory}/{name}.next.tmp", f"{self._directory}/{name}")


class OffsetCheckpoints:
    """The checkpoint files of one directory. Older content never replaces newer, on whatever thread it was written."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._number = 0
        self._in_force: dict[str, Offsets] = {}  # what this process has put in place: not written again unchanged

    def read(self, name: str) -> dict[tuple[str, int], int]:
        """Empty where there is none, or none that can be read."""
        data = read_if_exists(self._disk, f"{self._directory}/{name}")
        try:
            return decode_offsets(data) if data else {}
        except CorruptCheckpoint as error:
            logger.warning("%s/%s is unreadable and taken as empty: %s", self._directory, name, error)
            return {}

    def write(self, offsets: Mapping[str, Offsets]) -> None:
        """File name -> its offsets; on the device when this returns."""
        require_formatted(self._disk, self._directory)
        self._number += 1
        for name, each in offsets.items():
            self._in_force.pop(name, None)
            replace_file(self._disk, self._directory, name, encode_offsets(each))
            self._in_force[name] = each

    def begin(self, offsets: Mapping[str, Offsets], epochs: Mapping[str, bytes]) -> CheckpointTask:
        """What differs from the files in force. The mappings are not to be changed any more: a thread encodes them."""
        changed = {name: each for name, each in offsets.items() if self._in_force.get(name) != each}
        return CheckpointTask(self._disk, self._directory, changed, self._number, epochs)

    def finish(self, task: CheckpointTask) -> bool:
        """Whether its files are in place: they are not where others were written meanwhile."""
        if task.error is not None:
            raise task.error
        if task.number != self._number:
            return False
        task.put_in_place()
        self._in_force.update(task.files)
        return True


def encode_offsets(offsets: Mapping[tuple[str, int], int]) -> bytes:
    """(topic, partition) -> offset, in Kafka's OffsetCheckpointFile format."""
    lines = [_VERSION, str(len(offsets))]
    lines.extend(f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items()))
    return _join(lines)


def decode_offsets(data: bytes) -> dict[tuple[str, int], int]:
    """An empty file is an empty checkpoint, as Kafka creates it."""
    offsets: dict[tuple[str, int], int] = {}
    for line in _entries(data):
        topic, partition, offset = _fields(line, 3)
        offsets[topic, _integer(partition)] = _integer(offset)
    return offsets


def encode_leader_epochs(entries: Iterable[tuple[int, int]]) -> bytes:
    """(epoch, start offset) pairs in rising order, in Kafka's LeaderEpochCheckpointFile format."""
    pairs = [f"{epoch} {start_offset}" for epoch, start_offset in entries]
    return _join([_VERSION, str(len(pairs)), *pairs])


def decode_leader_epochs(data: bytes) -> list[tuple[int, int]]:
    entries: list[tuple[int, int]] = []
    for line in _entries(data):
        epoch, start_offset = (_integer(field) for field in _fields(line, 2))
        last_epoch, last_start = entries[-1] if entries else (-1, -1)
        if epoch <= last_epoch or start_offset <= last_start:
            raise CorruptCheckpoint(f"epoch {epoch} at {start_offset} after epoch {last_epoch} at {last_start}")
        entries.append((epoch, start_offset))
    return entries


def encode_partition_metadata(topic_id: bytes) -> bytes:
    return f"version: 0\ntopic_id: {uuid_to_text(topic_id)}".encode()


def decode_partition_metadata(data: bytes) -> bytes:
    """The topic id, 16 bytes, never zero."""
    lines = _text(data).splitlines()
    values = dict(line.split(": ", 1) for line in lines if ": " in line)
    if _integer(values.get("version", "")) < 0:
        raise CorruptCheckpoint(f"version {values['version']!r}")
    try:
        topic_id = uuid_from_text(values.get("topic_id", "").strip())
    except ValueError as error:
        raise CorruptCheckpoint(str(error)) from None
    if topic_id == ZERO_UUID:
        raise CorruptCheckpoint("the topic id is zero")
    return topic_id


def encode_explained_gaps(end_offset: int) -> bytes:
    """Every replica lacks what is missing between the batches below `end_offset`."""
    return _join([_VERSION, str(end_offset)])


def decode_explained_gaps(data: bytes) -> int:
    lines = _text(data).splitlines()
    if len(lines) != 2 or lines[0] != _VERSION or _integer(lines[1]) < 0:
        raise CorruptCheckpoint(f"not a version and an offset: {lines[:3]!r}")
    return _integer(lines[1])


def encode_properties(values: Mapping[str, str]) -> bytes:
    """A Java properties file of plain keys and values (those of meta.properties need no escapes)."""
    return ("#\n" + "".join(f"{key}={value}\n" for key, value in sorted(values.items()))).encode()


def decode_properties(data: bytes) -> dict[str, str]:
    values: dict[str, str] = {}
    for line in _text(data).splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        key, separator, value = stripped.partition("=")
        if not separator:
            raise CorruptCheckpoint(f"line without '=': {line!r}")
        values[key.strip()] = value.strip().replace("\\:", ":").replace("\\=", "=")
    return values


def encode_clean_shutdown(broker_epoch: int) -> bytes:
    return json.dumps({"version": 0, "brokerEpoch": broker_epoch}, separators=(",", ":")).encode()


def decode_clean_shutdown(data: bytes) -> int:
    """The broker epoch of the clean shutdown, -1 where the marker does not say (its existence counts, as in Kafka)."""
    try:
        content = json.loads(data)
        return int(content["brokerEpoch"])
    except (ValueError, KeyError, TypeError):
        return -1


def _join(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()


def _entries(data: bytes) -> list[str]:
    lines = _text(data).splitlines()
    if not lines or len(lines) == 1:
        if lines and lines[0] != _VERSION:
            raise CorruptCheckpoint(f"unknown version {lines[0]!r}")
        return []
    if lines[0] != _VERSION:
        raise CorruptCheckpoint(f"unknown version {lines[0]!r}")
    entries = lines[2:]
    if len(entries) != _integer(lines[1]) or len(entries) > _MAX_CHECKPOINT_LINES:
        raise CorruptCheckpoint(f"{lines[1]} entries announced, {len(entries)} found")
    return entries


def _fields(line: str, count: int) -> list[str]:
    fields = line.split()
    if len(fields) != count:
        raise CorruptCheckpoint(f"not {count} fields: {line!r}")
    return fields


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise CorruptCheckpoint(f"not a number: {text!r}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"not text: {error}") from None
