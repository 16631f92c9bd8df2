"""The owner of a log directory: meta.properties, which formatting writes once and every start checks.

`log/directory.py` opens and locks a directory. Invariant: a directory with other content is never formatted.
"""

from __future__ import annotations

import errno
import logging
from typing import Final

from tidelog.protocol.uuids import uuid_from_text, uuid_to_text
from tidelog.storage.files.checkpoints import (
    META_PROPERTIES_FILE,
    CorruptCheckpoint,
    decode_properties,
    encode_properties,
    replace_file,
)
from tidelog.storage.files.disk import Disk

logger = logging.getLogger("tidelog.storage")

_NOT_SYNCABLE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
)
"""It is another user's, and may only be passed, or its file system has no sync of directories."""


class ForeignDirectory(Exception):
    """The directory belongs to another cluster or node, or is no log directory. The message is one line."""


class DamagedProperties(ForeignDirectory):
    """The file with the owner is gone, or says nothing, though the directory has been in use."""

    def __init__(self, problem: str) -> None:
        super().__init__(
            f"{problem} (write it anew: version=1, node.id, and the cluster.id of another directory or node)"
        )


def make_durably(disk: Disk, path: str) -> None:
    """Create the directory and its missing parents, and sync the entries of all of them. Raises OSError.

    Those that are there may be new as well: another program may have made them just before.
    """
    names = path.rstrip("/").split("/")
    for count in range(1, len(names) + 1):
        if each := "/".join(names[:count]):
            if not disk.exists(each):
                disk.make_directory(each)
            _sync_entry(disk, each)
    disk.make_directory(path)  # an error if the path is no directory


def _sync_entry(disk: Disk, path: str) -> None:
    above = path.rpartition("/")[0] or ("/" if path.startswith("/") else ".")
    try:
        disk.sync_directory(above)
    except OSError as error:
        if error.errno not in _NOT_SYNCABLE:
            raise
        logger.info("%s cannot be synced, so that a loss of power may take %s if it is new: %s", above, path, error)


def format_directory(
    disk: Disk, path: str, node_id: int, cluster_id: str | None, directory_id: str | None
) -> dict[str, str]:
    properties = {
        "version": "1",
        "cluster.id": cluster_id or uuid_to_text(random_id(disk)),
        "node.id": str(node_id),
        "directory.id": directory_id or uuid_to_text(random_id(disk)),
    }
    replace_file(disk, path, META_PROPERTIES_FILE, encode_properties(properties))
    return properties


def check_properties(disk: Disk, path: str, data: bytes, node_id: int, cluster_id: str | None) -> dict[str, str]:
    where = f"{path}/{META_PROPERTIES_FILE}"
    try:
        properties = decode_properties(data)
    except CorruptCheckpoint as error:
        raise DamagedProperties(f"{where} is unreadable: {error}") from None
    missing = [key for key in ("version", "cluster.id", "node.id") if not properties.get(key)]
    if missing:
        raise DamagedProperties(f"{where} has no {missing[0]}")
    if properties["version"] != "1":
        raise ForeignDirectory(f"{where} is of version {properties['version']}, only 1 is known")
    if properties["node.id"] != str(node_id):
        raise ForeignDirectory(f"{path} belongs to node {properties['node.id']}, this is node {node_id}")
    if cluster_id is not None and properties["cluster.id"] != cluster_id:
        raise ForeignDirectory(f"{path} belongs to cluster {properties['cluster.id']}, this is cluster {cluster_id}")
    if "directory.id" not in properties:
        properties["directory.id"] = uuid_to_text(random_id(disk))
        replace_file(disk, path, META_PROPERTIES_FILE, encode_properties(properties))
    try:
        uuid_from_text(properties["directory.id"])
    except ValueError as error:
        raise DamagedProperties(f"{where}: {error}") from None
    return properties


def random_id(disk: Disk) -> bytes:
    """A random id as in Kafka: a version 4 UUID whose text does not begin with a dash."""
    while True:
        raw = bytearray(disk.random_bytes(16))
        raw[6] = raw[6] & 0x0F | 0x40
        raw[8] = raw[8] & 0x3F | 0x80
        if not uuid_to_text(bytes(raw)).startswith("-"):
            return bytes(raw)
