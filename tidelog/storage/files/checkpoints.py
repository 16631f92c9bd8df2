"""Kafka's small text files: offset and leader-epoch checkpoints, partition.metadata, meta.properties, the clean marker.

Encoders, parsers, and the atomic replacement of a small file: write a temporary file, rename it. A file that cannot be
parsed raises CorruptCheckpoint, and its reader decides how to rebuild it. Layouts: docs/formats/.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple, Protocol

from tidelog.protocol.batches.crc import crc32c
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
CLEANED_ENDS_FILE: Final = "cleaned-ends"
TRANSACTION_SUMS_FILE: Final = "transaction-index-checksums"

logger = logging.getLogger("tidelog.storage")

_VERSION: Final = "0"
_END_OFFSET_VERSION: Final = "1"
"""Version 0 had no checksum."""
_EARLY_ENDS_VERSION: Final = "2"
_MAX_CHECKPOINT_LINES: Final = 10_000_000


class CorruptCheckpoint(Exception):
    """The content of a small file does not follow its format."""


def replace_file(disk: Disk, directory: str, name: str, data: bytes, *, sync: bool = True) -> None:
    """Replace the file's content atomically: a reader gets the old content or the new one.

    With `sync` the new content is on the device afterwards. Without it a power loss may leave any content.
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
    """Raises OSError if the log directory has vanished, or has been replaced, for example by an empty mount point.

    Open files do not show this: writes to them succeed, but a later start would not have their data.
    """
    disk.size_of(f"{directory}/{META_PROPERTIES_FILE}")


Offsets = Mapping[tuple[str, int], int]


class RetiringLog(Protocol):
    """A log with segments that are out of it, whose files may go when its log start is on the device."""

    def rename_condemned(self, checkpointed_log_start: int, now_ms: int) -> None: ...


class CheckpointTask:
    """A snapshot of the offset checkpoints. `run` writes it to temporary files, beside the present checkpoints."""

    def __init__(
        self, disk: Disk, directory: str, files: Mapping[str, Offsets], number: int, write_first: Callable[[], None]
    ) -> None:
        """`write_first` writes what must be on the device before these files. Raises OSError."""
        self._disk = disk
        self._directory = directory
        self._write_first = write_first
        self.files = files
        self.number = number
        self.error: Exception | None = None
        self.retiring: Sequence[tuple[RetiringLog, int]] = ()
        """(log, its start in these files) of each log with segments to remove."""
        self.is_in_place = False
        """Whether `finish` has put the files in place, except that of the cleaner."""
        self.unnamed: frozenset[str] = frozenset()
        """Directories of deleted logs, which these files do not name any more."""
        self.cleaned: Set[tuple[str, int]] = frozenset()
        """The logs that the cleaner's checkpoint names before and after it."""
        self.present: set[str] = set()
        """The paths of the directories that `run` found in the log directory."""

    def run(self) -> None:
        """Write the files, once, on any thread. Waits for the device. `finish` raises a failure.

        It checks that the directory still exists, even if there is no file to write, and lists the logs in it.
        """
        try:
            require_formatted(self._disk, self._directory)
            names = [entry.name for entry in self._disk.list_directory(self._directory) if entry.is_directory]
            self.present = {f"{self._directory}/{name}" for name in names}
            self._write_first()
            for name, offsets in self.files.items():
                self._disk.write_file(f"{self._directory}/{name}.next.tmp", encode_offsets(offsets), sync=True)
        except Exception as error:
            self.error = error

    def sync(self) -> None:
        """Have the files on the device, once they are in place. On any thread."""
        try:
            self._disk.sync_directory(self._directory)
        except Exception as error:
            self.error = error

    def put_in_place(self, name: str) -> None:
        self._disk.rename(f"{self._directory}/{name}.next.tmp", f"{self._directory}/{name}")


class OffsetCheckpoints:
    """The checkpoint files of one directory. Older content never replaces newer, on whatever thread it was written."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self.number = 0
        """Of the newest content that was written."""
        self.unreadable: set[str] = set()
        """The files that `read` could not parse."""
        self._in_force: dict[str, Offsets] = {}  # the present content; unchanged content is not written again

    def read(self, name: str) -> dict[tuple[str, int], int]:
        """The offsets in the file. Empty if it does not exist or cannot be parsed."""
        data = read_if_exists(self._disk, f"{self._directory}/{name}")
        try:
            return decode_offsets(data) if data else {}
        except CorruptCheckpoint as error:
            logger.warning("cannot read %s/%s, taking it as empty: %s", self._directory, name, error)
            self.unreadable.add(name)
            return {}

    def write(self, offsets: Mapping[str, Offsets]) -> None:
        """Write and sync the files. `offsets`: file name -> its offsets."""
        require_formatted(self._disk, self._directory)
        self.number += 1
        for name, each in offsets.items():
            self._in_force.pop(name, None)
            replace_file(self._disk, self._directory, name, encode_offsets(each))
            self._in_force[name] = each

    def begin(self, offsets: Mapping[str, Offsets], write_first: Callable[[], None], number: int) -> CheckpointTask:
        """A task for the files that change. The caller must not change the mappings, because a thread encodes them.

        `number`: of the newest content when the caller began to collect these offsets.
        """
        changed = {name: each for name, each in offsets.items() if self._in_force.get(name) != each}
        return CheckpointTask(self._disk, self._directory, changed, number, write_first)

    def finish(self, task: CheckpointTask) -> bool:
        """Put the task's files in place, unless newer ones were written meanwhile. Whether it did.

        After a crash the old and the new content of each are right, so the directory is not synced here. The cleaner's
        file waits for `finish_cleaner`: a loss of power may keep any of these renames, and a start that reads of no
        cleaned log needs the recovery point of the flush behind that.
        """
        if task.error is not None:
            raise task.error
        if task.number == self.number:
            for name in task.files:
                if name != CLEANER_OFFSET_FILE:
                    self._put_in_place(task, name)
            task.is_in_place = True
        return task.is_in_place

    def finish_cleaner(self, task: CheckpointTask) -> bool:
        """Put the cleaner's file in place, when the others are on the device. Whether the newest content is there."""
        if not task.is_in_place or task.number != self.number:
            return False
        if CLEANER_OFFSET_FILE in task.files:
            self._put_in_place(task, CLEANER_OFFSET_FILE)
        return True

    def _put_in_place(self, task: CheckpointTask, name: str) -> None:
        task.put_in_place(name)
        self._in_force[name] = task.files[name]


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
    """Kafka's two lines, and a checksum after them, which Kafka does not read."""
    lines = f"version: 0\ntopic_id: {uuid_to_text(topic_id)}".encode()
    return lines + f"\ncrc32c: {crc32c(lines):08x}\n".encode()


