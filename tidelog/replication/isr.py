"""A leader's state of its followers: the in-sync replicas, the bound of the high watermark, and ISR proposals.

Pure; the caller passes in monotonic times in milliseconds. The rules are those of Kafka's Partition and Replica classes
with KIP-497 (the *maximal* ISR while a change is open), KIP-903 (broker epochs) and KIP-966 (the high watermark does
not advance below min.insync.replicas). Invariants: a follower counts as in sync from the proposal of its return until
the metadata says that the controller has removed it; at most one proposal is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

UNKNOWN_OFFSET = -1
LONG_AGO_MS = -(2.0**62)

Eligible = Callable[[int, int], bool]
"""(broker id, the broker epoch of its fetches) -> whether the replica may join the ISR (KIP-841, KIP-903)."""


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
        """A new leader epoch begins: an ISR member gets the whole lag time again, another replica gets none.

        The follower's offsets become unknown even if the leader is the same. An epoch in between, unknown to this node,
        may have had another leader, for which the follower truncated its log. (Kafka keeps the offsets.)
        """
        self.last_caught_up_ms = now_ms if in_sync else LONG_AGO_MS
        self.broker_epoch = -1
        self.log_end_offset = self.log_start_offset = self.last_fetch_leader_end = UNKNOWN_OFFSET
        self.last_fetch_ms = LONG_AGO_MS

    def fetched(self, offset: int, leader_end: int, now_ms: float) -> bool:
        """Record one fetch. Returns whether the follower's log end has moved.

        A follower that has reached the leader's log end is caught up now. A follower that has reached the leader's log
        end of its previous fetch was caught up at that time. So a follower that is always one batch behind a busy
        leader stays in sync.
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
    """A requested change of the ISR. `isr`: (broker id, broker epoch or -1).

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
    """The leader's state of one partition's followers. `isr` is the ISR that the controller has committed."""

    __slots__ = (
        "_lag_ms_max", "_node_id", "elr", "epoch_start_offset", "followers", "isr", "leader_epoch", "partition_epoch",
        "pending", "replicas",
    )  # fmt: skip

    def __init__(self, node_id: int, lag_ms_max: float) -> None:
        self._node_id = node_id
        self._lag_ms_max = lag_ms_max
        self.replicas: tuple[int, ...] = ()
        self.followers: dict[int, FollowerReplica] = {}
        self.isr: tuple[int, ...] = ()
        self.elr: tuple[int, ...] = ()
        self.leader_epoch = -1
        self.partition_epoch = -1
        self.epoch_start_offset = 0
        self.pending: Proposal | None = None

    # ------------------------------------------------------------------------------------------------ committed state

    def assign(
        self,
        replicas: Iterable[int],
        isr: Iterable[int],
        leader_epoch: int,
        partition_epoch: int,
        log_end_offset: int,
        now_ms: float,
        elr: Iterable[int] = (),
    ) -> None:
        """Adopt the state of the metadata log. It includes the outcome of an open proposal, which is dropped."""
        self.replicas = tuple(replicas)
        known = self.followers
        others = [each for each in self.replicas if each != self._node_id]
        self.followers = {each: known.get(each) or FollowerReplica(each) for each in others}
        self.isr, self.elr = tuple(isr), tuple(elr)
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

    def may_be_elected(self, follower: FollowerReplica) -> bool:
        """Whether the controller may elect this replica, without an unclean election."""
        return follower.in_maximal_isr or follower.broker_id in self.elr

    def min_isr(self, min_insync_replicas: int) -> int:
        """The minimum, at most the number of replicas (Kafka's effectiveMinIsr)."""
        return min(min_insync_replicas, len(self.followers) + 1)

    # ------------------------------------------------------------------------------------------------ high watermark

    def high_watermark(self, committable: int, now_ms: Callable[[], float], eligible: Eligible) -> int:
        """The bound of the high watermark: `committable`, or the log end of the slowest in-sync replica if lower.

        A caught-up replica that may join the ISR counts too. Otherwise it would never reach a high watermark that keeps
        moving.
        """
        high_watermark = committable
        for follower in self.followers.values():
            if follower.log_end_offset < high_watermark and (
                follower.in_maximal_isr
                or (
                    now_ms() - follower.last_caught_up_ms <= self._lag_ms_max
                    and eligible(follower.broker_id, follower.broker_epoch)
                )
            ):
                high_watermark = follower.log_end_offset
        return high_watermark

    # ----------------------------------------------------------------------------------------------------- proposals

    def expansion(
        self, follower: FollowerReplica, high_watermark: int, own_epoch: int, eligible: Eligible
    ) -> Proposal | None:
        """Propose to add a follower that has reached the high watermark and the start of this leader's epoch.

        Below the epoch's start the follower may lack committed records, because a new leader's high watermark may be
        too low.
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
        """Propose to remove the followers that have lagged for too long."""
        if self.pending is not None:
            return None
        slow = tuple(each for each in self.isr if each != self._node_id and self._lags(each, leader_end, now_ms))
        if not slow:
            return None
        return self._propose([each for each in self.isr if each not in slow], own_epoch, removes=slow)

    def resignation(self, own_epoch: int) -> Proposal | None:
        """Propose that the leader leaves the ISR. Another ISR member, or else an eligible replica, then leads."""
        if self.pending is not None or self._node_id not in self.isr:
            return None
        others = [each for each in self.isr if each != self._node_id]
        return self._propose(others, own_epoch, removes=(self._node_id,), resigns=True)

    def confirmation(self, own_epoch: int) -> Proposal | None:
        """Propose the ISR as it is: the controller learns that this leader has read its log."""
        return None if self.pending is not None else self._propose(list(self.isr), own_epoch)

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

    def withdraw(self, proposal: Proposal) -> None:
        """Return to the committed ISR: the proposal has changed nothing, and will not."""
        if proposal is self.pending:
            self.pending = None
            self._note_maximal()
