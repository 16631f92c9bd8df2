"""Reports to the controller in which log directory each replica lies, on a broker with several (KIP-858).

The broker chooses the directory of a new replica. The controller must know it, to learn which replicas a failed
directory takes away. Kafka's AssignmentsManager. Invariant: a report names the latest directory of each replica.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.assign_replicas_to_dirs import (
    AssignReplicasToDirsRequest,
    AssignReplicasToDirsRequestDirectoryData,
    AssignReplicasToDirsRequestPartitionData,
    AssignReplicasToDirsRequestTopicData,
)
from tidelog.replication.backoff import Backoff
from tidelog.replication.ports import PeerUnreachable
from tidelog.replication.reports import RetryingReporter

if TYPE_CHECKING:
    import asyncio
    import random

logger = logging.getLogger("tidelog.hosting")

VERSION = 0
REPLICAS_MAX = 2000  # in one request (AssignReplicasToDirsRequest.MAX_ASSIGNMENTS_PER_REQUEST)
BACKOFF_MS_INITIAL = 100
BACKOFF_MS_MAX = 10_000
_NOT_HOSTED = (ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.NOT_LEADER_OR_FOLLOWER)

_Replica = tuple[bytes, int]


class DirectoryAssignments(RetryingReporter[_Replica, bytes]):
    """`call(request, version)` sends to the active controller; after an error the report is sent again later."""

    in_one_request_max = REPLICAS_MAX

    def __init__(
        self,
        *,
        broker_id: int,
        broker_epoch: Callable[[], int],
        call: Callable[[Any, int], Awaitable[Any]],
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
    ) -> None:
        super().__init__(loop, rng, Backoff(BACKOFF_MS_INITIAL, BACKOFF_MS_MAX))
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._call = call
        self._on_accepted: dict[_Replica, Callable[[], None]] = {}

    def report(
        self, topic_id: bytes, index: int, directory_id: bytes, on_accepted: Callable[[], None] | None = None
    ) -> None:
        """Report a directory that differs from the metadata, or is missing there.

        `on_accepted` is called when the controller has accepted this directory and no newer one was reported. It stays
        registered if the same directory is reported again because of older metadata.
        """
        key = (topic_id, index)
        if self._open.get(key) != directory_id:
            self._on_accepted.pop(key, None)
        if on_accepted is not None:
            self._on_accepted[key] = on_accepted
        self._report(key, directory_id)

    def forget(self, topic_id: bytes, index: int) -> None:
        self._on_accepted.pop((topic_id, index), None)
        self._open.pop((topic_id, index), None)

    async def _send(self, sent: dict[_Replica, bytes]) -> bool:
        """Whether the controller knows the directories of all these replicas now."""
        if self._broker_epoch() < 0:
            return False
        try:
            response = await self._call(self._request(sent), VERSION)
        except (KafkaError, PeerUnreachable, TimeoutError, OSError) as error:
            logger.info("AssignReplicasToDirs of %d replicas failed: %s", len(sent), error)
            return False
        if response.error_code:
            logger.info("the controller refuses AssignReplicasToDirs: %s", ErrorCode.of(response.error_code).name)
            return False
        settled = 0
        for directory in response.directories:
            for topic in directory.topics:
                for answer in topic.partitions:
                    key = (topic.topic_id, answer.partition_index)
                    # Who waits for `on_accepted` hosts the replica. The controller's metadata takes it away, and then
                    # `forget` comes; or it has given it back by now.
                    is_gone = answer.error_code in _NOT_HOSTED and key not in self._on_accepted
                    if (answer.error_code and not is_gone) or key not in sent:
                        continue
                    settled += 1
                    if self._settle(key, sent[key]):
                        accepted = self._on_accepted.pop(key, None)
                        if accepted is not None:
                            accepted()
        return settled >= len(sent)

    def _request(self, sent: dict[_Replica, bytes]) -> AssignReplicasToDirsRequest:
        places: dict[bytes, dict[bytes, list[int]]] = {}
        for (topic_id, index), directory_id in sent.items():
            places.setdefault(directory_id, {}).setdefault(topic_id, []).append(index)
        return AssignReplicasToDirsRequest(
            broker_id=self._broker_id,
            broker_epoch=self._broker_epoch(),
            directories=[
                AssignReplicasToDirsRequestDirectoryData(
                    id=directory_id,
                    topics=[
                        AssignReplicasToDirsRequestTopicData(
                            topic_id=topic_id,
                            partitions=[
                                AssignReplicasToDirsRequestPartitionData(partition_index=index) for index in indexes
                            ],
                        )
                        for topic_id, indexes in topics.items()
                    ],
                )
                for directory_id, topics in places.items()
            ],
        )
