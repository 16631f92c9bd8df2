"""Beside the logs of a broker: in which broker epoch, and since which boot of the machine, it writes them.

A process that is killed leaves what it wrote in the page cache, so its logs lack nothing of what was acknowledged as
long as the machine has not booted since. Then the next process may speak for the epoch of the one before, as it does
after a clean shutdown (KIP-966). The file is only believed with the same boot id, so it needs no sync.
"""

from __future__ import annotations

import json
from typing import Final

from tidelog.storage.files.checkpoints import read_if_exists, replace_file
from tidelog.storage.files.disk import Disk

INCARNATION_FILE: Final = "broker.incarnation"


def write_incarnation(disk: Disk, directory: str, broker_epoch: int, boot_id: str) -> None:
    """`boot_id` empty: the machine does not tell, and nobody may rely on anything."""
    content = {"version": 0, "brokerEpoch": broker_epoch, "bootId": boot_id}
    replace_file(disk, directory, INCARNATION_FILE, json.dumps(content, separators=(",", ":")).encode(), sync=False)


def surviving_epoch(disk: Disk, directory: str, boot_id: str) -> int:
    """The broker epoch whose writes are all still there, -1 if some may be lost."""
    epoch = _epoch_since(disk, directory, boot_id)
    return -1 if epoch is None else epoch


def machine_ran_on(disk: Disk, directory: str, boot_id: str) -> bool:
    """Whether all that the last process wrote is in its files, also that of a controller, which has no broker epoch."""
    return _epoch_since(disk, directory, boot_id) is not None


def _epoch_since(disk: Disk, directory: str, boot_id: str) -> int | None:
    data = read_if_exists(disk, f"{directory}/{INCARNATION_FILE}")
    if data is None or not boot_id:
        return None
    try:
        content = json.loads(data)
        return int(content["brokerEpoch"]) if content["bootId"] == boot_id else None
    except (ValueError, KeyError, TypeError):
        return None


def remove_incarnation(disk: Disk, directory: str) -> None:
    """Something written in this epoch may be lost: nobody is to speak for it. Where even this fails, so be it."""
    try:
        disk.remove(f"{directory}/{INCARNATION_FILE}")
    except OSError:
        pass
