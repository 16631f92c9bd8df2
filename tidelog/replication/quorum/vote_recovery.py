"""Lets a voter whose vote file is damaged or gone vote again, after all other voters have named their epochs.

Nothing else says for whom it voted. `raft/lost_vote.py` says who has to answer, and why that is enough. Until then it
votes for none, and does not run. Afterwards it gives no vote in the highest of these epochs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from tidelog.replication.ports import Exchange
from tidelog.replication.quorum.background_task import BackgroundTask
from tidelog.replication.quorum.raft.lost_vote import LostVote
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
        self._lost = LostVote(node.raft)

    def begin(self) -> None:
        if self._node.raft.vote_is_unknown:
            self._begin()

    async def _run(self) -> None:
        """Ask also those that have answered: their logs may have grown, or been truncated."""
        raft, lost = self._node.raft, self._lost
        purpose = "the recovery of this voter's vote"
        while True:
            for voter_id, endpoint in lost.others().items():
                if endpoint is not None:
                    answer = await fetch_from_voter(self._node, self._cluster_id, endpoint, 0, purpose)
                    if answer is not None:
                        lost.on_answer(voter_id, answer)
            if lost.is_found:
                break
            await asyncio.sleep(PAUSE_S)
        raft.recover_vote(lost.epoch, self._node.now_ms())
        logger.warning("this voter votes again after epoch %d: all other voters have named their epochs", raft.epoch)
        self._node.drive()
