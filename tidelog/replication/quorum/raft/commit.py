"""A leader's progress of the replicas: their synced offsets, the high watermark, and their last contacts.

Pure. Invariants: the high watermark never decreases. It advances only to an offset that a majority of the present
voters has synced, and only past a record of the leader's own epoch (Raft, section 5.4.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterSet

# An observer without a fetch for this time is no longer listed (LeaderState.OBSERVER_SESSION_TIMEOUT_MS).
OBSERVER_SESSION_MS: Final = 300_000
OBSERVERS_MAX: Final = 10_000
FORGETTING_INTERVAL_MS: Final = 1_000
CAUGHT_UP_MS: Final = 3_600_000  # a new voter must have caught up within the last hour, as in Kafka's LeaderState


@dataclass(eq=False, repr=False)
class ReplicaProgress:
    """-1: unknown. `end_offset`: the last fetch offset; the log has all records below, and a voter has synced them."""

    key: ReplicaKey
    end_offset: int = -1
    last_fetch_ms: float = -1.0
    last_caught_up_ms: float = -1.0
    leader_end_at_fetch: int = -1
    receives_until_ms: float = -1.0
    """For so long the answer to its last fetch may go on arriving over a slow link."""

    def fetched(self, end_offset: int, leader_end_offset: int, now_ms: float) -> None:
        """Record a fetch. The replica is caught up if it has the whole log, or the log as of its previous fetch."""
        if end_offset >= leader_end_offset:
            self.last_caught_up_ms = max(self.last_caught_up_ms, now_ms)
        elif self.leader_end_at_fetch >= 0 and end_offset >= self.leader_end_at_fetch and self.last_fetch_ms >= 0:
            self.last_caught_up_ms = max(self.last_caught_up_ms, self.last_fetch_ms)
        self.last_fetch_ms = max(self.last_fetch_ms, now_ms)
        self.leader_end_at_fetch = leader_end_offset
        self.end_offset = end_offset


class Progress:
    """All replicas that fetch from this leader, and the leader itself if it is a voter."""

    def __init__(self, own: ReplicaKey, voters: VoterSet, epoch_start_offset: int, now_ms: float) -> None:
        self._own = own
        self._epoch_start_offset = epoch_start_offset
        self._since_ms = now_ms
        self._voters: dict[int, ReplicaProgress] = {}
        self._observers: dict[ReplicaKey, ReplicaProgress] = {}
        self._forgetting_due_ms = now_ms
        self.high_watermark = -1
        self.set_voters(voters, now_ms)

    def set_voters(self, voters: VoterSet, now_ms: float) -> None:
        """Adopt a changed set of voters, and keep the progress of known replicas.

        A new voter gets the whole timeout for its first contact.
        """
        before, self._voters = self._voters, {}
        for voter in voters:
            known = before.pop(voter.key.id, None)
            if known is None or not known.key.matches(voter.key):
                known = self._observers.pop(voter.key, None) or ReplicaProgress(voter.key)
            else:
                known.key = voter.key
            self._voters[voter.key.id] = known
        for left in before.values():
            if left.key.id != self._own.id:
                self._observers[left.key] = left
        self._since_ms = now_ms

    def find(self, key: ReplicaKey) -> ReplicaProgress | None:
        voter = self._voters.get(key.id)
        if voter is not None and voter.key.matches(key):
            return voter
        return self._observers.get(key)

    @property
    def voters(self) -> Iterator[ReplicaProgress]:
        return iter(self._voters.values())

    @property
    def observers(self) -> Iterator[ReplicaProgress]:
        return iter(self._observers.values())

    def on_own_log(self, synced_offset: int) -> bool:
        """Returns whether the high watermark has advanced."""
        own = self._voters.get(self._own.id)
        if own is None or not own.key.matches(self._own):
            return False
        own.end_offset = synced_offset
        return self.advance()

    def on_fetch(self, key: ReplicaKey, end_offset: int, leader_end_offset: int, now_ms: float) -> bool:
        """Returns whether the high watermark has advanced."""
        replica = self.find(key)
        if replica is None:
            self._forget_silent(now_ms)
            if key.id < 0 or len(self._observers) >= OBSERVERS_MAX:
                return False
            replica = self._observers[key] = ReplicaProgress(key)
        replica.fetched(end_offset, leader_end_offset, now_ms)
        return key.id in self._voters and self.advance()

    def on_contact(self, key: ReplicaKey, now_ms: float) -> None:
        """The replica has fetched a part of a snapshot, so it is alive."""
        replica = self.find(key)
        if replica is not None:
            replica.last_fetch_ms = max(replica.last_fetch_ms, now_ms)

    def advance(self) -> bool:
        """Advance the high watermark to the offset that a majority has. Returns whether it has advanced."""
        if not self._voters:
            return False
        ends = sorted((replica.end_offset for replica in self._voters.values()), reverse=True)
        candidate = ends[len(ends) // 2]
        if candidate <= self._epoch_start_offset or candidate <= self.high_watermark:
            return False
        self.high_watermark = candidate
        return True

    def quorum_lost_at_ms(self, timeout_ms: float) -> float | None:
        """The time at which the leader has had no contact with a majority (itself included) for `timeout_ms`; None if
        it is a majority by itself.
        """
        others = [replica for replica in self._voters.values() if replica.key.id != self._own.id]
        needed = len(self._voters) // 2 + 1 - (len(self._voters) - len(others))
        if needed <= 0:
            return None
        heard = sorted((max(replica.last_fetch_ms, self._since_ms) for replica in others), reverse=True)
        return heard[needed - 1] + timeout_ms

    def successors(self) -> tuple[ReplicaKey, ...]:
        """The other voters, the one with the longest log first."""
        others = [replica for replica in self._voters.values() if replica.key.id != self._own.id]
        return tuple(replica.key for replica in sorted(others, key=lambda one: (-one.end_offset, one.key.id)))

    def is_caught_up(self, key: ReplicaKey, now_ms: float) -> bool:
        """Whether an observer may become a voter: it has been caught up and has fetched within the last hour."""
        replica = self._observers.get(key)
        return (
            replica is not None
            and replica.last_caught_up_ms >= 0
            and replica.last_fetch_ms >= max(0.0, now_ms - CAUGHT_UP_MS)
        )

    def _forget_silent(self, now_ms: float) -> None:
        """Not at each fetch of an unknown replica: there may be thousands of both."""
        if now_ms < self._forgetting_due_ms:
            return
        self._forgetting_due_ms = now_ms + FORGETTING_INTERVAL_MS
        for key in [key for key, one in self._observers.items() if one.last_fetch_ms < now_ms - OBSERVER_SESSION_MS]:
            del self._observers[key]
