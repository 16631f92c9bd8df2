"""Lets a voter whose vote file is damaged or gone vote again, after all other voters have named their epochs.

Nothing else says for whom it voted. But a vote goes to a candidate that has its epoch on the device, and each candidate
is a voter: so this voter has given no vote in a later epoch than all epochs of the others. Until each of them has
answered, it votes for none, and does not run. Afterwards it gives no vote in the highest of these epochs.
Its own log may be behind, and name too few voters. So those count, too, that the others' logs name last, until its
own log is as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Final, Protocol

from tidelog.protocol.batches.record_batch import BatchHeader, iter_headers
from tidelog.protocol.batches.records import ControlRecordType, control_record_type, decode_batch
from tidelog.protocol.errors import KafkaError, MalformedMessage
from tidelog.protocol.messages.control_records import VotersRecord
from tidelog.replication.ports import Endpoint, Exchange
from tidelog.replication.quorum.background_task import BackgroundTask
from tidelog.replication.quorum.raft.messages import Bytes
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.raft.voters import VoterSet, voters_from_record
from tidelog.replication.quorum.voter_fetch import fetch_from_voter

logger = logging.getLogger("tidelog.quorum")

PAUSE_S: Final = 0.5


class RecoveringNode(Protocol):
    """The interface of `driver.RaftNode` for the recovery."""

    raft: Raft
    settings: QuorumSettings
    exchange: Exchange

    def drive(self) -> None: ...
    def now_ms(self) -> float: ...


class VoteRecovery(BackgroundTask):
    def __init__(self, node: RecoveringNode, cluster_id: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop, "vote recovery")
        self._node = node
        self._cluster_id = cluster_id
        self._epochs: dict[int, int] = {}
        """Voter id -> its epoch, learned since the start."""
        self._named: dict[int, Endpoint | None] = {}
        """The last voters that others' logs name behind this one's end, and below `_named_below`."""
        self._named_below = 0

    def begin(self) -> None:
        if self._node.raft.vote_is_unknown:
            self._begin()

    def _silent(self) -> list[tuple[int, Endpoint | None]]:
        """The other voters that have not answered yet."""
        raft = self._node.raft
        known = dict(self._named) if raft.log.end_offset < self._named_below else {}
        for voter_id in raft.voters.latest.ids:
            peer = raft.peer(voter_id)
            known[voter_id] = None if peer is None else peer.endpoint
        return [each for each in known.items() if each[0] != raft.own.id and each[0] not in self._epochs]

    async def _run(self) -> None:
        raft = self._node.raft
        while True:
            for voter_id, endpoint in self._silent():
                epoch = -1 if endpoint is None else await self._epoch_of(endpoint)
                if epoch >= 0:
                    self._epochs[voter_id] = epoch
            if len(raft.voters.latest) and not self._silent():
                break
            await asyncio.sleep(PAUSE_S)  # a log without records may not name the voters yet
        raft.recover_vote(max(self._epochs.values(), default=0), self._node.now_ms())
        logger.warning("this voter votes again after epoch %d: all other voters have named their epochs", raft.epoch)
        self._node.drive()

    async def _epoch_of(self, endpoint: Endpoint) -> int:
        """The other voter's epoch, -1 if it does not answer or does not know its own. Notes the voters that its log
        names behind this one's end.
        """
        node, offset = self._node, self._node.raft.log.end_offset
        named: dict[int, Endpoint | None] = {}
        while True:
            answer = await fetch_from_voter(
                node, self._cluster_id, endpoint, node.settings.fetch_bytes_max, "the recovery of this voter's vote",
                offset,
            )  # fmt: skip
            if answer is None:
                return -1
            if not len(answer.records):
                break
            start = offset
            try:
                for header, voters in _voters_in(answer.records):
                    offset = header.next_offset
                    if voters is not None:
                        named = {voter.key.id: voter.endpoint for voter in voters}
            except (KafkaError, MalformedMessage, ValueError) as error:
                logger.info("%s: its records do not help with the recovery of this voter's vote: %s", endpoint, error)
                return -1
            if offset <= start:
                return -1
        self._named |= named
        self._named_below = max(self._named_below, offset)
        return answer.epoch


def _voters_in(records: Bytes) -> Iterator[tuple[BatchHeader, VoterSet | None]]:
    """Each batch, with the voters that it names. Raises KafkaError, MalformedMessage or ValueError for damage."""
    for position, header in iter_headers(records):
        voters = None
        for record in decode_batch(records, position, header) if header.is_control else ():
            if control_record_type(record.key) is ControlRecordType.KRAFT_VOTERS:
                voters = voters_from_record(VotersRecord.decode(record.value or b"", 0))
        yield header, voters
