"""Writes the first voters of a quorum with dynamic voters to a directory, before the first start (KIP-853).

Like Kafka's `format --standalone` and `--initial-controllers`, it writes an empty snapshot at offset 0 with
kraft.version 1 and the voters. Without it the voters are those of the configuration for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidelog.replication.quorum.files import vote_store
from tidelog.replication.quorum.raft.snapshot import SUFFIX, SnapshotId, encode_snapshot, snapshot_name
from tidelog.replication.quorum.raft.voters import VoterSet, voters_record
from tidelog.storage.files.checkpoints import replace_file

if TYPE_CHECKING:
    from tidelog.storage.files.disk import Disk

KRAFT_VERSION: Final = 1

_BEFORE_ALL: Final = SnapshotId(0, 0)
_LOG_SUFFIX: Final = ".log"


def write_initial_voters(disk: Disk, root: str, voters: VoterSet, now_ms: int) -> bool:
    """`root`: the log directory of the metadata. Returns False and writes nothing if a quorum has already begun."""
    directory = f"{root}/__cluster_metadata-0"
    if disk.exists(directory):
        if _has_begun(disk, directory):
            return False
    else:
        disk.make_directory(directory)
    content = encode_snapshot([], _BEFORE_ALL, now_ms, now_ms, KRAFT_VERSION, voters_record(voters))
    replace_file(disk, directory, snapshot_name(_BEFORE_ALL), bytes(content))
    disk.sync_directory(root)
    return True


def _has_begun(disk: Disk, directory: str) -> bool:
    """Whether there is a vote, a snapshot or a record. A node that has only waited for a quorum has an empty log."""
    for entry in disk.list_directory(directory):
        if entry.name == vote_store.FILE_NAME or entry.name.endswith(SUFFIX):
            return True
        if entry.name.endswith(_LOG_SUFFIX) and disk.size_of(f"{directory}/{entry.name}"):
            return True
    return False
