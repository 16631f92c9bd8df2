"""Reads a leader's log before a reassignment removes other replicas, whose copies may be the only whole ones.

The controller keeps such a reassignment open (`decisions/partition_changes.py`), with a replica that stays as the
leader. That leader reads its whole log, waits for the repair of what it finds, and then confirms. Nothing is stored: a
leader that is elected meanwhile begins anew, and the controller knows from the metadata what it waits for. Invariants:
one log is read at a time; a reassignment waits for a damaged range only while a replica may have a whole copy of it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tidelog.broker.replicas.partitions import Partitions
    from tidelog.broker.replicas.repairs import Repairs
    from tidelog.broker.replicas.scrubber import Scrubber
    from tidelog.replication.controller.metadata.image import MetadataDelta
    from tidelog.replication.partition import Partition

logger = logging.getLogger("tidelog.repairs")

PAUSE_S: Final = 0.5
"""The time between two looks at damage that is being repaired, and at confirmations."""
DEAD_REPLICAS_WAIT_S: Final = 600.0
"""How long a leader that is alone in the ISR waits for a copy from replicas that do not answer."""


class RemovalChecks:
    """The checks of one broker."""

    def __init__(
        self,
        node_id: int,
        partitions: Partitions,
        repairs: Repairs,
        scrubber: Scrubber,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._node_id = node_id
        self._partitions = partitions
        self._repairs = repairs
        self._scrubber = scrubber
        self._loop = loop
        self._unread: dict[Partition, None] = {}
        self._read: dict[Partition, float] = {}
        """The partitions whose log was read, and when, on the loop's clock."""
        self._warned: set[Partition] = set()
        self._reading: asyncio.Task[None] | None = None
        self._confirming: asyncio.Task[None] | None = None
        self._is_closed = False

    def on_image(self, delta: MetadataDelta) -> None:
        for topic_id, indexes in delta.changed_partitions.items():
            for index in indexes:
                partition = self._partitions.find(topic_id, index)
                if partition is not None and partition not in self._read and self._is_awaited(partition):
                    self._unread[partition] = None
        if self._unread and self._reading is None and not self._is_closed:
            self._reading = self._loop.create_task(self._read_all(), name="removal checks")

    async def close(self) -> None:
        self._is_closed = True
        tasks = [task for task in (self._reading, self._confirming) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_awaited(self, partition: Partition) -> bool:
        """Whether the removal of replicas waits for this leader."""
        assignment = self._repairs.assignment_of(partition)
        if assignment is None or partition.offline or assignment.leader != self._node_id:
            return False
        if self._partitions.find(partition.topic_id, partition.index) is not partition:
            return False
        staying = set(assignment.replicas) - set(assignment.removing_replicas)
        return (
            bool(assignment.removing_replicas)
            and not assignment.adding_replicas
            and self._node_id in staying
            and staying <= set(assignment.isr)
        )

    async def _read_all(self) -> None:
        """Read the smallest log first, so that one large log does not hold back all others."""
        try:
            while self._unread:
                partition = min(self._unread, key=lambda each: each.log.size_bytes)
                del self._unread[partition]
                if not self._is_awaited(partition):
                    continue
                if await self._scrubber.read_whole(partition):
                    self._has_read(partition)
                elif self._is_awaited(partition):
                    self._unread[partition] = None
                    await asyncio.sleep(PAUSE_S)
        finally:
            self._reading = None

    def _has_read(self, partition: Partition) -> None:
        self._read[partition] = self._loop.time()
        self._go_on(partition, self._read[partition])
        if self._read and self._confirming is None and not self._is_closed:
            self._confirming = self._loop.create_task(self._confirm_all(), name="removal confirmations")

    async def _confirm_all(self) -> None:
        """Until the metadata says that the replicas are removed, or that this leader need not read any more."""
        try:
            while self._read:
                await asyncio.sleep(PAUSE_S)
                for partition, read_s in list(self._read.items()):
                    self._go_on(partition, read_s)
        finally:
            self._confirming = None

    def _go_on(self, partition: Partition, read_s: float) -> None:
        if not self._is_awaited(partition):
            del self._read[partition]
            self._warned.discard(partition)
            return
        if not self._repairs.has_unsettled(partition) or self._has_waited(partition, read_s):
            partition.confirm_reading()
            return
        self._repairs.look_at(partition)
        if partition not in self._warned:
            self._warned.add(partition)
            logger.warning(
                "%s-%d: replicas are not removed yet: this one has damage that another may repair",
                partition.topic, partition.index,
            )  # fmt: skip

    def _has_waited(self, partition: Partition, read_s: float) -> bool:
        """Whether no replica in sync may have the damaged records, and the others were given time to answer."""
        assignment = self._repairs.assignment_of(partition)
        is_alone = assignment is not None and set(assignment.isr) == {self._node_id} and not assignment.elr
        return is_alone and self._loop.time() - read_s > DEAD_REPLICAS_WAIT_S