def has_checksum(partition_metadata: bytes) -> bool:
    """Whether the file's topic id can be checked. Kafka writes it without a checksum."""
    return len(partition_metadata.splitlines()) > 2


def decode_partition_metadata(data: bytes) -> bytes:
    """The topic id, 16 bytes, never zero. Raises CorruptCheckpoint also for a wrong checksum.

    A wrong topic id would make the log that of another topic, and its records would not be served any more.
    """
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
    if has_checksum(data) and data.rstrip() != encode_partition_metadata(topic_id).rstrip():
        raise CorruptCheckpoint("its checksum is wrong")
    return topic_id


class ExplainedGaps(NamedTuple):
    """Missing offsets that are no damage."""

    end_offset: int = 0
    """Below it offsets may be missing between two batches of a segment, or before its first one."""
    early_ends: frozenset[tuple[int, int]] = frozenset()
    """(base offset, base offset of the next one) of the segments that may end before the next one begins."""


def encode_explained_gaps(gaps: ExplainedGaps) -> bytes:
    """The content of `explained-gaps`. Without early ends it is what the versions before them wrote and read."""
    if not gaps.early_ends:
        return encode_end_offset(gaps.end_offset)
    ends = [f"{base_offset} {next_offset}" for base_offset, next_offset in sorted(gaps.early_ends)]
    lines = [_EARLY_ENDS_VERSION, str(gaps.end_offset), *ends]
    return _with_checksum(lines)


def decode_explained_gaps(data: bytes) -> ExplainedGaps:
    """Raises CorruptCheckpoint also for a wrong checksum: an offset that is too large would hide damage."""
    lines = _text(data).splitlines()
    if lines[:1] != [_EARLY_ENDS_VERSION]:
        return ExplainedGaps(decode_end_offset(data))
    if len(lines) < 4:
        raise CorruptCheckpoint(f"not a version, an offset, segments and a checksum: {lines!r}")
    pairs = (_fields(line, 2) for line in lines[2:-1])
    gaps = ExplainedGaps(_integer(lines[1]), frozenset((_integer(base), _integer(after)) for base, after in pairs))
    if data != encode_explained_gaps(gaps):
        raise CorruptCheckpoint("the checksum is wrong")
    return gaps


def encode_end_offset(end_offset: int) -> bytes:
    """The content of `cleaned-ends`: the cleaning up to `end_offset` has left each segment's last batch."""
    lines = [_END_OFFSET_VERSION, str(end_offset)]
    return _with_checksum(lines)


def decode_end_offset(data: bytes) -> int:
    """Raises CorruptCheckpoint also for a wrong checksum: an offset that is too large would hide damage."""
    lines = _text(data).splitlines()
    if len(lines) != 3 or lines[0] != _END_OFFSET_VERSION or _integer(lines[1]) < 0:
        raise CorruptCheckpoint(f"not a version, an offset and a checksum: {lines[:4]!r}")
    end_offset = _integer(lines[1])
    if data != encode_end_offset(end_offset):
        raise CorruptCheckpoint(f"the checksum of offset {end_offset} is wrong")
    return end_offset


def encode_transaction_sums(sums: Mapping[int, tuple[int, int]]) -> bytes:
    """Base offset of a segment -> (size, CRC-32C) of its .txnindex; size -1: its rows are known to be incomplete."""
    entries = [f"{base_offset} {size_bytes} {crc:08x}" for base_offset, (size_bytes, crc) in sorted(sums.items())]
    lines = [_VERSION, str(len(entries)), *entries]
    return _with_checksum(lines)


def decode_transaction_sums(data: bytes) -> dict[int, tuple[int, int]]:
    """Raises CorruptCheckpoint also for a wrong checksum."""
    lines = _text(data).splitlines()
    sums: dict[int, tuple[int, int]] = {}
    for line in _entries(_join(lines[:-1])):
        base_offset, size_bytes, crc = _fields(line, 3)
        try:
            sums[_integer(base_offset)] = _integer(size_bytes), int(crc, 16)
        except ValueError:
            raise CorruptCheckpoint(f"not a checksum: {crc!r}") from None
    if data != encode_transaction_sums(sums):
        raise CorruptCheckpoint("the checksum is wrong")
    return sums


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
    """The broker epoch of the clean shutdown, -1 if the marker has none (its existence counts, as in Kafka)."""
    try:
        content = json.loads(data)
        return int(content["brokerEpoch"])
    except (ValueError, KeyError, TypeError):
        return -1


def _with_checksum(lines: list[str]) -> bytes:
    """The lines, and the CRC-32C of them as the last one."""
    return _join([*lines, f"{crc32c(_join(lines)):08x}"])


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
