"""Begins a quorum whose voters may change: the first checkpoint, which names them (kraft.version 1, KIP-853).

What Kafka's `format --standalone` and `--initial-controllers` leave behind. Every initial voter begins with the same
checkpoint; a node that is to be added later begins with none.
"""

from __future__ import annotations

from tidelog.replication.quorum.snapshot import SnapshotId, encode_snapshot, snapshot_name
from tidelog.replication.quorum.voters import KRAFT_VERSION_MAX, VoterSet, voters_record
from tidelog.storage.disk import Disk


def format_dynamic_quorum(disk: Disk, root: str, voters: VoterSet, now_ms: int) -> None:
    """`root`: the log directory that is to hold `__cluster_metadata-0`. A log that is there must be empty."""
    assert len(voters), "a quorum without voters"
    assert all(any(voter.key.directory_id) and voter.endpoints for voter in voters), "a voter is told by all of it"
    directory = f"{root}/__cluster_metadata-0"
    disk.make_directory(directory)
    identity = SnapshotId(0, 0)
    path = f"{directory}/{snapshot_name(identity)}"
    content = encode_snapshot([], identity, now_ms, now_ms, KRAFT_VERSION_MAX, voters_record(voters))
    disk.write_file(f"{path}.part", content, sync=True)
    disk.rename(f"{path}.part", path)
    disk.sync_directory(directory)
