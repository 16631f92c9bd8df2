"""The change of one partition: a new ISR, replica list or election gives a
PartitionChangeRecord, or none. Pure.

Invariant: an election keeps committed records. A leader comes from the ISR; if the ISR is empty,
from the eligible leader replicas (KIP-966). Another replica becomes leader only by an unclean
election, or as the last known leader of a partition that no other replica can lead. A record that
names a leader starts a new leader epoch. The rules are those of Kafka's `PartitionChangeBuilder`
and `PartitionReassignmentReplicas`, with one addition: a reassignment that only removes replicas
waits until the leader, one of those that stay, has read its log. Damage that no read
has met would otherwise lose its whole copies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from tidelog.protocol.messages.metadata_records import PartitionChangeRecord
from tidelog.protocol.uuids import LOST_DIRECTORY, MIGRATING_DIRECTORY, UNASSIGNED_DIRECTORY
from tidelog.replication.controller.metadata.image import (
    NO_LEADER,
    NO_LEADER_CHANGE,
    RECOVERED,
    RECOVERING,
    PartitionImage,
)

# Before this level a smaller ISR needs a new leader epoch (KAFKA-15021).
NO_EPOCH_FOR_SHRINK_VERSION = 12  # 3.6-IV0
DIRECTORIES_VERSION = 17  # 3.7-IV2


class Election(Enum):
    ONLINE = "an electable replica, the present leader first"
    PREFERRED = "the first replica if it may lead, else as ONLINE"
    UNCLEAN = "as ONLINE, and if no replica may lead, any live replica"


@dataclass(slots=True)
class ElectionRules:
    """The rules for all partitions of one decision.

    `electable`: the brokers that may lead, with their online log directories (empty: all are
    online). `readers`: the brokers that read their log before replicas are removed, and say so.
    """

    electable: Mapping[int, Collection[bytes]]
    elr_enabled: bool
    metadata_version: int
    default_directory: Callable[[int], bytes]
    readers: Collection[int] = ()


@dataclass(slots=True)
class TopicRules:
    """The rules for the partitions of one topic. `min_insync_replicas` is at most the replication
    factor.
    """

    topic_id: bytes
    min_insync_replicas: int
    unclean: bool


class PartitionChange:
    """Set the attributes that change, then `build`. The other attributes keep their values."""

    __slots__ = (
        "_index",
        "_partition",
        "_rules",
        "_stays",
        "_topic",
        "adding",
        "directories",
        "election",
        "elr",
        "isr",
        "log_was_read",
        "recovery_state",
        "removing",
        "replicas",
        "unclean_shutdown",
    )

    def __init__(self, partition: PartitionImage, index: int, topic: TopicRules, rules: ElectionRules) -> None:
        self._partition = partition
        self._index = index
        self._topic = topic
        self._rules = rules
        self.isr: Sequence[int] = partition.isr
        self.replicas: Sequence[int] = partition.replicas
        self.removing: Sequence[int] = partition.removing_replicas
        self.adding: Sequence[int] = partition.adding_replicas
        self.elr: Sequence[int] = partition.elr
        self.recovery_state = partition.leader_recovery_state
        self.election = Election.ONLINE
        self.unclean_shutdown: Collection[int] = ()
        self.directories: dict[int, bytes] = {}
        self.log_was_read = False
        """Whether the leader says that it has read its log, so that other replicas may be removed."""
        self._stays: Collection[int] = ()
        """The replicas that stay, while the removal waits for one of them to read its log as the leader."""

    def build(self) -> PartitionChangeRecord | None:
        """The record of the change, or None if nothing changes."""
        partition = self._partition
        record = PartitionChangeRecord(partition_id=self._index, topic_id=self._topic.topic_id)
        self._complete_reassignment()
        if self._rules.elr_enabled:
            self._populate_elr()
        self._elect(record)
        if record.leader == NO_LEADER_CHANGE and not set(partition.replicas) <= set(self.replicas):
            record.leader = partition.leader  # the removed replica must notice it by a new leader epoch
        self._set_elr(record)
        isr = tuple(self.isr)
        if record.isr is None and isr != partition.isr and (isr or self._rules.elr_enabled):
            record.isr = list(isr)
        self._bump_epoch_for_shrink(record)
        if self._rules.elr_enabled:
            self._set_last_known_leader(record)
        self._set_assignment(record)
        if self.recovery_state != partition.leader_recovery_state:
            record.leader_recovery_state = self.recovery_state
        return None if _is_nothing(record) else record

    # -- reassignment ------------------------------------------------------------------------------------------------

    def _complete_reassignment(self) -> None:
        """End the reassignment when all target replicas are in sync."""
        if not self.removing and not self.adding:
            return
        isr = [replica for replica in self.isr if replica not in self.removing]
        replicas = [replica for replica in self.replicas if replica not in self.removing]
        if not (isr and replicas and set(replicas) <= set(isr)):
            return
        if self._must_be_read(replicas):
            self._stays = replicas
        else:
            self.isr, self.replicas, self.removing, self.adding = isr, replicas, (), ()

    def _must_be_read(self, staying: Sequence[int]) -> bool:
        """Whether the removal waits for the next leader. A replica that is being added is a fresh copy already, and a
        broker of another kind would never say that it has read its log.
        """
        if self.adding or self.log_was_read or not self.removing:
            return False
        present = self._partition.leader
        first_present = sorted(staying, key=lambda replica: replica != present)
        leader = next((replica for replica in first_present if self._may_lead(replica)), NO_LEADER)
        if leader == NO_LEADER:
            return any(replica in self._rules.readers for replica in staying)
        return leader in self._rules.readers

    def _set_assignment(self, record: PartitionChangeRecord) -> None:
        partition = self._partition
        replicas = tuple(self.replicas)
        if replicas != partition.replicas:
            record.replicas = list(replicas)
        if (self.directories or record.replicas is not None) and self._rules.metadata_version >= DIRECTORIES_VERSION:
            directory_by_replica = dict(zip(partition.replicas, partition.directories)) | self.directories
            directories = tuple(
                directory_by_replica[replica]
                if replica in directory_by_replica
                else self._rules.default_directory(replica)
                for replica in replicas
            )
            if directories != partition.directories:
                record.directories = list(directories)
        if tuple(self.removing) != partition.removing_replicas:
            record.removing_replicas = list(self.removing)
        if tuple(self.adding) != partition.adding_replicas:
            record.adding_replicas = list(self.adding)

    # -- election ----------------------------------------------------------------------------------------------------

    def _elect(self, record: PartitionChangeRecord) -> None:
        leader, unclean = self._choose_leader()
        if leader == self._partition.leader:
            return
        if leader != NO_LEADER and leader in self.elr:
            self.isr = [leader]
            # With a minimum of one the leader commits alone from now on, and no
            # other replica stays eligible.
            is_enough = self._topic.min_insync_replicas <= 1
            self.elr = () if is_enough else [replica for replica in self.elr if replica != leader]
        record.leader = leader
        if unclean:
            record.isr = [leader]
            if len(self.replicas) == 1:
                self.recovery_state = RECOVERED  # no other replica can differ
            elif self._partition.leader_recovery_state != RECOVERING:
                self.recovery_state = RECOVERING

    def _choose_leader(self) -> tuple[int, bool]:
        """(leader, whether its election may lose committed records)."""
        if self.election is Election.PREFERRED and self._may_lead(self.replicas[0]):
            return self.replicas[0], False
        candidates = sorted((self._partition.leader, *self.replicas), key=lambda replica: replica not in self._stays)
        for replica in candidates:
            if self._may_lead(replica):
                return replica, False
        last_known_leader = self._last_known_leader()
        if last_known_leader != NO_LEADER:
            return last_known_leader, True
        if self.election is Election.UNCLEAN:
            # One that is being added last, unlike Kafka: it may have nothing yet.
            for replica in sorted(self.replicas, key=self._partition.adding_replicas.__contains__):
                if self._is_electable(replica):
                    return replica, True
        return NO_LEADER, False

    def _may_lead(self, replica: int) -> bool:
        return (replica in self.isr or (not self.isr and replica in self.elr)) and self._is_electable(replica)

    def _is_electable(self, replica: int) -> bool:
        online = self._rules.electable.get(replica)
        if online is None or replica not in self.replicas:
            return False
        directory = self.directories.get(replica) or self._partition.directory_of(replica)
        if directory in (UNASSIGNED_DIRECTORY, MIGRATING_DIRECTORY):
            return True
        return directory != LOST_DIRECTORY and (not online or directory in online)

    def _last_known_leader(self) -> int:
        """The last known leader of a partition without ISR and ELR; it has all acknowledged
        records.
        """
        last_known_leader = self._partition.last_known_elr
        if self._rules.elr_enabled and not self.isr and not self.elr and len(last_known_leader) == 1:
            return last_known_leader[0] if self._is_electable(last_known_leader[0]) else NO_LEADER
        return NO_LEADER

    # -- eligible leader replicas ------------------------------------------------------------------------------------

    def _populate_elr(self) -> None:
        """Compute the ELR. Below the minimum ISR nothing is committed, so
        earlier ISR members have all that is.
        """
        if len(self.isr) >= self._topic.min_insync_replicas:
            self.elr = ()
            return
        candidates = dict.fromkeys((*self.elr, *self._partition.isr))
        self.elr = [
            replica
            for replica in candidates
            if replica not in self.isr and replica not in self.unclean_shutdown and replica in self.replicas
        ]

    def _set_elr(self, record: PartitionChangeRecord) -> None:
        if record.isr is not None or not self._rules.elr_enabled:
            self.elr = ()  # an unclean election, or a cluster without ELR
            if not self._rules.elr_enabled and self._partition.last_known_elr:
                record.last_known_elr = []
        if tuple(self.elr) != self._partition.elr:
            record.eligible_leader_replicas = list(self.elr)

    def _set_last_known_leader(self, record: PartitionChangeRecord) -> None:
        """Note the leader that the partition loses.

        Kafka notes it when the ISR becomes empty. But a leader that has registered anew, and is still fenced, loses its
        lead and stays in the ISR when its last eligible replica goes. When the ISR becomes empty, there is no leader.
        """
        partition = self._partition
        if record.leader == NO_LEADER and partition.leader != NO_LEADER:
            if partition.last_known_elr != (partition.leader,):
                record.last_known_elr = [partition.leader]
        elif partition.last_known_elr and (
            record.leader >= 0 or (partition.leader != NO_LEADER and record.leader != NO_LEADER)
        ):
            record.last_known_elr = []

    def _bump_epoch_for_shrink(self, record: PartitionChangeRecord) -> None:
        if (
            record.isr is not None
            and record.leader == NO_LEADER_CHANGE
            and self._rules.metadata_version < NO_EPOCH_FOR_SHRINK_VERSION
            and not set(self._partition.isr) <= set(record.isr)
        ):
            record.leader = self._partition.leader


def _is_nothing(record: PartitionChangeRecord) -> bool:
    return (
        record.isr is None
        and record.leader == NO_LEADER_CHANGE
        and record.replicas is None
        and record.eligible_leader_replicas is None
        and record.last_known_elr is None
        and record.removing_replicas is None
        and record.adding_replicas is None
        and record.leader_recovery_state < 0
        and record.directories is None
    )
