"""Transactions over the wire of one node: their coordinator, their partitions and their markers together."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from tests.patience import until
from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.test_node import fetch, fetched
from tests.unit.broker.transactions import marker, partition_of, produce, transactional, write_markers
from tidelog.broker.apis.transactions import add_partitions_to_txn
from tidelog.broker.network.request import Deferred, completed
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from tidelog.protocol.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from tidelog.protocol.messages.describe_transactions import DescribeTransactionsRequest, DescribeTransactionsResponse
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from tidelog.protocol.messages.fetch import FetchResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from tidelog.protocol.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse

E = ErrorCode
T0, T1 = ("t", 0), ("t", 1)


@pytest.fixture
async def ready(wire: Wire) -> Wire:
    """A node with a topic, and with the topic of transactions."""
    await wire.create_topic("t", 2)
    request = FindCoordinatorRequest(key_type=1, coordinator_keys=["txn"])
    answer = await wire.call(request, 6, FindCoordinatorResponse)
    assert answer.coordinators[0].error_code == 0
    return wire


async def init(wire: Wire, *, version: int = 5, **fields: Any) -> InitProducerIdResponse:
    values: dict[str, Any] = {"transactional_id": "txn", "transaction_timeout_ms": 60_000} | fields
    request = InitProducerIdRequest(**values)
    while True:
        answer: InitProducerIdResponse = await wire.call(request, version, InitProducerIdResponse)
        if answer.error_code not in (E.COORDINATOR_LOAD_IN_PROGRESS, E.CONCURRENT_TRANSACTIONS):
            return answer


async def producer(wire: Wire) -> tuple[int, int]:
    answer = await init(wire)
    assert answer.error_code == 0
    return answer.producer_id, answer.producer_epoch


async def end(wire: Wire, identity: tuple[int, int], *, commit: bool = True, version: int = 5) -> EndTxnResponse:
    request = EndTxnRequest(
        transactional_id="txn", producer_id=identity[0], producer_epoch=identity[1], committed=commit
    )
    answer: EndTxnResponse = await wire.call(request, version, EndTxnResponse)
    return answer


async def add(
    wire: Wire, identity: tuple[int, int], partitions: Collection[tuple[str, int]], *, version: int = 3
) -> list[tuple[str, int, ErrorCode]]:
    topics = [AddPartitionsToTxnTopic(name=name, partitions=[index]) for name, index in partitions]
    if version < 4:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id="txn",
            v3_and_below_producer_id=identity[0],
            v3_and_below_producer_epoch=identity[1],
            v3_and_below_topics=topics,
        )
    else:
        request = AddPartitionsToTxnRequest(
            transactions=[
                AddPartitionsToTxnTransaction(
                    transactional_id="txn", producer_id=identity[0], producer_epoch=identity[1], topics=topics
                )
            ]
        )
    answer = await wire.call(request, version, AddPartitionsToTxnResponse)
    results = answer.results_by_topic_v3_and_below
    if version >= 4:
        results = answer.results_by_transaction[0].topic_results
    return [
        (topic.name, each.partition_index, E(each.partition_error_code))
        for topic in results
        for each in topic.results_by_partition
    ]


async def state(wire: Wire) -> Any:
    request = DescribeTransactionsRequest(transactional_ids=["txn"])
    answer = await wire.call(request, 0, DescribeTransactionsResponse)
    return answer.transaction_states[0]


async def wait_for(wire: Wire, name: str) -> Any:
    while (found := await state(wire)).transaction_state != name:
        pass
    return found


async def test_a_transaction_of_version_2_is_written_and_committed(running: RunningNode, ready: Wire):
    identity = await producer(ready)
    batch = transactional(producer_id=identity[0], epoch=identity[1])
    assert await produce(ready, {T0: batch, T1: batch}, version=12) == [E.NONE, E.NONE]
    described = await state(ready)
    assert (described.transaction_state, described.producer_epoch) == ("Ongoing", identity[1])
    assert [(topic.topic, topic.partitions) for topic in described.topics] == [("t", [0, 1])]
    assert partition_of(running).log.last_stable_offset == 0
    ended = await end(ready, identity)
    assert (ended.error_code, ended.producer_id, ended.producer_epoch) == (0, identity[0], identity[1] + 1)
    await wait_for(ready, "CompleteCommit")
    for index in (0, 1):
        log = partition_of(running, "t", index).log
        assert (log.log_end_offset, log.last_stable_offset) == (2, 2), "a record and its marker"
    following = (ended.producer_id, ended.producer_epoch)
    batch = transactional(producer_id=following[0], epoch=following[1])
    assert await produce(ready, {T0: batch}, version=12) == [E.NONE]
    assert (await end(ready, following, commit=False)).error_code == 0
    await wait_for(ready, "CompleteAbort")
    values = fetched(await ready.call(fetch("t"), 11, FetchResponse))
    assert values.count(b"value") == 2, "a reader of uncommitted records gets the aborted one too"
    request = fetch("t")
    request.isolation_level = 1
    answer = await ready.call(request, 11, FetchResponse)
    aborted = answer.responses[0].partitions[0].aborted_transactions
    assert [(each.producer_id, each.first_offset) for each in aborted] == [(identity[0], 2)]


@pytest.mark.parametrize("version", range(4))
async def test_a_transaction_of_version_1_adds_its_partitions_first(ready: Wire, version: int):
    identity = await producer(ready)
    batch = transactional(producer_id=identity[0], epoch=identity[1])
    assert await produce(ready, {T0: batch}, version=9) == [E.INVALID_TXN_STATE], "not added: the transaction is over"
    assert await add(ready, identity, [T0], version=version) == [("t", 0, E.NONE)]
    assert await produce(ready, {T0: batch}, version=9) == [E.NONE]
    assert (await end(ready, identity, version=min(version, 4))).error_code == 0
    await wait_for(ready, "CompleteCommit")
    assert (await end(ready, identity, version=min(version, 4))).error_code == 0, "a repetition"
    await init(ready)
    fenced = E.PRODUCER_FENCED if version >= 2 else E.INVALID_PRODUCER_EPOCH
    assert await add(ready, identity, [T0], version=version) == [("t", 0, fenced)]
    assert (await end(ready, identity, version=version)).error_code == fenced


@pytest.mark.parametrize("version", [3, 5])
async def test_topics_without_partitions_are_answered_unless_others_are_refused(ready: Wire, version: int):
    identity = await producer(ready)

    async def ask(*topics: tuple[str, list[int]]) -> list[tuple[str, int]]:
        named = [AddPartitionsToTxnTopic(name=name, partitions=partitions) for name, partitions in topics]
        one = AddPartitionsToTxnTransaction(
            transactional_id="txn", producer_id=identity[0], producer_epoch=identity[1], topics=named
        )
        request = AddPartitionsToTxnRequest(transactions=[one])
        if version < 4:
            request = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id="txn", v3_and_below_producer_id=identity[0],
                v3_and_below_producer_epoch=identity[1], v3_and_below_topics=named,
            )  # fmt: skip
        answer = await ready.call(request, version, AddPartitionsToTxnResponse)
        results = answer.results_by_topic_v3_and_below
        if version >= 4:
            results = answer.results_by_transaction[0].topic_results
        return [(topic.name, len(topic.results_by_partition)) for topic in results]

    assert await ask(("t", [])) == [("t", 0)]
    assert await ask(("t", []), ("t", [0])) == [("t", 0), ("t", 1)]
    assert await ask(("t", []), ("nowhere", [0])) == [("nowhere", 1)]


async def test_a_partition_that_does_not_exist_makes_the_whole_request_fail(ready: Wire):
    identity = await producer(ready)
    for version in (3, 5):
        assert await add(ready, identity, [T0, ("t", 9), ("nowhere", 0)], version=version) == [
            ("t", 0, E.OPERATION_NOT_ATTEMPTED), ("t", 9, E.UNKNOWN_TOPIC_OR_PARTITION),
            ("nowhere", 0, E.UNKNOWN_TOPIC_OR_PARTITION),
        ]  # fmt: skip
    assert (await state(ready)).transaction_state == "Empty"


@pytest.mark.parametrize("version", AddPartitionsToTxnRequest.VERSIONS)
async def test_the_log_of_transactions_takes_no_part_in_them(ready: Wire, version: int):
    """No marker is written to it, and the id would stay prepared for ever."""
    identity = await producer(ready)
    state_log, offsets = ("__transaction_state", 0), ("__consumer_offsets", 0)
    assert await add(ready, identity, [T0, state_log], version=version) == [
        ("t", 0, E.OPERATION_NOT_ATTEMPTED), (*state_log, E.TOPIC_AUTHORIZATION_FAILED),
    ]  # fmt: skip
    assert (await state(ready)).transaction_state == "Empty"
    await ready.create_topic("__consumer_offsets")
    expected = E.TOPIC_AUTHORIZATION_FAILED if version < 4 else E.NONE
    assert await add(ready, identity, [offsets], version=version) == [(*offsets, expected)]


async def test_a_transaction_that_has_the_log_of_transactions_ends(running: RunningNode, ready: Wire):
    """An older version let it in."""
    identity = await producer(ready)
    broker: Any = running.node._broker
    broker.transactions.add_partitions(
        "txn", *identity, [("__transaction_state", 0)], verify_only=False, transaction_version=0
    )
    assert await add(ready, identity, [T0]) == [("t", 0, E.NONE)]
    assert (await end(ready, identity, version=4)).error_code == 0
    await wait_for(ready, "CompleteCommit")


@pytest.mark.parametrize("version", [3, 5])
async def test_more_partitions_than_a_transaction_holds_are_refused_in_short(
    ready: Wire, version: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(add_partitions_to_txn, "PARTITIONS_MAX", 90_000)
    identity = await producer(ready)
    topics = [AddPartitionsToTxnTopic(name=name, partitions=list(range(46_000))) for name in ("t", "u")]
    if version > 3:
        one = AddPartitionsToTxnTransaction(
            transactional_id="txn", producer_id=identity[0], producer_epoch=identity[1], topics=topics
        )
        request = AddPartitionsToTxnRequest(transactions=[one])
    else:
        request = AddPartitionsToTxnRequest(v3_and_below_transactional_id="txn", v3_and_below_topics=topics)
    answer = await ready.call(request, version, AddPartitionsToTxnResponse)
    if version > 3:
        assert (answer.error_code, answer.results_by_transaction) == (E.INVALID_REQUEST, [])
    else:
        errors = [
            (topic.name, [each.partition_error_code for each in topic.results_by_partition])
            for topic in answer.results_by_topic_v3_and_below
        ]
        assert errors == [("t", [E.INVALID_REQUEST]), ("u", [E.INVALID_REQUEST])]


@pytest.mark.slow
async def test_a_transaction_with_as_many_partitions_as_its_record_holds_can_be_aborted(
    running: RunningNode, ready: Wire
):
    """The record of the abort is a few bytes larger than that of the transaction."""
    identity = await producer(ready)
    broker: Any = running.node._broker

    async def error_of(partitions: list[tuple[str, int]]) -> ErrorCode:
        answer = broker.transactions.add_partitions(
            "txn", *identity, partitions, verify_only=False, transaction_version=0
        )
        errors = await completed(answer) if isinstance(answer, Deferred) else answer
        return E(next(iter(errors.values())))

    topics = [f"{number:0249}" for number in range(5000)]
    count = 3800
    assert await error_of([(topic, 0) for topic in topics[:count]]) is E.NONE
    for more in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        if await error_of([(topic, 0) for topic in topics[count : count + more]]) is E.NONE:
            count += more
    for more in (64, 32, 16, 8, 4, 2, 1):
        await error_of([(topics[0], more + index) for index in range(more)])
    assert (await init(ready)).error_code == 0


async def test_the_offsets_of_a_group_join_a_transaction(ready: Wire):
    identity = await producer(ready)
    request = AddOffsetsToTxnRequest(
        transactional_id="txn", producer_id=identity[0], producer_epoch=identity[1], group_id="g"
    )
    for version in AddOffsetsToTxnRequest.VERSIONS:
        assert (await ready.call(request, version, AddOffsetsToTxnResponse)).error_code == 0
    assert [topic.topic for topic in (await state(ready)).topics] == ["__consumer_offsets"]
    request.producer_epoch += 5
    for version in AddOffsetsToTxnRequest.VERSIONS:
        expected = E.PRODUCER_FENCED if version >= 2 else E.INVALID_PRODUCER_EPOCH
        assert (await ready.call(request, version, AddOffsetsToTxnResponse)).error_code == expected
    assert (await end(ready, identity, version=4)).error_code == 0
    await wait_for(ready, "CompleteCommit")


@pytest.mark.parametrize("version", InitProducerIdRequest.VERSIONS)
async def test_what_cannot_be_initialized_is_refused(ready: Wire, version: int):
    for fields, error in (
        ({"transactional_id": ""}, E.INVALID_REQUEST),
        ({"transaction_timeout_ms": 0}, E.INVALID_TRANSACTION_TIMEOUT),
        ({"transaction_timeout_ms": 900_001}, E.INVALID_TRANSACTION_TIMEOUT),
    ):
        answer = await init(ready, version=version, **fields)
        assert (answer.error_code, answer.producer_id, answer.producer_epoch) == (error, -1, -1)
    first = await init(ready, version=version)
    if version >= 3:
        present = {"producer_id": first.producer_id, "producer_epoch": first.producer_epoch}
        assert (await init(ready, version=version, **present)).producer_epoch == first.producer_epoch + 1
        await init(ready, version=version)
        fenced = E.PRODUCER_FENCED if version >= 4 else E.INVALID_PRODUCER_EPOCH
        assert (await init(ready, version=version, **present)).error_code == fenced


async def test_a_transaction_that_was_left_open_is_aborted_by_the_next_producer(running: RunningNode, ready: Wire):
    old = await producer(ready)
    batch = transactional(producer_id=old[0], epoch=old[1])
    assert await produce(ready, {T0: batch}, version=12) == [E.NONE]
    new = await producer(ready)
    assert new == (old[0], old[1] + 2), "one epoch fences, the next is the producer's"
    assert partition_of(running).log.last_stable_offset == 2
    late = transactional(1, producer_id=old[0], epoch=old[1])
    assert await produce(ready, {T0: late}, version=12) == [E.INVALID_PRODUCER_EPOCH]


async def test_a_transaction_ends_though_one_partition_knows_a_later_epoch(running: RunningNode, ready: Wire):
    """An operator has ended it there. The id must not stay prepared for that."""
    identity = await producer(ready)
    batch = transactional(producer_id=identity[0], epoch=identity[1])
    assert await produce(ready, {T0: batch, T1: batch}, version=12) == [E.NONE, E.NONE]
    aborted = marker([T1], producer_id=identity[0], epoch=identity[1] + 5, is_commit=False)
    assert await write_markers(ready, aborted) == {(identity[0], *T1): E.NONE}
    assert (await end(ready, identity)).error_code == 0
    await wait_for(ready, "CompleteCommit")
    assert [partition_of(running, *each).log.last_stable_offset for each in (T0, T1)] == [2, 2]


async def test_a_transaction_beyond_its_timeout_is_aborted(start_node: StartNode):
    running = await start_node(**{"transaction.abort.timed.out.transaction.cleanup.interval.ms": "20"})
    wire = await running.connect()
    await wire.create_topic("t")
    await wire.call(FindCoordinatorRequest(key_type=1, coordinator_keys=["txn"]), 6, FindCoordinatorResponse)
    answer = await init(wire, transaction_timeout_ms=50)
    batch = transactional(producer_id=answer.producer_id, epoch=answer.producer_epoch)
    assert await produce(wire, {T0: batch}, version=12) == [E.NONE]
    await until(lambda: partition_of(running).log.last_stable_offset == 2)
    assert (await wait_for(wire, "CompleteAbort")).producer_epoch == answer.producer_epoch + 1


async def test_prepared_transactions_are_completed_after_a_restart(start_node: StartNode):
    running = await start_node()
    wire = await running.connect()
    await wire.create_topic("t")
    await wire.call(FindCoordinatorRequest(key_type=1, coordinator_keys=["txn"]), 6, FindCoordinatorResponse)
    identity = await producer(wire)
    assert await produce(wire, {T0: transactional(producer_id=identity[0], epoch=identity[1])}, version=12) == [E.NONE]
    broker: Any = running.node._broker
    broker.marker_sender.send = lambda marker, on_done: None  # the node dies before it sends one
    assert (await end(wire, identity)).error_code == 0
    assert (await state(wire)).transaction_state == "PrepareCommit"
    await running.stop()
    running = await start_node()
    wire = await running.connect()
    await until(lambda: partition_of(running).log.last_stable_offset == 2)
    while (found := await state(wire)).error_code == E.COORDINATOR_LOAD_IN_PROGRESS:
        pass
    assert found.error_code == 0
    assert (await wait_for(wire, "CompleteCommit")).producer_id == identity[0]
    batch = transactional(producer_id=identity[0], epoch=identity[1] + 1)
    assert await produce(wire, {T0: batch}, version=12) == [E.NONE]


async def test_ongoing_transactions_are_shown_with_their_age(running: RunningNode, ready: Wire):
    broker: Any = running.node._broker
    identity = await producer(ready)
    assert (broker.transactions.id_count, list(broker.transactions.open_start_times_ms())) == (1, [])
    await add(ready, identity, [T0])
    (start_ms,) = broker.transactions.open_start_times_ms()
    assert start_ms == (await state(ready)).transaction_start_time_ms > 0
    await end(ready, identity)
    assert list(broker.transactions.open_start_times_ms()) == []


async def test_transactions_are_listed_by_state_producer_age_and_pattern(ready: Wire):
    identity = await producer(ready)
    await producer_of(ready, "other")

    async def listed(version: int = 2, **filters: Any) -> list[str]:
        answer = await ready.call(ListTransactionsRequest(**filters), version, ListTransactionsResponse)
        assert answer.error_code == 0
        return sorted(each.transactional_id for each in answer.transaction_states)

    for version in ListTransactionsRequest.VERSIONS:
        assert await listed(version) == ["other", "txn"]
    await add(ready, identity, [T0])
    assert await listed(state_filters=["Ongoing"]) == ["txn"]
    assert await listed(state_filters=["Empty", "Ongoing"]) == ["other", "txn"]
    assert await listed(producer_id_filters=[identity[0]]) == ["txn"]
    assert await listed(duration_filter=1_000_000) == ["other"], (
        "one without a transaction is older than all, as in Kafka"
    )
    assert await listed(transactional_id_pattern="t.*") == ["txn"]
    assert await listed(transactional_id_pattern="") == ["other", "txn"]
    answer = await ready.call(
        ListTransactionsRequest(state_filters=["Ongoing", "ongoing", "Odd"]), 2, ListTransactionsResponse
    )
    assert answer.unknown_state_filters == ["ongoing", "Odd"]
    assert [each.transactional_id for each in answer.transaction_states] == ["txn"]
    for pattern in ("[", "(a+)+"):
        answer = await ready.call(
            ListTransactionsRequest(transactional_id_pattern=pattern), 2, ListTransactionsResponse
        )
        assert answer.error_code == E.INVALID_REGULAR_EXPRESSION


async def producer_of(wire: Wire, transactional_id: str) -> None:
    assert (await init(wire, transactional_id=transactional_id)).error_code == 0


async def test_an_id_that_is_unknown_or_empty_is_not_described(ready: Wire):
    request = DescribeTransactionsRequest(transactional_ids=["txn", "", "txn"])
    while True:
        answer = await ready.call(request, 0, DescribeTransactionsResponse)
        errors = [each.error_code for each in answer.transaction_states]
        if E.COORDINATOR_LOAD_IN_PROGRESS not in errors:
            break
    assert errors == [E.TRANSACTIONAL_ID_NOT_FOUND, E.INVALID_REQUEST, E.TRANSACTIONAL_ID_NOT_FOUND]
