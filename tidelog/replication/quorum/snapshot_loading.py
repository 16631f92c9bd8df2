"""A snapshot that the leader has, piece by piece onto this node's disk, and the log moved behind it.

The core says which piece to keep; the last one is followed by a check of the whole. Invariant: the log is cut only when
the snapshot is on the device, whole.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from tidelog.protocol.errors import KafkaError
from tidelog.replication.quorum.raft import following
from tidelog.replication.quorum.raft.messages import KeepSnapshotPart
from tidelog.replication.quorum.raft.snapshot import CorruptSnapshot, SnapshotId
from tidelog.replication.quorum.raft.state import Follower
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.segments.damage import DamagedRecords

if TYPE_CHECKING:
    from tidelog.replication.quorum.driver import RaftNode

logger = logging.getLogger("tidelog.quorum")


def keep_part(node: RaftNode, part: KeepSnapshotPart) -> None:
    try:
        node.log.keep_part(part.snapshot, part.position, part.data)
    except OSError as error:
        logger.error("snapshot %s cannot be kept: %s", part.snapshot, error)
        following.on_snapshot_failed(node.raft, part.snapshot, node.now_ms())
        return
    if part.is_last:
        node.begin(_install(node, part.snapshot), "snapshot")


async def _install(node: RaftNode, identity: SnapshotId) -> None:
    try:
        snapshot = await node.run_in_executor(partial(node.log.finish_part, identity))
    except (OSError, CorruptSnapshot, KafkaError) as error:
        logger.error("snapshot %s was fetched in vain: %s", identity, error)
        following.on_snapshot_failed(node.raft, identity, node.now_ms())
        node.drive()
        return
    state = node.raft.state
    if isinstance(state, Follower) and state.download is not None and state.download.snapshot == identity:
        try:
            try:
                node.log.install(identity, snapshot, node.clock_ms())
            except DamagedRecords:  # the log behind the snapshot is: it is cut, and fetched again
                node.meet_damage()
                node.log.install(identity, snapshot, node.clock_ms())
        except (OSError, CorruptLog) as error:
            node.fail(error)
            return
        following.on_snapshot_installed(node.raft, identity, node.now_ms())
        node.tell_snapshot(identity, snapshot)
    node.drive()
