"""Gives segment files their right names back when a log is opened: the first offset of a segment is its name.

A file under another name is one whose first batches follow each other, but not from the offset in the name on. Its
segment and the ones beside it would be damaged at offsets that lie inside of batches, which no copy of another replica
fits. A batch whose base offset is damaged does not make a file misnamed: the batch behind it does not follow it.
Invariant: no bytes are lost, except a second copy of a segment that is there under its own name.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import ATTRIBUTES_OFFSET, MAGIC, BatchHeader
from tidelog.storage.segments.reader import header_at
from tidelog.storage.segments.segment import DELETED_SUFFIX, LOG_SUFFIX, TRANSACTION_INDEX_SUFFIX, file_name

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Disk, File

logger = logging.getLogger("tidelog.storage")


def restore_names(disk: Disk, directory: str, names: set[str], cleaned_below: int) -> set[int]:
    """Rename the misnamed segment files in `directory`, and correct `names`, which are those of its files.

    `cleaned_below`: below this offset a cleaner may have removed the first batches of a segment. Returns the base
    offsets of the renamed segments. Raises OSError.
    """
    renamed = set()
    wrong = {}
    for name in sorted(names):
        if len(name) == 20 + len(LOG_SUFFIX) and name.endswith(LOG_SUFFIX) and name[:20].isdecimal():
            first_offset = _first_offset(disk, f"{directory}/{name}", int(name[:20]))
            if first_offset != int(name[:20]) >= cleaned_below:
                wrong[name] = file_name(first_offset, LOG_SUFFIX)
    while wrong:
        # A name that another misnamed file has is free once that one has moved. Two that are exchanged stay.
        movable = [one for one, right in wrong.items() if right not in wrong]
        if not movable:
            break
        name, right = movable[0], wrong.pop(movable[0])
        is_second = right in names
        logger.error("%s/%s begins at offset %d%s", directory, name, int(right[:20]), ", twice" if is_second else "")
        if not is_second:
            renamed.add(int(right[:20]))
            _rename_transaction_index(disk, directory, names, name, right)
        disk.rename(f"{directory}/{name}", f"{directory}/{name + DELETED_SUFFIX if is_second else right}")
        disk.sync_directory(directory)
        names.discard(name)
        if not is_second:
            names.add(right)
    return renamed


def _rename_transaction_index(disk: Disk, directory: str, names: set[str], log_name: str, right_log_name: str) -> None:
    """First, because it is deleted without its .log: a reader of committed records would get aborted ones."""
    name = log_name.replace(LOG_SUFFIX, TRANSACTION_INDEX_SUFFIX)
    right = right_log_name.replace(LOG_SUFFIX, TRANSACTION_INDEX_SUFFIX)
    if name in names and right not in names:
        disk.rename(f"{directory}/{name}", f"{directory}/{right}")
        disk.sync_directory(directory)
        names.discard(name)
        names.add(right)


def _first_offset(disk: Disk, path: str, named: int) -> int:
    """The base offset of the file's first batch, if the next batch follows it; otherwise `named`.

    A file that cannot be read here fails where its records are needed.
    """
    try:
        file = disk.open(path)
    except OSError:
        return named
    try:
        first = _header(file, 0)
        if first is None or first.base_offset == named or first.base_offset < 0:
            return named
        second = _header(file, first.size_bytes)
        if second is None or second.base_offset != first.next_offset:
            return named
        data = file.read_at(first.size_bytes, 0)
        return first.base_offset if crc32c(memoryview(data)[ATTRIBUTES_OFFSET:]) == first.crc else named
    except OSError:
        return named
    finally:
        file.close()


def _header(file: File, position: int) -> BatchHeader | None:
    header = header_at(file, position)
    if header is None:
        return None
    is_plausible = header.magic == MAGIC and header.batch_length > 0 and header.last_offset_delta >= 0
    return header if is_plausible else None
