"""Sends changes of the ISR to the controller, and passes each outcome to its partition.

Follows Kafka's AlterPartitionManager. Invariant: a partition has at most one change in a request, its open proposal
(`isr.InSyncReplicas.pending`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.alter_partition import (
    AlterPartitionRequest,
    AlterPartitionRequestPartitionData,
    AlterPartitionRequestTopicData,
    AlterPartitionResponse,
    BrokerState,
)
from tidelog.replication.backoff import Backoff
from tidelog.replication.ports import PeerUnreachable
from tidelog.replication.reports import RetryingReporter

if TYPE_CHECKING:
    import asyncio
    import random

    from tidelog.replication.isr import Proposal
    from tidelog.replication.partition import Partition

logger = logging.getLogger("tidelog.replication")

VERSION = 3
BACKOFF_MS_INITIAL = 20
BACKOFF_MS_MAX = 1000
# In one request. The controller decides on all of one in one turn of its loop, and refuses one of 12,500 with three
# members each as too large: it would be repeated without end.
ISR_CHANGES_AT_ONCE_MAX = 1_000

Call = Callable[[AlterPartitionRequest, int], Awaitable[AlterPartitionResponse]]
"""A call to the active controller. Raises KafkaError or PeerUnreachable."""

# The controller has refused the change for good.
_REJECTED = (ErrorCode.INELIGIBLE_REPLICA, ErrorCode.OPERATION_NOT_ATTEMPTED)
# Another change came first. The node will receive its metadata, which replaces the proposal.
_OVERTAKEN = (
    ErrorCode.FENCED_LEADER_EPOCH,
    ErrorCode.INVALID_UPDATE_VERSION,
    ErrorCode.INVALID_REQUEST,
    ErrorCode.NEW_LEADER_ELECTED,
    ErrorCode.UNKNOWN_TOPIC_ID,
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
)

_Key = tuple[bytes, int]


class IsrChanges(RetryingReporter[_Key, "tuple[Partition, Proposal]"]):
    in_one_request_max = ISR_CHANGES_AT_ONCE_MAX

    def __init__(
        self,
        *,
        broker_id: int,
        broker_epoch: Callable[[], int],
        call: Call,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        super().__init__(loop, rng, Backoff(BACKOFF_MS_INITIAL, BACKOFF_MS_MAX))
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._call = call

    def submit(self, partition: Partition, proposal: Proposal) -> None:
        """Send the proposal. It replaces an older one of the same partition, which newer metadata has overtaken."""
        self._report((partition.topic_id, partition.index), (partition, proposal))

    def _forget_overtaken(self) -> None:
        for key, (partition, proposal) in list(self._open.items()):
            if not partition.leads or partition.in_sync.pending is not proposal:
                del self._open[key]

    async def _send(self, sent: dict[_Key, tuple[Partition, Proposal]]) -> bool:
        """Send these changes in one request. Returns whether all of them are settled."""
        try:
            response = await self._call(self._request(sent), VERSION)
        except (KafkaError, PeerUnreachable, TimeoutError, OSError) as error:
            logger.info("could not send %d ISR changes to the controller: %s", len(sent), error)
            return False
        if response.error_code:
            # STALE_BROKER_EPOCH ends when this broker registers again, NOT_CONTROLLER with the next active controller.
            logger.info("the controller refused ISR changes: %s", ErrorCode.of(response.error_code).name)
            return False
        settled = 0
        for topic in response.topics:
            for answer in topic.partitions:
                key = (topic.topic_id, answer.partition_index)
                change = sent.get(key)
                if change is None:
                    continue
                partition, proposal = change
                code = answer.error_code
                if code and code not in _REJECTED and code not in _OVERTAKEN:
                    continue
                settled += 1
                self._settle(key, change)
                if not code:
                    partition.on_proposal_agreed(proposal, answer.partition_epoch)
                    continue
                logger.info("%s: the controller answered %r with %s", partition, proposal, ErrorCode.of(code).name)
                # Kafka's controller does not support resignations and answers INVALID_REQUEST.
                if code in _REJECTED or (proposal.resigns and code == ErrorCode.INVALID_REQUEST):
                    partition.on_proposal_rejected(proposal)
        if settled:
            self._backoff.reset()
        return settled == len(sent)

    def _request(self, sent: dict[_Key, tuple[Partition, Proposal]]) -> AlterPartitionRequest:
        topics: dict[bytes, list[AlterPartitionRequestPartitionData]] = {}
        for (topic_id, index), (_, proposal) in sent.items():
            topics.setdefault(topic_id, []).append(
                AlterPartitionRequestPartitionData(
                    partition_index=index,
                    leader_epoch=proposal.leader_epoch,
                    new_isr_with_epochs=[
                        BrokerState(broker_id=broker_id, broker_epoch=epoch) for broker_id, epoch in proposal.isr
                    ],
                    partition_epoch=proposal.partition_epoch,
                )
            )
        return AlterPartitionRequest(
            broker_id=self._broker_id,
            broker_epoch=self._broker_epoch(),
            topics=[
                AlterPartitionRequestTopicData(topic_id=topic_id, partitions=partitions)
                for topic_id, partitions in topics.items()
            ],
        )
