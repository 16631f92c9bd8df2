"""Directories and devices under the names of files of a log or a log directory: a start renames them.

The caller says which files it can do without. They are then missing, and a start makes them anew. Nothing is removed.
A link that leads nowhere stays: its volume may be mounted later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from tidelog.storage.files.disk import DirectoryEntry, Disk

logger = logging.getLogger("tidelog.storage")

_SUFFIX: Final = ".not-a-file"


def free_names(
    disk: Disk, directory: str, entries: Iterable[DirectoryEntry], is_file_name: Callable[[str], bool]
) -> set[str]:
    """Rename those of `entries` that are no files, but have the name of one. Their names before. Raises OSError."""
    freed = set()
    for entry in entries:
        if (entry.is_directory or entry.is_special) and is_file_name(entry.name):
            path = f"{directory}/{entry.name}"
            target, number = path + _SUFFIX, 1
            while disk.exists(target):
                number += 1
                target = f"{path}{_SUFFIX}-{number}"
            logger.warning("%s is not a file: it is renamed to %s, and the file counts as missing", path, target)
            disk.rename(path, target)
            freed.add(entry.name)
    if freed:
        disk.sync_directory(directory)
    return freed
