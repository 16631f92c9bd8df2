"""The classic mistakes of a replicated log, each planted with one stroke: what the simulation must be able to catch.

Each takes pytest's monkeypatch, or anything with its `setattr`, and leaves the code otherwise as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tidelog.replication import follower, leader_link
from tidelog.replication.controller.decisions import partition_changes
from tidelog.replication.isr import InSyncReplicas
from tidelog.replication.partition import Partition
from tidelog.replication.quorum.files.vote_store import VoteStore
from tidelog.storage.log import partition_log as storage_log
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.log.repair import RangeRepair
from tidelog.storage.segments import append

Plant = Callable[[Any], None]


def skip_the_fsync_of_a_vote(patch: Any) -> None:
    """The vote file is written, but not synced before the vote is told."""
    write = VoteStore.write

    def careless(store: VoteStore, state: Any, *, sync: bool = True) -> None:
        write(store, state, sync=False)

    patch.setattr(VoteStore, "write", careless)


def count_the_isr_wrong(patch: Any) -> None:
    """The slowest in-sync follower is not waited for."""

    def hasty(book: InSyncReplicas, committable: int, *others: Any) -> int:
        ends = sorted(each.log_end_offset for each in book.followers.values() if each.in_maximal_isr)
        return min([committable, *ends[1:]])

    patch.setattr(InSyncReplicas, "high_watermark", hasty)


def acknowledge_before_the_high_watermark(patch: Any) -> None:
    """acks=all is answered as soon as the leader has the record."""
    patch.setattr(Partition, "may_answer", lambda partition, last_offset, required_acks: True)


def truncate_too_little(patch: Any) -> None:
    """A follower that diverges keeps one record more than it may."""
    exact = follower.truncation_offset

    def generous(leader_epoch: int, leader_end: int, own_epoch: int, own_end: int, log_end: int) -> int:
        return min(exact(leader_epoch, leader_end, own_epoch, own_end, log_end) + 1, log_end)

    patch.setattr(leader_link, "truncation_offset", generous)


def claim_before_the_scan(patch: Any) -> None:
    """A broker speaks for its last epoch, whatever opening its logs has cut."""
    patch.setattr(LogDirectory, "_lose", lambda directory, topic, partition: None)


def accept_any_gap(patch: Any) -> None:
    """A follower takes what its leader sends, though offsets are missing before it."""
    exact = append.admit_replicated
    patch.setattr(storage_log, "admit_replicated", lambda batches, next_offset, *bound: exact(batches, next_offset))


def repair_from_a_stale_replica(patch: Any) -> None:
    """What another replica has at these offsets is taken, whichever leader wrote it."""
    begin = RangeRepair.__init__

    def credulous(repair: RangeRepair, *of: Any, **named: Any) -> None:
        begin(repair, *of, **named)
        repair._epoch = repair._epoch_max = -1
        repair._knows_epochs = False

    patch.setattr(RangeRepair, "__init__", credulous)


def remove_replicas_unread(patch: Any) -> None:
    """A reassignment to fewer replicas ends though no replica that stays has been read."""
    patch.setattr(partition_changes.PartitionChange, "_must_be_read", lambda self, staying: False)
