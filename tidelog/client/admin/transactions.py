"""Admin calls about transactions: lists, descriptions, those that hang, and their ends (KIP-664, 994, 1152).

A transactional id belongs to its coordinator, an open transaction of a partition to the partition's
leader. A transaction hangs when a leader knows it as open and no coordinator will end it; then the
partition's last stable offset stays where it is. Invariant: a transaction counts as hanging only
when its producer has been silent for longer than any transaction may last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from tidelog.client.admin.base import error_of, in_one_limit, raise_on_error
from tidelog.client.admin.coordinators import LOOKUPS_AT_ONCE, TRANSACTION, CoordinatorAdmin
from tidelog.client.admin.producers import Answers, ProducersAdmin
from tidelog.client.arguments import (
    INT16_MAX,
    INT64_MAX,
    as_int,
    as_list,
    as_milliseconds,
    as_partition,
    as_partitions,
    as_text,
    as_texts,
)
from tidelog.client.model import (
    LATEST_TIMESTAMP,
    BlockedPartition,
    BrokerErrors,
    OpenTransaction,
    TopicPartition,
    TransactionDescription,
    TransactionListing,
)
from tidelog.client.network.cluster import Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.offsets import list_offsets
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    DescribeTransactionsResponseTransactionState,
)
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from tidelog.protocol.messages.metadata import MetadataResponse
from tidelog.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)

MAX_TRANSACTION_TIMEOUT_MS = 900_000
"""`transaction.max.timeout.ms` by default: no transaction lasts longer."""
_FIRST_VERSION_WITH_DURATION, _FIRST_VERSION_WITH_PATTERN = 1, 2


class TransactionAdmin(CoordinatorAdmin, ProducersAdmin):
    """The transaction calls of `Admin`."""

    async def list_transactions(
        self,
        *,
        states: Iterable[str] = (),
        producer_ids: Iterable[int] = (),
        min_duration_ms: int | None = None,
        id_pattern: str | None = None,
    ) -> list[TransactionListing]:
        """The transactional ids of all coordinators that pass every filter; sorted by id.

        States are Kafka's, such as "Ongoing". `min_duration_ms` leaves only transactions that are
        open that long; `id_pattern` is a regular expression of the broker's (RE2 in Kafka). Raises
        KafkaError, such as INVALID_REQUEST for an unknown state, and UNSUPPORTED_VERSION for brokers that are too old
        for a filter; BrokerErrors, with the ids of the other brokers, where some have failed.
        """
        request = ListTransactionsRequest(
            state_filters=as_texts("states", states),
            producer_id_filters=[
                as_int("an item of producer_ids", each, -1, INT64_MAX)
                for each in as_list("producer_ids", producer_ids, "producer ids")
            ],
            duration_filter=-1 if min_duration_ms is None else as_int("min_duration_ms", min_duration_ms, 0, INT64_MAX),
            transactional_id_pattern=None if id_pattern is None else as_text("id_pattern", id_pattern),
        )
        needed_version = 0 if min_duration_ms is None else _FIRST_VERSION_WITH_DURATION
        needed_version = needed_version if id_pattern is None else _FIRST_VERSION_WITH_PATTERN

        async def call(connection: Connection, node_id: int) -> ListTransactionsResponse:
            if not connection.supports(ListTransactionsRequest, needed_version):
                raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"broker {node_id} cannot choose among transactions so")
            response = await connection.call(request, ListTransactionsResponse, self._config.request_timeout_ms)
            is_pattern = response.error_code == ErrorCode.INVALID_REGULAR_EXPRESSION  # Kafka's answer has no text
            what = f"the pattern {id_pattern!r} for" if is_pattern else "transactions of"
            raise_on_error(response.error_code, None, f"{what} broker {node_id}")
            if response.unknown_state_filters:
                text = f"no state of a transaction: {', '.join(response.unknown_state_filters)}"
                raise KafkaError(ErrorCode.INVALID_REQUEST, text)
            return response

        def listings_in(responses: Mapping[int, ListTransactionsResponse]) -> list[TransactionListing]:
            listings = [
                TransactionListing(state.transactional_id, state.producer_id, state.transaction_state, node_id)
                for node_id, response in responses.items()
                for state in response.transaction_states
            ]
            return sorted(listings, key=lambda listing: (listing.transactional_id, listing.coordinator_id))

        return await self._ask_every_broker(call, listings_in)

    async def describe_transactions(self, transactional_ids: Iterable[str]) -> dict[str, TransactionDescription]:
        """State, producer and partitions by transactional id.

        Raises the KafkaError of the first failed id, such as TRANSACTIONAL_ID_NOT_FOUND.
        """
        descriptions: dict[str, TransactionDescription] = {}
        for name, result in (await self._describe(as_texts("transactional_ids", transactional_ids))).items():
            if isinstance(result, KafkaError):
                raise result
            descriptions[name] = result
        return descriptions

    async def _describe(self, transactional_ids: list[str]) -> dict[str, TransactionDescription | KafkaError]:
        results = await self._call_coordinators(
            TRANSACTION,
            transactional_ids,
            lambda ids: DescribeTransactionsRequest(transactional_ids=ids),
            DescribeTransactionsResponse,
            lambda response: {
                state.transactional_id: (state.error_code, state) for state in response.transaction_states
            },
        )
        descriptions: dict[str, TransactionDescription | KafkaError] = {}
        for name, result in results.items():
            if isinstance(result, KafkaError):
                descriptions[name] = result
                continue
            node, code, state = result
            error = error_of(code, None, f"transactional id {name!r}")
            descriptions[name] = error or _to_description(state, -1 if node is None else node.node_id)
        return descriptions

    # -- open transactions

    @in_one_limit
    async def open_transactions(self, partitions: Iterable[TopicPartition] | None = None) -> list[OpenTransaction]:
        """The transactions that are open in these partitions, or in all; sorted by partition and start offset.

        Raises KafkaError, PartitionErrors where leaders have failed.
        """
        targets = await self._all_partitions() if partitions is None else as_partitions("partitions", partitions)
        producers = await self.describe_producers(targets)
        open_ones = [
            (partition, producer)
            for partition, states in producers.items()
            for producer in states
            if producer.transaction_start_offset >= 0
        ]
        if not open_ones:
            return []
        try:
            listings = await self.list_transactions(producer_ids={producer.producer_id for _, producer in open_ones})
        except BrokerErrors as failure:  # any of the transactions may be of the coordinators that have failed
            raise KafkaError(failure.code, failure.message) from None
        described = await self._describe([listing.transactional_id for listing in listings])
        by_producer_id = {
            description.producer_id: description
            for description in described.values()
            if isinstance(description, TransactionDescription)
        }
        for name, error in described.items():
            if isinstance(error, KafkaError) and error.code is not ErrorCode.TRANSACTIONAL_ID_NOT_FOUND:
                raise KafkaError(error.code, f"transactional id {name!r}")
        transactions = [
            OpenTransaction(partition, producer, by_producer_id.get(producer.producer_id))
            for partition, producer in open_ones
        ]
        return sorted(transactions, key=lambda each: (each.partition, each.producer.transaction_start_offset))

    async def find_hanging_transactions(
        self,
        partitions: Iterable[TopicPartition] | None = None,
        *,
        max_transaction_timeout_ms: int = MAX_TRANSACTION_TIMEOUT_MS,
    ) -> list[OpenTransaction]:
        """Open transactions that no coordinator will end, silent for longer than `max_transaction_timeout_ms`."""
        oldest_ms = time.time() * 1000 - as_milliseconds("max_transaction_timeout_ms", max_transaction_timeout_ms)
        return [
            transaction
            for transaction in await self.open_transactions(partitions)
            if not transaction.is_expected and transaction.producer.last_timestamp_ms < oldest_ms
        ]

    @in_one_limit
    async def blocked_partitions(self, partitions: Iterable[TopicPartition] | None = None) -> list[BlockedPartition]:
        """Partitions whose last stable offset is held back, with the transaction that does it."""
        oldest: dict[TopicPartition, OpenTransaction] = {}
        for transaction in await self.open_transactions(partitions):
            oldest.setdefault(transaction.partition, transaction)
        cluster, timeout_ms = await self._connected_cluster(), self._config.default_api_timeout_ms
        latest = dict.fromkeys(oldest, LATEST_TIMESTAMP)
        ends = await list_offsets(cluster, latest, timeout_ms=timeout_ms)
        stable = await list_offsets(cluster, latest, isolation_level="read_committed", timeout_ms=timeout_ms)
        blocked = []
        for partition, transaction in oldest.items():
            end, last_stable = ends.get(partition), stable.get(partition)
            if end is not None and last_stable is not None:
                blocked.append(BlockedPartition(partition, last_stable.offset, end.offset, transaction))
        return blocked

    async def _all_partitions(self) -> list[TopicPartition]:
        async def attempt() -> MetadataResponse:
            return await (await self._connected_cluster()).fetch_metadata(None)

        return [
            TopicPartition(topic.name, partition.partition_index)
            for topic in (await self._retry(attempt)).topics
            if topic.name is not None
            for partition in topic.partitions
        ]

    # -- ends

    @in_one_limit
    async def abort_transaction(
        self, partition: TopicPartition, producer_id: int, producer_epoch: int, coordinator_epoch: int
    ) -> None:
        """Write an abort marker into one partition, to end a hanging transaction (WriteTxnMarkers).

        The numbers are those of `describe_producers`. Raises KafkaError: INVALID_PRODUCER_EPOCH,
        TRANSACTION_COORDINATOR_FENCED, CLUSTER_AUTHORIZATION_FAILED.
        """
        partition = as_partition("partition", partition)
        coordinator_epoch = as_int("coordinator_epoch", coordinator_epoch, -1)
        marker = WritableTxnMarker(
            producer_id=as_int("producer_id", producer_id, -1, INT64_MAX),
            producer_epoch=as_int("producer_epoch", producer_epoch, -1, INT16_MAX),
            transaction_result=False,
            topics=[WritableTxnMarkerTopic(name=partition.topic, partition_indexes=[partition.partition])],
            # Without a marker so far there is no epoch; 0 is not above that of any coordinator.
            coordinator_epoch=max(coordinator_epoch, 0),
        )

        async def ask(cluster: Cluster, leader: int, led: list[TopicPartition]) -> Answers[None]:
            response = await cluster.call(leader, WriteTxnMarkersRequest(markers=[marker]), WriteTxnMarkersResponse)
            what = f"transaction of producer {producer_id} in {partition}"
            return {
                TopicPartition(topic.name, each.partition_index): error_of(each.error_code, None, what)
                for result in response.markers
                for topic in result.topics
                for each in topic.partitions
            }

        await self._ask_leaders([partition], ask)

    async def fence_producers(self, transactional_ids: Iterable[str]) -> dict[str, tuple[int, int] | KafkaError]:
        """Fence the producers of these ids and abort their transactions.

        Returns the next (producer id, epoch) of each id, or its KafkaError. An unknown id is created.
        """

        deadline = self._deadline()
        places = asyncio.Semaphore(LOOKUPS_AT_ONCE)

        async def fence(name: str) -> tuple[int, int] | KafkaError:
            request = InitProducerIdRequest(
                transactional_id=name, transaction_timeout_ms=min(self._config.request_timeout_ms, 60_000)
            )

            async def attempt() -> InitProducerIdResponse:
                cluster = await self._connected_cluster()
                node_id = await cluster.find_coordinator(name, TRANSACTION)
                response = await cluster.call(node_id, request, InitProducerIdResponse)
                raise_on_error(response.error_code, None, f"transactional id {name!r}")
                return response

            try:
                async with places:
                    answer = await self._retry(attempt, deadline=deadline)
            except KafkaError as error:
                return error
            return answer.producer_id, answer.producer_epoch

        names = list(dict.fromkeys(as_texts("transactional_ids", transactional_ids)))
        return dict(zip(names, await asyncio.gather(*map(fence, names))))


def _to_description(state: DescribeTransactionsResponseTransactionState, node_id: int) -> TransactionDescription:
    return TransactionDescription(
        state.transactional_id,
        state.transaction_state,
        state.producer_id,
        state.producer_epoch,
        state.transaction_timeout_ms,
        state.transaction_start_time_ms if state.transaction_start_time_ms >= 0 else None,
        tuple(sorted(TopicPartition(topic.topic, number) for topic in state.topics for number in topic.partitions)),
        node_id,
    )
