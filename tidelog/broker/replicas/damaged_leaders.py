"""A leader resigns when its log is damaged past the end of every other replica's log.

Its followers cannot copy past the damage, so the high watermark stops and the partition cannot be written. No committed
record is lost, because no other in-sync replica had the damaged records. The leader asks the controller to elect
another replica from the rest of the ISR or from the eligible leader replicas, as if this broker had died. Then it
follows, and truncates its log at the damage. Invariant: it resigns only if the damage begins at or above its high
watermark, every other replica has answered that its log ends there or before, and the partition has not changed
meanwhile. A live replica that does not answer may have the records, so the leader does not resign. For a dead replica
it waits only a limited time, because no committed record depends on that replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable

if TYPE_CHECKING:
    from tidelog.replication.controller.metadata.image import MetadataImage, PartitionImage
    from tidelog.replication.partition import Partition
    from tidelog.storage.segments.damage import DamagedRange

logger = logging.getLogger("tidelog.repairs")

DEAD_REPLICA_WAIT_S: Final = 30.0
"""Wait for a fenced replica that does not answer. It cannot lead, but may have records acknowledged with acks=1."""


class Replicas(Protocol):
    """The access to a partition's replicas on other nodes (`repairs.Repairs`)."""

    def assignment_of(self, partition: Partition) -> PartitionImage | None: ...
    def others(self, partition: Partition) -> list[int]: ...
    async def fetch(self, partition: Partition, source: int, offset: int, *, up_to_log_end: bool) -> bytes: ...


class _Epochs(NamedTuple):
    """The epochs of the partition and its brokers, which must not change while the other replicas answer.

    A replica that restarts meanwhile may have another log than the one it answered for.
    """

    leader_epoch: int
    partition_epoch: int
    broker_epochs: tuple[int, ...]


class DamagedLeaders:
    """`now_s`: the time on the loop's clock."""

    def __init__(
        self, node_id: int, replicas: Replicas, image: Callable[[], MetadataImage], now_s: Callable[[], float]
    ) -> None:
        self._node_id = node_id
        self._replicas = replicas
        self._image = image
        self._now_s = now_s
        self._waiting: dict[Partition, tuple[int, float]] = {}
        """The waits for dead replicas: the first offset of the damage, and the end of the wait."""

    def may_resign(self, partition: Partition, damage: DamagedRange) -> bool:
        """Whether another replica may lead instead, and no damaged record is committed."""
        is_uncommitted = partition.leads and damage.first_offset >= partition.high_watermark
        return is_uncommitted and bool(self._candidates(partition))

    async def resign(self, partition: Partition, damage: DamagedRange) -> bool:
        """Request another leader if no other replica has the damaged records. Whether it did so."""
        epochs = self._epochs_of(partition)
        if epochs is None:
            return False
        candidates = self._candidates(partition)
        unheard: list[int] = []
        for source in self._replicas.others(partition):
            ends_before = await self._ends_before(partition, source, damage, must_reach=source in candidates)
            if ends_before is None and self._is_dead(source):
                unheard.append(source)
            elif not ends_before:
                return False
        if unheard and self._must_wait(partition, damage, unheard):
            return False
        is_same = self._epochs_of(partition) == epochs
        if not (is_same and self.may_resign(partition, damage) and partition.resign()):
            return False
        self._waiting.pop(partition, None)
        logger.warning(
            "%s-%d: resigning as leader: offsets %d to %d are damaged here, and no other replica has them%s. "
            "They and the records that follow, up to offset %d, were not committed, and are removed",
            partition.topic, partition.index, damage.first_offset, damage.end_offset,
            f", as far as can be known without brokers {unheard}" if unheard else "", partition.log.log_end_offset,
        )  # fmt: skip
        return True

    def forget(self, partition: Partition) -> None:
        """The damage is repaired or truncated, or the replica is gone."""
        self._waiting.pop(partition, None)

    def _is_dead(self, broker_id: int) -> bool:
        broker = self._image().brokers.get(broker_id)
        return broker is None or broker.fenced

    def _must_wait(self, partition: Partition, damage: DamagedRange, unheard: list[int]) -> bool:
        """Whether the wait for dead replicas has not ended yet."""
        first_offset, until_s = self._waiting.get(partition, (-1, 0.0))
        if first_offset != damage.first_offset:
            until_s = self._now_s() + DEAD_REPLICA_WAIT_S
            self._waiting[partition] = damage.first_offset, until_s
            logger.warning(
                "%s-%d: offsets %d to %d are damaged here, and no replica that answers has them; waiting for "
                "brokers %s, which are down", partition.topic, partition.index, damage.first_offset, damage.end_offset,
                unheard,
            )  # fmt: skip
        return self._now_s() < until_s

    def _candidates(self, partition: Partition) -> set[int]:
        """The live replicas from which the controller elects: the rest of the ISR, otherwise the ELR (KIP-966)."""
        assigned = self._replicas.assignment_of(partition)
        if assigned is None:
            return set()
        others_in_sync = {each for each in assigned.isr if each != self._node_id}
        eligible = others_in_sync or {each for each in assigned.elr if each != self._node_id}
        return {each for each in eligible if not self._is_dead(each)}

    def _epochs_of(self, partition: Partition) -> _Epochs | None:
        """None if this replica does not lead, or if its state of the partition differs from the metadata."""
        assigned, in_sync = self._replicas.assignment_of(partition), partition.in_sync
        if assigned is None or not partition.leads or in_sync.pending is not None:
            return None
        if (assigned.leader_epoch, assigned.partition_epoch) != (in_sync.leader_epoch, in_sync.partition_epoch):
            return None
        brokers = self._image().brokers
        epochs = tuple(brokers[each].epoch if each in brokers else -1 for each in assigned.replicas)
        return _Epochs(assigned.leader_epoch, assigned.partition_epoch, epochs)

    async def _ends_before(
        self, partition: Partition, source: int, damage: DamagedRange, *, must_reach: bool
    ) -> bool | None:
        """Whether a replica's log ends at the damage, or before it unless it `must_reach` that far. None: no answer.

        A candidate must first copy the records before the damage, so that fewer records are lost.
        """
        ends_before: bool | None = None
        try:
            records = await self._replicas.fetch(partition, source, damage.first_offset, up_to_log_end=True)
        except KafkaError as error:
            ends_before = error.code == ErrorCode.OFFSET_OUT_OF_RANGE and not must_reach
            reason = error.code.name
        except PeerUnreachable as error:
            reason = str(error)
        else:
            ends_before, reason = not records, "it has records there"
        if not ends_before:
            logger.info("%s: this replica still leads because of broker %d: %s", partition, source, reason)
        return ends_before
