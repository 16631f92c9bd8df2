"""`records-lost`, the file that tells the next starts that the metadata log lacks records which it may have
acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tidelog.protocol.batches.record_batch import HEADER_SIZE, MAGIC, MIN_BATCH_LENGTH, BatchHeader
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.loader import Ending
from tidelog.storage.segments.reader import header_at

if TYPE_CHECKING:
    from tidelog.storage.log.directory import LogDirectory

LACKING_FILE = "records-lost"
"""This file exists from before damaged records are truncated until the log has all committed records again."""
UNFINISHED = b"a part of the last batch\n"
"""The content of LACKING_FILE if only an incomplete last batch was truncated, which a kill during a write leaves."""


def note_loss(disk: Disk, directory: str, content: bytes = b"") -> None:
    """Write LACKING_FILE durably, before the metadata log in `directory` loses acknowledged records."""
    path = f"{directory}/{LACKING_FILE}"
    if not disk.exists(path) or (disk.read_file(path) != content and not content):
        disk.write_file(path, content, sync=True)
        disk.sync_directory(directory)


def note_loss_of(disk: Disk, home: LogDirectory) -> Callable[[str], None]:
    """A function to call with the directory of the metadata log in `home`, before the log's end is truncated."""
    return partial(_note_cut if home.ending is Ending.KILLED else note_loss, disk)


def _note_cut(disk: Disk, directory: str) -> None:
    names = [entry.name for entry in disk.list_directory(directory) if entry.name.endswith(".log")]
    file = disk.open(f"{directory}/{max(names)}")
    try:
        size_bytes, position = file.size_bytes(), 0
        while (batch_bytes := _batch_bytes(header_at(file, position))) and position + batch_bytes <= size_bytes:
            position += batch_bytes
        is_unfinished = bool(batch_bytes) or 0 < size_bytes - position < HEADER_SIZE
        note_loss(disk, directory, UNFINISHED if is_unfinished else b"")
    finally:
        file.close()


def _batch_bytes(header: BatchHeader | None) -> int:
    """The size of the batch with this header; 0 if it is none."""
    if header is None or header.magic != MAGIC or header.batch_length < MIN_BATCH_LENGTH:
        return 0
    return header.size_bytes
