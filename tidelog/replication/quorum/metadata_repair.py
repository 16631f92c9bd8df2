"""Repairs a voter's damaged metadata records from other voters while none of them can lead.

A voter cuts its log at the damage and keeps a copy of what it cut. Usually it then fetches the lost records from the
leader. If every voter has damage, in different places, there is no leader: each would wait for the others for ever. So
a voter without a leader asks the other voters for the records that follow its log's end, and then goes on with its own
copy. Invariant: the records of another voter are taken only up to a batch that is byte for byte in this voter's copy
too. Logs that have the same batch at an offset have the same batches before it (Raft's log matching), so the log
becomes what it was before the damage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.errors import KafkaError
from tidelog.replication.ports import Endpoint, Exchange
from tidelog.replication.quorum.background_task import BackgroundTask
from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.replication.quorum.raft.messages import Bytes
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.voter_fetch import fetch_from_voter
from tidelog.storage.log.partition_log import CorruptLog

logger = logging.getLogger("tidelog.quorum")

LOOK_S: Final = 1.0


class RepairedNode(Protocol):
    """The interface of `driver.RaftNode` for the repair."""

    raft: Raft
    log: MetadataLog
    settings: QuorumSettings
    exchange: Exchange
    clock_ms: Callable[[], int]
    is_closed: bool

    def drive(self) -> None: ...
    def sync(self) -> None: ...
    def tolerates(self, error: Exception) -> bool: ...


class MetadataRepair(BackgroundTask):
    def __init__(self, node: RepairedNode, cluster_id: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, "metadata repair")
        self._node = node
        self._cluster_id = cluster_id

    def begin(self) -> None:
        if self._node.raft.can_vote:
            self._begin()

    @property
    def _is_needed(self) -> bool:
        """Whether this voter lacks records, and no leader is known from which it could fetch them."""
        raft = self._node.raft
        return raft.lacks_records and raft.acknowledged is not None and raft.leader_id < 0 and not self._node.is_closed

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._is_needed:
                continue
            try:
                if self._finish():
                    continue
            except OSError as error:
                self._node.tolerates(error)
                continue
            own = self._node.raft.own.id
            for voter in self._node.raft.voters.latest:
                if voter.key.id != own and voter.endpoint is not None and self._is_needed:
                    await self._copy_from(voter.key.id, voter.endpoint)

    async def _copy_from(self, voter_id: int, endpoint: Endpoint) -> None:
        """One answer may end before the first batch that both have, as where a whole end of a segment is lost. Behind
        what this voter had acknowledged there is none.
        """
        node = self._node
        start = node.log.end_offset
        purpose, bytes_max = f"the records from offset {start} on", node.settings.fetch_bytes_max
        records, offset = bytearray(), start
        while offset < self._lost_end:
            answer = await fetch_from_voter(node, self._cluster_id, endpoint, bytes_max, purpose, offset=offset)
            if answer is None or answer.error or not self._is_needed or node.log.end_offset != start:
                return
            records += answer.records
            end = self._restore(records, voter_id)
            if end > start:
                logger.warning(
                    "%s: offsets %d to %d are repaired with the records of voter %d", node.log.directory, start, end,
                    voter_id,
                )  # fmt: skip
                node.sync()
            if end != start or (following := _end_of(answer.records)) <= offset:
                return
            offset = following

    @property
    def _lost_end(self) -> int:
        acknowledged = self._node.raft.acknowledged
        return -1 if acknowledged is None else acknowledged.end_offset

    def _restore(self, records: bytearray, voter_id: int) -> int:
        """The log end after the repair with these records; -1 if it failed."""
        node = self._node
        try:
            return node.log.restore(records, node.clock_ms())
        except (OSError, CorruptLog, KafkaError) as error:
            if isinstance(error, KafkaError) or node.tolerates(error):
                logger.warning("%s: records of voter %d were not taken: %s", node.log.directory, voter_id, error)
            return -1

    def _finish(self) -> bool:
        """Whether the log has all that this voter had acknowledged, on the device. Then it may vote and lead again."""
        node = self._node
        if not node.log.is_restored:
            return False
        node.log.recovered("what was lost to damage has been copied from other voters")
        node.raft.regain_records()
        node.drive()
        return True


def _end_of(records: Bytes) -> int:
    """The offset behind the last batch; -1 if there is none, or bytes that are no batch."""
    try:
        return max((header.next_offset for _, header in iter_headers(records)), default=-1)
    except KafkaError:
        return -1
