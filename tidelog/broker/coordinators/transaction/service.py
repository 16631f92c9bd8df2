"""The transaction coordinator's interface to the request handlers: it routes a request to the
partition of its transactional id.

This module checks requests before they reach a coordinator, and hands prepared transactions to the
sender of markers. It holds no state of transactions. Invariant: all requests of an id go to the
partition that Java's hash of the id selects, so that Kafka reads the same ids from the same log.
Source: Kafka's `TransactionCoordinator`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import chain
from typing import Any

from tidelog.broker.coordinators.group.memory import GroupMemoryBudget
from tidelog.broker.coordinators.group.service import partition_of_id
from tidelog.broker.coordinators.ports import Ports
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.coordinator import MarkersDue, TransactionCoordinator
from tidelog.broker.coordinators.transaction.transitions import (
    ProducerIdentity,
    TakeProducerId,
    TopicPartition,
    TransactionMetadata,
)
from tidelog.broker.coordinators.transaction_ports import MarkerSender, MarkerToSend
from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError

Errors = dict[TopicPartition, ErrorCode]


class TransactionCoordinatorService:
    """`partition_count`: the number of partitions that `__transaction_state` has, or will have after
    its creation. `transaction_version`: the finalized level of that feature.

    A method returns the response, or a `Deferred` of a response or KafkaError. It raises KafkaError
    to refuse the whole request.
    """

    def __init__(
        self,
        config: TransactionCoordinatorConfig,
        ports: Ports,
        markers: MarkerSender,
        partition_count: Callable[[], int],
        transaction_version: Callable[[], int],
        take_producer_id: TakeProducerId,
    ) -> None:
        self.config = config
        self._markers = markers
        self._partition_count = partition_count
        self._memory = GroupMemoryBudget(config.max_memory_bytes)

        def create(partition: int) -> TransactionCoordinator:
            return TransactionCoordinator(
                config, transaction_version, take_producer_id, self._memory, partial(markers.cancel, partition)
            )

        self._runtime: CoordinatorRuntime[TransactionCoordinator] = CoordinatorRuntime(
            "transaction coordinator", ports, create, write_timeout_ms=config.write_timeout_ms, send=self._send
        )

    # -- the node's side ---------------------------------------------------------------------------------------------

    def partition_for(self, transactional_id: str) -> int:
        """The partition of `__transaction_state` that holds the id."""
        return partition_of_id(transactional_id, self._partition_count())

    def on_partition_elected(self, index: int, leader_epoch: int) -> None:
        self._runtime.on_elected(index, leader_epoch)

    def on_partition_resigned(self, index: int) -> None:
        self._runtime.on_resigned(index)

    def close(self) -> None:
        self._runtime.close()

    def is_loading(self) -> bool:
        return self._runtime.is_loading()

    def _send(self, partition: int, leader_epoch: int, due: MarkersDue) -> None:
        producer_id, epoch = due.producer
        marker = MarkerToSend(
            partition, leader_epoch, producer_id, epoch, due.is_commit, due.transaction_version, due.partitions
        )

        def on_done(partitions: frozenset[TopicPartition]) -> None:
            self._runtime.run(
                partition,
                leader_epoch,
                lambda coordinator, now: coordinator.on_marked(due.transactional_id, due.producer, partitions, now),
            )

        self._markers.send(marker, on_done)

    # -- producers ---------------------------------------------------------------------------------------------------

    def initialize(
        self, transactional_id: str, timeout_ms: int, expected: ProducerIdentity | None
    ) -> ProducerIdentity | Deferred:
        """`expected`: the identity that the producer has, if any (KIP-360)."""
        _check_id(transactional_id)
        if not 0 < timeout_ms <= self.config.transaction_max_timeout_ms:
            raise KafkaError(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
        answer: ProducerIdentity | Deferred = self._runtime.submit(
            self.partition_for(transactional_id),
            lambda coordinator, token, now: coordinator.initialize(transactional_id, timeout_ms, expected, token, now),
        )
        return answer

    def add_partitions(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Collection[TopicPartition],
        *,
        verify_only: bool,
        transaction_version: int,
        waits: bool = True,
    ) -> Errors | Deferred:
        """Add the partitions to the id's transaction, or verify that it has them.

        The answer holds an error for each partition; nothing is raised. `transaction_version`: that
        of the client. `waits`: for the end of a short transition, such as the last markers.
        """
        requested = frozenset(partitions)
        producer = ProducerIdentity(producer_id, producer_epoch)
        try:
            _check_id(transactional_id)
            index = self.partition_for(transactional_id)
            if verify_only:
                verified: Errors = self._runtime.read(
                    index, lambda coordinator: coordinator.verify_partitions(transactional_id, producer, requested)
                )
                return verified
            answer = self._runtime.submit(
                index,
                lambda coordinator, token, now: coordinator.add_partitions(
                    transactional_id, producer, requested, transaction_version, token, now, waits
                ),
            )
        except KafkaError as error:
            return dict.fromkeys(requested, error.code)
        if not isinstance(answer, Deferred):
            return dict.fromkeys(requested, answer)
        deferred = Deferred()

        def answered(result: ErrorCode | KafkaError) -> None:
            code = result.code if isinstance(result, KafkaError) else result
            deferred.complete(dict.fromkeys(requested, code))

        answer.on_complete(answered)
        return deferred

    def end(
        self, transactional_id: str, producer: ProducerIdentity, is_commit: bool, transaction_version: int
    ) -> ProducerIdentity | Deferred:
        """The identity for the next transaction; NO_IDENTITY before transaction version 2."""
        _check_id(transactional_id)
        answer: ProducerIdentity | Deferred = self._runtime.submit(
            self.partition_for(transactional_id),
            lambda coordinator, token, now: coordinator.end(
                transactional_id, producer, is_commit, transaction_version, token, now
            ),
        )
        return answer

    # -- operators ---------------------------------------------------------------------------------------------------

    def describe(self, transactional_id: str) -> TransactionMetadata:
        """The committed state of an id. Raises TRANSACTIONAL_ID_NOT_FOUND for an unknown id."""
        _check_id(transactional_id)
        metadata: TransactionMetadata | None = self._runtime.read(
            self.partition_for(transactional_id), lambda coordinator: coordinator.describe(transactional_id)
        )
        if metadata is None:
            raise KafkaError(ErrorCode.TRANSACTIONAL_ID_NOT_FOUND)
        return metadata

    def transactions(self) -> list[tuple[str, TransactionMetadata]]:
        """All ids that this node coordinates. Raises COORDINATOR_LOAD_IN_PROGRESS while a partition loads."""
        if self._runtime.is_loading():
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return list(chain.from_iterable(self._read_all(lambda coordinator: coordinator.transactions())))

    @property
    def id_count(self) -> int:
        return sum(len(ids) for ids in self._read_all(lambda coordinator: coordinator.ids))

    def open_start_times_ms(self) -> Iterator[int]:
        """When each open transaction began, by the wall clock."""
        return chain.from_iterable(self._read_all(lambda coordinator: coordinator.open_start_times_ms()))

    def _read_all(self, operation: Callable[[TransactionCoordinator], Any]) -> Iterator[Any]:
        for partition in self._runtime.active_partitions():
            yield self._runtime.read(partition, operation)


def _check_id(transactional_id: str) -> None:
    if not transactional_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "the transactional id is empty")
