"""The broker epoch and the boot id of the process that writes a log directory, in a file beside the logs.

The writes of a killed process stay in the page cache, so its logs have all acknowledged records unless the machine has
restarted since. Then the next process may claim the epoch of the last one, as after a clean shutdown (KIP-966). The
file counts only with the same boot id, so it needs no sync. It does not count if the volume was mounted since: a volume
that an error made read-only has lost what was not synced. A copy of a directory that was in use, copied back later, is
older than the process's last writes. So the file contains when it was written, and its inode. A copy of it, and a file
that was copied over or linked since, has changed later.
"""

from __future__ import annotations

import json
from typing import Final

from tidelog.storage.files.checkpoints import read_if_exists
from tidelog.storage.files.disk import Disk

INCARNATION_FILE: Final = "broker.incarnation"
WRITTEN_WITHIN_MS: Final = 1_000
"""The longest time from the creation of the file to its renaming, which is its last change."""


def write_incarnation(disk: Disk, directory: str, broker_epoch: int, boot_id: str) -> None:
    """Write the file. An empty `boot_id` means that it is unknown; then the file never counts."""
    path = f"{directory}/{INCARNATION_FILE}"
    disk.write_file(path + ".tmp", b"", sync=False)
    content = {"version": 0, "brokerEpoch": broker_epoch, "bootId": boot_id, "mount": disk.mount_of(directory)}
    content |= {"file": disk.identity(path + ".tmp"), "writtenMs": disk.changed_ms(path + ".tmp")}
    disk.write_file(path + ".tmp", json.dumps(content, separators=(",", ":")).encode(), sync=False)
    disk.rename(path + ".tmp", path)


def surviving_epoch(disk: Disk, directory: str, boot_id: str) -> int:
    """The broker epoch of the last process if all its writes are there, -1 if some may be lost."""
    epoch = _epoch_since(disk, directory, boot_id)
    return -1 if epoch is None else epoch


def machine_ran_on(disk: Disk, directory: str, boot_id: str) -> bool:
    """Whether all writes of the last process are in its files. Also for a controller, which has no broker epoch."""
    return _epoch_since(disk, directory, boot_id) is not None


def _epoch_since(disk: Disk, directory: str, boot_id: str) -> int | None:
    path = f"{directory}/{INCARNATION_FILE}"
    data = read_if_exists(disk, path)
    if data is None or not boot_id:
        return None
    try:
        content = json.loads(data)
        is_same_boot = content["bootId"] == boot_id and content["mount"] == disk.mount_of(directory)
        is_this_one = content["file"] == disk.identity(path)
        is_unchanged = abs(disk.changed_ms(path) - content["writtenMs"]) <= WRITTEN_WITHIN_MS
        return int(content["brokerEpoch"]) if is_same_boot and is_this_one and is_unchanged else None
    except (ValueError, KeyError, TypeError):
        return None


def remove_incarnation(disk: Disk, directory: str) -> None:
    """Remove the file, because writes of this epoch may be lost. An error is ignored."""
    try:
        disk.remove(f"{directory}/{INCARNATION_FILE}")
    except OSError:
        pass
