"""A leader whose log is damaged behind what every other replica has gives up its lead.

Its followers cannot copy past the damage, so that the high watermark stands still and the partition cannot be written,
though no committed record is lost: what is damaged was never on another replica in sync. The leader asks the controller
to elect another one, from the rest of the ISR or from the eligible leader replicas, as if this one had died; then it
follows, and cuts its log at the damage. Invariant: it does so only if the damage begins at or above its high watermark,
every other replica has answered that its log ends there or before, and the partition has not changed meanwhile. A
replica that does not answer may have the records: then nothing is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable

if TYPE_CHECKING:
    from tidelog.replication.controller.metadata.image import MetadataImage, PartitionImage
    from tidelog.replication.partition import Partition
    from tidelog.storage.segments.damage import DamagedRange

logger = logging.getLogger("tidelog.repairs")


class Replicas(Protocol):
    """The replicas of a partition on other nodes (`repairs.Repairs`)."""

    def assignment_of(self, partition: Partition) -> PartitionImage | None: ...
    def others(self, partition: Partition) -> list[int]: ...
    async def fetch(self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool) -> bytes: ...


class _Standing(NamedTuple):
    """What must be the same before and after the other replicas are asked: epochs of the partition and the brokers.

    A replica that came back meanwhile may have answered for another log than the one it has now.
    """

    leader_epoch: int
    partition_epoch: int
    broker_epochs: tuple[int, ...]


class DamagedLeaders:
    def __init__(self, node_id: int, replicas: Replicas, image: Callable[[], MetadataImage]) -> None:
        self._node_id = node_id
        self._replicas = replicas
        self._image = image

    def may_resign(self, partition: Partition, damage: DamagedRange) -> bool:
        """Whether another replica may lead instead, and nothing of what is damaged is committed."""
        is_uncommitted = partition.leads and damage.first_offset >= partition.high_watermark
        return is_uncommitted and bool(self._candidates(partition))

    async def resign(self, partition: Partition, damage: DamagedRange) -> bool:
        """Ask for another leader if no replica has what is damaged; whether that was asked for."""
        standing = self._standing(partition)
        if standing is None:
            return False
        candidates = self._candidates(partition)
        for source in self._replicas.others(partition):
            if not await self._ends_before(partition, source, damage, must_reach=source in candidates):
                return False
        is_same = self._standing(partition) == standing
        if not (is_same and self.may_resign(partition, damage) and partition.resign()):
            return False
        logger.warning(
            "%s-%d: another replica is to lead: offsets %d to %d are damaged here, and no other replica has them. "
            "They and what follows up to offset %d were not committed, and go",
            partition.topic, partition.index, damage.first_offset, damage.end_offset, partition.log.log_end_offset,
        )  # fmt: skip
        return True

    def _candidates(self, partition: Partition) -> set[int]:
        """Of whom the controller elects one: who else is in sync, else who is eligible (KIP-966)."""
        assigned = self._replicas.assignment_of(partition)
        if assigned is None:
            return set()
        others_in_sync = {each for each in assigned.isr if each != self._node_id}
        return others_in_sync or {each for each in assigned.elr if each != self._node_id}

    def _standing(self, partition: Partition) -> _Standing | None:
        """None where this replica does not lead, or knows another state of the partition than the metadata."""
        assigned, book = self._replicas.assignment_of(partition), partition.in_sync
        if assigned is None or not partition.leads or book.pending is not None:
            return None
        if (assigned.leader_epoch, assigned.partition_epoch) != (book.leader_epoch, book.partition_epoch):
            return None
        brokers = self._image().brokers
        epochs = tuple(brokers[each].epoch if each in brokers else -1 for each in assigned.replicas)
        return _Standing(assigned.leader_epoch, assigned.partition_epoch, epochs)

    async def _ends_before(self, partition: Partition, source: int, damage: DamagedRange, *, must_reach: bool) -> bool:
        """Whether a replica's log ends at the damage, or before it unless it `must_reach` that far.

        One that may lead is waited for until it has copied what lies before the damage: that much less goes.
        """
        try:
            records = await self._replicas.fetch(partition, source, damage.first_offset, up_to_log_end=True)
        except KafkaError as error:
            ends_before = error.code == ErrorCode.OFFSET_OUT_OF_RANGE and not must_reach
            reason = error.code.name
        except PeerUnreachable as error:
            ends_before, reason = False, str(error)
        else:
            ends_before, reason = not records, "it has records there"
        if not ends_before:
            logger.info("%s: this replica goes on leading because of broker %d: %s", partition, source, reason)
        return ends_before
