"""What a leader knows of its followers: who is in sync, how far the high watermark may go, which ISR to propose.

Pure; times are monotonic milliseconds and given in. The rules are those of Kafka's Partition and Replica classes with
KIP-497 (the *maximal* ISR while a change is on its way), KIP-903 (broker epochs) and KIP-966 (below
min.insync.replicas the mark stands still). Invariants: a follower counts as in sync from the moment its return is
proposed until the controller has agreed to its removal; at most one proposal is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

UNKNOWN_OFFSET = -1
LONG_AGO_MS = -(2.0**62)

Eligible = Callable[[int, int], bool]
"""(broker id, the broker epoch its fetches state): may this replica join the ISR (KIP-841, KIP-903)?"""


class FollowerReplica:
    """The state of a remote replica, from its fetches."""

    __slots__ = (
        "broker_epoch", "broker_id", "in_maximal_isr", "last_caught_up_ms", "last_fetch_leader_end", "last_fetch_ms",
        "log_end_offset", "log_start_offset",
    )  # fmt: skip

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id
        self.broker_epoch = -1
        self.log_end_offset = UNKNOWN_OFFSET
        self.log_start_offset = UNKNOWN_OFFSET
        self.last_fetch_leader_end = UNKNOWN_OFFSET
        self.last_fetch_ms = LONG_AGO_MS
        self.last_caught_up_ms = LONG_AGO_MS
        self.in_maximal_isr = False

    def __repr__(self) -> str:
        return f"<FollowerReplica {self.broker_id} at {self.log_end_offset}{' in sync' if self.in_maximal_isr else ''}>"

    def reset(self, now_ms: float, *, in_sync: bool) -> None:
        """Another leader epoch has begun: who is in the ISR is given the whole lag time again, the others none.

        What its log held is forgotten even where the leader is the same: an epoch in between, which this node never
        heard of, may have had another leader, and the follower cut its log for it. (Kafka keeps what it knew.)
        """
        self.last_caught_up_ms = now_ms if in_sync else LONG_AGO_MS
        self.broker_epoch = -1
        self.log_end_offset = self.log_start_offset = self.last_fetch_leader_end = UNKNOWN_OFFSET
        self.last_fetch_ms = LONG_AGO_MS

    def fetched(self, offset: int, leader_end: int, now_ms: float) -> bool:
        """Take in one fetch; whether the follower's log end has moved.

        Caught up is who has reached the leader's end of now, or reaches the one of its previous fetch: then it was
        caught up at that time. So a follower that is always a batch behind a busy leader stays in sync.
        """
        if offset >= leader_end:
            self.last_caught_up_ms = now_ms
        elif offset >= self.last_fetch_leader_end and self.last_fetch_ms > self.last_caught_up_ms:
            self.last_caught_up_ms = self.last_fetch_ms
        if leader_end > self.last_fetch_leader_end:
            self.last_fetch_leader_end = leader_end
        self.last_fetch_ms = now_ms
        if offset == self.log_end_offset:
            return False
        self.log_end_offset = offset
        return True


class Proposal:
    """A change of the ISR that the controller was asked for. `isr`: (broker id, broker epoch or -1).

    `resigns`: the leader itself leaves the ISR, so that another replica leads.
    """

    __slots__ = ("adds", "isr", "leader_epoch", "partition_epoch", "removes", "resigns")

    def __init__(
        self,
        isr: list[tuple[int, int]],
        leader_epoch: int,
        partition_epoch: int,
        *,
        adds: int | None = None,
        removes: tuple[int, ...] = (),
        resigns: bool = False,
    ) -> None:
        self.isr = isr
        self.leader_epoch = leader_epoch
        self.partition_epoch = partition_epoch
        self.adds = adds
        self.removes = removes
        self.resigns = resigns

    def __repr__(self) -> str:
        members = [broker_id for broker_id, _ in self.isr]
        return f"<Proposal {members} leader epoch {self.leader_epoch} partition epoch {self.partition_epoch}>"


class InSyncReplicas:
    """The leader's book of one partition. `isr` is what the controller has committed."""

    __slots__ = (
        "_lag_ms_max", "_node_id", "epoch_start_offset", "followers", "isr", "leader_epoch", "partition_epoch",
        "pending", "replicas",
    )  # fmt: skip

    def __init__(self, node_id: int, lag_ms_max: float) -> None:
        self._node_id = node_id
        self._lag_ms_max = lag_ms_max
        self.replicas: tuple[int, ...] = ()
        self.followers: dict[int, FollowerReplica] = {}
        self.isr: tuple[int, ...] = ()
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.epoch_start_offset = 0
        self.pending: Proposal | None = None

    # ---------------------------------------------------------------------------------------------- what is committed

    def assign(
        self,
        replicas: Iterable[int],
        isr: Iterable[int],
        leader_epoch: int,
        partition_epoch: int,
        log_end_offset: int,
        now_ms: float,
    ) -> None:
        """Take over what the metadata log says; an open proposal is forgotten, whatever became of it."""
        self.replicas = tuple(replicas)
        known = self.followers
        others = [each for each in self.replicas if each != self._node_id]
        self.followers = {each: known.get(each) or FollowerReplica(each) for each in others}
        self.isr = tuple(isr)
        self.partition_epoch = partition_epoch
        if leader_epoch > self.leader_epoch:
            self.leader_epoch = leader_epoch
            self.epoch_start_offset = log_end_offset
            for follower in self.followers.values():
                follower.reset(now_ms, in_sync=follower.broker_id in self.isr)
        self.pending = None
        self._note_maximal()

    def _note_maximal(self) -> None:
        joining = self.pending.adds if self.pending is not None else None
        for follower in self.followers.values():
            follower.in_maximal_isr = follower.broker_id in self.isr or follower.broker_id == joining

    def min_isr(self, min_insync_replicas: int) -> int:
        """More than there are replicas cannot be asked for (Kafka's effectiveMinIsr)."""
        return min(min_insync_replicas, len(self.followers) + 1)

    # ------------------------------------------------------------------------------------------------ high watermark

    def high_watermark(self, committable: int, now_ms: Callable[[], float], eligible: Eligible) -> int:
        """How far the mark may go: `committable`, or where the slowest in-sync replica ends.

        One that is about to join is waited for too, or it would never reach a mark that keeps moving.
        """
        mark = committable
        for follower in self.followers.values():
            if follower.log_end_offset < mark and (
                follower.in_maximal_isr
                or (
                    now_ms() - follower.last_caught_up_ms <= self._lag_ms_max
                    and eligible(follower.broker_id, follower.broker_epoch)
                )
            ):
                mark = follower.log_end_offset
        return mark

    # ----------------------------------------------------------------------------------------------------- proposals

    def expansion(
        self, follower: FollowerReplica, high_watermark: int, own_epoch: int, eligible: Eligible
    ) -> Proposal | None:
        """Propose to take the follower in: it has reached the mark and the start of this leader's epoch.

        Below the latter it may lack committed records whose commitment the leader has not noticed yet.
        """
        end = follower.log_end_offset
        if (
            self.pending is not None
            or follower.broker_id in self.isr
            or end < high_watermark
            or end < self.epoch_start_offset
            or not eligible(follower.broker_id, follower.broker_epoch)
        ):
            return None
        members = [*self.isr, follower.broker_id]
        ordered = [each for each in self.replicas if each in members]
        return self._propose(ordered, own_epoch, adds=follower.broker_id)

    def shrinkage(self, leader_end: int, now_ms: float, own_epoch: int) -> Proposal | None:
        """Propose to leave out those that have not been caught up for too long."""
        if self.pending is not None:
            return None
        slow = tuple(each for each in self.isr if each != self._node_id and self._lags(each, leader_end, now_ms))
        if not slow:
            return None
        return self._propose([each for each in self.isr if each not in slow], own_epoch, removes=slow)

    def resignation(self, own_epoch: int) -> Proposal | None:
        """Propose to leave the ISR as its leader: the others go on, or an eligible replica if there are none."""
        if self.pending is not None or self._node_id not in self.isr:
            return None
        others = [each for each in self.isr if each != self._node_id]
        return self._propose(others, own_epoch, removes=(self._node_id,), resigns=True)

    def _lags(self, broker_id: int, leader_end: int, now_ms: float) -> bool:
        follower = self.followers.get(broker_id)
        if follower is None:
            return True
        return follower.log_end_offset < leader_end and now_ms - follower.last_caught_up_ms > self._lag_ms_max

    def _propose(
        self,
        members: list[int],
        own_epoch: int,
        *,
        adds: int | None = None,
        removes: tuple[int, ...] = (),
        resigns: bool = False,
    ) -> Proposal:
        isr = []
        for each in members:
            follower = self.followers.get(each)
            epoch = own_epoch if each == self._node_id else -1 if follower is None else follower.broker_epoch
            isr.append((each, epoch))
        self.pending = Proposal(
            isr, self.leader_epoch, self.partition_epoch, adds=adds, removes=removes, resigns=resigns
        )
        self._note_maximal()
        return self.pending

    def agreed(self, proposal: Proposal, isr: Iterable[int], leader_epoch: int, partition_epoch: int) -> bool:
        """The controller has answered with a state; False where that is of the past."""
        if proposal is not self.pending or leader_epoch != self.leader_epoch or partition_epoch < self.partition_epoch:
            return False
        self.isr = tuple(isr)
        self.partition_epoch = partition_epoch
        self.pending = None
        self._note_maximal()
        return True

    def rejected(self, proposal: Proposal) -> None:
        """The controller says that it has not done it and never will: back to what is committed."""
        if proposal is self.pending:
            self.pending = None
            self._note_maximal()
