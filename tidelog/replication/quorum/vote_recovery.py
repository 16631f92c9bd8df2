"""Lets a voter whose vote file is damaged or gone vote again, after all other voters have named their epochs.

Nothing else says for whom it voted. But a vote goes to a candidate that has its epoch on the device, and each candidate
is a voter: so this voter has given no vote in a later epoch than all epochs of the others. Until each of them has
answered, it votes for none, and does not run. Afterwards it gives no vote in the highest of these epochs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from tidelog.replication.ports import Endpoint, Exchange
from tidelog.replication.quorum.background_task import BackgroundTask
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.settings import QuorumSettings
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

    def begin(self) -> None:
        if self._node.raft.vote_is_unknown:
            self._begin()

    def _silent(self) -> list[tuple[int, Endpoint | None]]:
        """The other voters that have not answered yet."""
        raft = self._node.raft
        peers = [(voter_id, raft.peer(voter_id)) for voter_id in raft.voters.latest.ids if voter_id != raft.own.id]
        return [(voter_id, peer and peer.endpoint) for voter_id, peer in peers if voter_id not in self._epochs]

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
        """The other voter's epoch, -1 if it does not answer or does not know its own."""
        answer = await fetch_from_voter(self._node, self._cluster_id, endpoint, 1, "the recovery of this voter's vote")
        return -1 if answer is None else answer.epoch
