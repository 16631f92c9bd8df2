"""Election rules: which candidate may get a vote, the tally, and the wait before the next attempt. Pure.

The rules are Raft's with pre-vote (KIP-996). Invariant: a replica gives one vote in an epoch, to a candidate whose log
is at least as up to date as its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterSet

if TYPE_CHECKING:
    from random import Random

    from tidelog.replication.quorum.raft.settings import QuorumSettings


class Tally:
    """The votes of one attempt. Only the answers of voters count."""

    __slots__ = ("granted", "refused", "voters")

    def __init__(self, voters: VoterSet, own: ReplicaKey) -> None:
        self.voters = voters
        self.granted: dict[int, None] = {own.id: None} if voters.includes(own) else {}
        self.refused: dict[int, None] = {}

    def record(self, voter_id: int, granted: bool) -> None:
        if self.voters.get(voter_id) is None:
            return
        if granted:
            self.refused.pop(voter_id, None)
            self.granted[voter_id] = None
        elif voter_id not in self.granted:
            self.refused[voter_id] = None

    @property
    def is_won(self) -> bool:
        return len(self.granted) >= self.voters.majority

    @property
    def is_lost(self) -> bool:
        return len(self.voters) - len(self.refused) < self.voters.majority

    def open(self) -> Iterable[int]:
        """The voters without an answer yet."""
        return [voter.key.id for voter in self.voters if voter.key.id not in (self.granted | self.refused)]

    def granting(self) -> tuple[ReplicaKey, ...]:
        return tuple(voter.key for voter in self.voters if voter.key.id in self.granted)


def is_up_to_date(last_epoch: int, end_offset: int, own_last_epoch: int, own_end_offset: int) -> bool:
    """Whether a candidate's log is at least as up to date as this replica's."""
    return (last_epoch, end_offset) >= (own_last_epoch, own_end_offset)


def may_vote(candidate: ReplicaKey, voted: ReplicaKey | None, leader_id: int, up_to_date: bool) -> bool:
    """Whether a replica may give its vote (no pre-vote) in the present epoch. It neither leads nor is a candidate."""
    if voted is not None:
        return voted.matches(candidate)
    return leader_id < 0 and up_to_date


def election_timeout_ms(settings: QuorumSettings, rng: Random) -> float:
    return settings.election_timeout_ms * (1 + rng.random())


def retry_delay_ms(settings: QuorumSettings, retries: int, rng: Random) -> float:
    """The wait after a lost attempt: random, with a doubling bound, so that two candidates do not collide for ever."""
    longest_ms = min(settings.election_backoff_max_ms, settings.gone_delay_max_ms << min(retries + 1, 16))
    return rng.random() * longest_ms


def successor_delay_ms(settings: QuorumSettings, position: int, rng: Random) -> float:
    """The wait after a leader has resigned: none for its first preferred successor, longer for each later one."""
    if position <= 0:
        return 0.0
    return min(settings.election_backoff_max_ms, position * settings.gone_delay_max_ms * (1 + rng.random()))
