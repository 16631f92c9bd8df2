"""Produce with batches of a transaction: verified by their coordinator before the first one enters a partition."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.unit.broker.conftest import RunningNode, StartNode, Wire
from tests.unit.broker.transactions import (
    NOW,
    FakeCoordinator,
    errors_of,
    marker,
    partition_of,
    produce,
    produce_request,
    transactional,
    use,
    write_markers,
)
from tidelog.broker.apis.records import produce as produce_api
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.batches.record_batch import ATTRIBUTES_OFFSET, CRC_OFFSET, HEADER_SIZE
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages.produce import ProduceResponse

E = ErrorCode
T0 = ("t", 0)
BASE_SEQUENCE_AT = 53


@pytest.fixture
async def topic(wire: Wire) -> None:
    await wire.create_topic("t", 3)


@pytest.mark.parametrize(("version", "verify_only"), [(8, True), (11, True), (12, False)])
async def test_the_first_batch_asks_the_coordinator_and_later_ones_do_not(
    running: RunningNode, wire: Wire, topic: None, version: int, verify_only: bool
):
    coordinator = use(running, FakeCoordinator())
    for sequence in range(3):
        assert await produce(wire, {T0: transactional(sequence)}, version=version) == [E.NONE]
    assert coordinator.asked == [("txn", 7, 0, (T0,), verify_only)]
    log = partition_of(running).log
    assert (log.log_end_offset, log.last_stable_offset) == (3, 0)


async def test_several_partitions_are_asked_for_together(running: RunningNode, wire: Wire, topic: None):
    coordinator = use(running, FakeCoordinator())
    await produce(wire, {T0: transactional()})
    assert (
        await produce(wire, {("t", index): transactional(1 if index == 0 else 0) for index in range(3)}) == [E.NONE] * 3
    )
    assert coordinator.asked[1][3] == (("t", 1), ("t", 2))


async def test_a_topic_may_be_named_by_its_id(running: RunningNode, wire: Wire):
    topic_id = await wire.create_topic("t")
    coordinator = use(running, FakeCoordinator(answer_now=False))
    request = produce_request({T0: transactional()})
    request.topic_data[0].topic_id = topic_id
    wire.send(request, 13)
    await coordinator.wait_until_asked()
    assert coordinator.asked[0][3] == (T0,)
    coordinator.answer()
    assert errors_of(await wire.receive(ProduceResponse, 13)) == [E.NONE]


@pytest.mark.parametrize(
    ("answer", "version", "told"),
    [
        (E.INVALID_TXN_STATE, 8, E.INVALID_TXN_STATE),
        (E.TRANSACTION_ABORTABLE, 10, E.INVALID_TXN_STATE),
        (E.TRANSACTION_ABORTABLE, 11, E.TRANSACTION_ABORTABLE),
        (E.PRODUCER_FENCED, 11, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_PRODUCER_EPOCH, 11, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_PRODUCER_ID_MAPPING, 11, E.INVALID_PRODUCER_ID_MAPPING),
        (E.NETWORK_EXCEPTION, 11, E.NOT_ENOUGH_REPLICAS),
        (E.COORDINATOR_LOAD_IN_PROGRESS, 11, E.NOT_ENOUGH_REPLICAS),
        (E.COORDINATOR_NOT_AVAILABLE, 11, E.NOT_ENOUGH_REPLICAS),
        (E.NOT_COORDINATOR, 11, E.NOT_ENOUGH_REPLICAS),
        (E.CONCURRENT_TRANSACTIONS, 11, E.NOT_ENOUGH_REPLICAS),
        (E.CONCURRENT_TRANSACTIONS, 12, E.CONCURRENT_TRANSACTIONS),
    ],
)
async def test_a_refusal_is_told_as_the_client_understands_it(
    running: RunningNode, wire: Wire, topic: None, answer: ErrorCode, version: int, told: ErrorCode
):
    use(running, FakeCoordinator(answer))
    assert await produce(wire, {T0: transactional()}, version=version) == [told]
    assert partition_of(running).log.log_end_offset == 0


async def test_with_version_12_a_coordinator_that_ends_the_transaction_before_is_asked_again(
    running: RunningNode, wire: Wire, topic: None
):
    coordinator = use(running, FakeCoordinator())
    coordinator.errors = [E.CONCURRENT_TRANSACTIONS] * 3
    assert await produce(wire, {T0: transactional()}, version=12) == [E.NONE]
    assert len(coordinator.asked) == 4


async def test_one_partition_may_be_refused_alone(running: RunningNode, wire: Wire, topic: None):
    coordinator = use(running, FakeCoordinator())
    await produce(wire, {T0: transactional()})
    coordinator.error = E.INVALID_TXN_STATE
    answered = await produce(wire, {T0: transactional(1), ("t", 1): transactional()})
    assert answered == [E.NONE, E.INVALID_TXN_STATE]


async def test_no_later_request_of_the_connection_overtakes_one_that_is_verified(
    running: RunningNode, wire: Wire, topic: None
):
    coordinator = use(running, FakeCoordinator(answer_now=False))
    plain = bytes(encode_batch([(NOW, None, b"plain", ())]))
    wire.send(produce_request({T0: transactional(0, 2)}), 11)
    wire.send(produce_request({T0: transactional(2)}), 11)
    wire.send(produce_request({T0: plain}, transactional_id=None), 11)
    await coordinator.wait_until_asked()
    assert partition_of(running).log.log_end_offset == 0
    assert len(coordinator.asked) == 1
    coordinator.answer()
    offsets = []
    for _ in range(3):
        response = await wire.receive(ProduceResponse, 11)
        assert errors_of(response) == [E.NONE]
        offsets.append(response.responses[0].partition_responses[0].base_offset)
    assert offsets == [0, 2, 3]


@pytest.mark.parametrize("next_bytes", [6_000, 12_000, 15_500, 40_000])
async def test_what_was_read_behind_it_does_not_change_the_batch(
    running: RunningNode, wire: Wire, topic: None, next_bytes: int
):
    """The connection moves what it has read of the next request to the front of its buffer while the batch waits."""
    coordinator = use(running, FakeCoordinator(answer_now=False))
    before, behind = (bytes(encode_batch([(NOW, None, b"x" * size, ())])) for size in (4_000, next_bytes))
    for number in range(4):
        wire.send(produce_request({T0: before}, transactional_id=None), 11)
        wire.send(produce_request({T0: transactional(producer_id=number)}), 11)
        wire.send(produce_request({T0: behind}, transactional_id=None), 11)
        await coordinator.wait_until_asked(number + 1)
        coordinator.answer()
        for _ in range(3):
            assert errors_of(await wire.receive(ProduceResponse, 11)) == [E.NONE]


async def test_a_transaction_that_is_aborted_meanwhile_does_not_open_again(
    running: RunningNode, wire: Wire, topic: None
):
    coordinator = use(running, FakeCoordinator(answer_now=False))
    wire.send(produce_request({T0: transactional()}), 11)
    await coordinator.wait_until_asked()
    other = await running.connect()
    assert await write_markers(other, marker([T0], is_commit=False)) == {(7, "t", 0): E.NONE}
    coordinator.answer()
    assert errors_of(await wire.receive(ProduceResponse, 11)) == [E.INVALID_TXN_STATE]
    log = partition_of(running).log
    assert log.last_stable_offset == log.log_end_offset == 1


async def test_an_older_epoch_is_told_so_before_anything_is_verified(running: RunningNode, wire: Wire, topic: None):
    coordinator = use(running, FakeCoordinator())
    await write_markers(wire, marker([T0], epoch=4))
    assert await produce(wire, {T0: transactional(epoch=3)}) == [E.INVALID_PRODUCER_EPOCH]
    assert not coordinator.asked


async def test_without_a_transactional_id_it_is_refused(running: RunningNode, wire: Wire, topic: None):
    use(running, FakeCoordinator())
    answered = await produce(wire, {T0: transactional()}, transactional_id=None)
    assert answered == [E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED]


async def test_one_transaction_has_one_producer(running: RunningNode, wire: Wire, topic: None):
    use(running, FakeCoordinator())
    batches = {T0: transactional(), ("t", 1): transactional(producer_id=8)}
    assert await produce(wire, batches) == [E.INVALID_PRODUCER_ID_MAPPING] * 2
    assert partition_of(running).log.log_end_offset == 0


async def test_a_partition_that_is_not_there_is_refused_without_a_question(
    running: RunningNode, wire: Wire, topic: None
):
    coordinator = use(running, FakeCoordinator())
    answered = await produce(wire, {("t", 9): transactional(), ("nowhere", 0): transactional()})
    assert answered == [E.UNKNOWN_TOPIC_OR_PARTITION] * 2
    assert not coordinator.asked


async def test_a_partition_that_comes_while_others_are_verified_can_be_tried_again(
    running: RunningNode, wire: Wire, topic: None
):
    """Its batch was not verified: INVALID_TXN_STATE would end the transaction, which has done nothing wrong."""
    coordinator = use(running, FakeCoordinator(answer_now=False))
    batches = {T0: transactional(), ("late", 0): transactional()}
    wire.send(produce_request(batches), 12)
    await coordinator.wait_until_asked()
    other = await running.connect()
    await other.create_topic("late")
    coordinator.answer()
    assert errors_of(await wire.receive(ProduceResponse, 12)) == [E.NONE, E.UNKNOWN_TOPIC_OR_PARTITION]
    wire.send(produce_request({("late", 0): batches["late", 0]}), 12)
    await coordinator.wait_until_asked(2)
    coordinator.answer()
    assert errors_of(await wire.receive(ProduceResponse, 12)) == [E.NONE]


async def test_batches_of_no_transaction_in_the_same_request_are_appended(
    running: RunningNode, wire: Wire, topic: None
):
    use(running, FakeCoordinator(E.INVALID_TXN_STATE))
    plain = bytes(encode_batch([(NOW, None, b"plain", ())]))
    assert await produce(wire, {T0: transactional(), ("t", 1): plain}) == [E.INVALID_TXN_STATE, E.NONE]


async def test_a_compacted_topics_batch_is_verified_too(running: RunningNode, wire: Wire):
    """It is looked at on another thread first, and must not lose its verification on the way."""
    await wire.create_topic("t", 1, cleanup_policy="compact")
    coordinator = use(running, FakeCoordinator())
    assert await produce(wire, {T0: transactional(0, 5_000)}) == [E.NONE]
    assert partition_of(running).log.producers.entries[7].transaction_first_offset == 0
    assert len(coordinator.asked) == 1


@pytest.mark.parametrize("error", [E.NONE, E.INVALID_TXN_STATE])
async def test_without_an_answer_an_error_closes_the_connection(
    running: RunningNode, wire: Wire, topic: None, error: ErrorCode
):
    use(running, FakeCoordinator(error))
    wire.send(produce_request({T0: transactional()}, acks=0), 11)
    if error is E.NONE:
        assert await produce(wire, {T0: transactional(1)}) == [E.NONE]
    else:
        assert await wire.reader.read() == b""


async def test_verification_can_be_switched_off(start_node: StartNode):
    running = await start_node(**{"transaction.partition.verification.enable": "false"})
    wire = await running.connect()
    await wire.create_topic("t")
    coordinator = use(running, FakeCoordinator(E.INVALID_TXN_STATE))
    assert await produce(wire, {T0: transactional()}) == [E.NONE]
    assert not coordinator.asked
    await write_markers(wire, marker([T0]))
    assert await produce(wire, {T0: transactional()}, version=12) == [E.INVALID_TXN_STATE], (
        "version 12 adds in any case"
    )


async def test_a_node_that_cannot_ask_lets_the_producer_try_again(running: RunningNode, wire: Wire, topic: None):
    """There is no `__transaction_state`, so that nobody coordinates."""
    assert await produce(wire, {T0: transactional()}) == [E.NOT_ENOUGH_REPLICAS]


async def test_what_follows_a_batch_that_was_not_verified_is_refused_alike(
    running: RunningNode, wire: Wire, topic: None
):
    coordinator = use(running, FakeCoordinator(E.NOT_COORDINATOR))
    assert await produce(wire, {T0: transactional(0)}) == [E.NOT_ENOUGH_REPLICAS]
    coordinator.error = E.NONE
    assert await produce(wire, {T0: transactional(1)}) == [E.NOT_ENOUGH_REPLICAS]
    assert await produce(wire, {T0: transactional(0)}) == [E.NONE]
    assert await produce(wire, {T0: transactional(1)}) == [E.NONE]


@pytest.mark.parametrize("version", [11, 12, 13])
async def test_one_batch_is_answered_as_among_many(
    running: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch, version: int
):
    """A request with one batch has a way of its own. Both ways leave the same answers, logs, questions and counters."""
    damaged = bytearray(transactional(5))
    damaged[-1] ^= 1
    batches = [
        transactional(0, 2), transactional(0, 2), transactional(2), transactional(9), bytes(damaged),
        transactional(0, epoch=3), transactional(3), transactional(0, producer_id=8), bytes(transactional(0))[:40],
        bytes(damaged), _with(transactional(4, epoch=2), 0, ">q", 3), transactional(1, epoch=1) * 2,
        _with(transactional(4, epoch=2), ATTRIBUTES_OFFSET, ">h", 0x30),
    ]  # fmt: skip
    outcomes = []
    for topic in ("one", "many"):
        topic_id = await wire.create_topic(topic, 2)
        if topic == "many":
            monkeypatch.setattr(produce_api, "decode_one_produce", lambda *_: None)
        node: Any = running.node
        answers, counters = [], node._services.requests.produce
        before = dict(counters.errors)
        coordinator = use(running, FakeCoordinator())
        coordinator.errors = [E.INVALID_TXN_STATE, E.CONCURRENT_TRANSACTIONS, E.NONE]
        for index, batch in [(0, batches[0]), *((0, each) for each in batches), (1, batches[2]), (7, batches[0])]:
            request = produce_request({(topic, index): batch})
            request.topic_data[0].topic_id = topic_id
            wire.send(request, version)
            response = await wire.receive(ProduceResponse, version)
            [answered] = response.responses[0].partition_responses
            answers.append(
                (answered.error_code, answered.base_offset, answered.log_start_offset, answered.record_errors)
            )
        log = partition_of(running, topic).log
        failures = partition_of(running, topic).watch.traffic.produce_failures
        new_errors = {code: count - before.get(code, 0) for code, count in counters.errors.items()}
        asked = [(*question[:3], [index for _, index in question[3]], question[4]) for question in coordinator.asked]
        outcomes.append((answers, log.log_end_offset, log.last_stable_offset, new_errors, asked, failures))
    assert outcomes[0] == outcomes[1]
    assert len({answer[0] for answer in outcomes[0][0]}) > 3, "the cases differ"


def _with(batch: bytes, at: int, layout: str, value: int) -> bytes:
    """The batch with another field, and the CRC that fits."""
    changed = bytearray(batch)
    struct.pack_into(layout, changed, at, value)
    struct.pack_into(">I", changed, CRC_OFFSET, crc32c(memoryview(changed)[ATTRIBUTES_OFFSET:]))
    return bytes(changed)


FAULTS_OF_FORM = {
    "no bytes": lambda batch: b"",
    "cut": lambda batch: batch[:-1],
    "two batches": lambda batch: batch * 2,
}
FAULTS_OF_CONTENT = {
    "CRC": lambda batch: batch[:-1] + bytes((batch[-1] ^ 1,)),
    "control": lambda batch: _with(batch, ATTRIBUTES_OFFSET, ">h", 0x30),
    "no sequence": lambda batch: _with(batch, BASE_SEQUENCE_AT, ">i", -1),
    "base offset": lambda batch: _with(batch, 0, ">q", 3),
    "count": lambda batch: _with(batch, HEADER_SIZE - 4, ">i", 2),
}


@pytest.mark.parametrize("name", [*FAULTS_OF_FORM, *FAULTS_OF_CONTENT])
@pytest.mark.parametrize("way", ["one", "many"])
async def test_of_two_faults_kafkas_first_is_answered(
    running: RunningNode, wire: Wire, topic: None, way: str, name: str
):
    """The form of a batch is checked before the transaction, its content after it (Kafka's handleProduceRequest)."""
    coordinator = use(running, FakeCoordinator())
    await write_markers(wire, marker([T0], epoch=4))
    changed = (FAULTS_OF_FORM | FAULTS_OF_CONTENT)[name]
    plain = {("t", 1): bytes(encode_batch([(NOW, None, b"plain", ())]))} if way == "many" else {}

    async def refusal(epoch: int, acks: int = -1) -> ErrorCode:
        answered = await produce(wire, {T0: changed(transactional(epoch=epoch)), **plain}, acks=acks)
        if plain:
            assert answered[1] is (E.NONE if acks == -1 else E.INVALID_REQUIRED_ACKS)
        return answered[0]

    is_content = name in FAULTS_OF_CONTENT
    failures = partition_of(running).watch.traffic.produce_failures
    assert await refusal(epoch=3) is (E.INVALID_PRODUCER_EPOCH if is_content else E.INVALID_RECORD)
    if is_content:
        assert partition_of(running).watch.traffic.produce_failures == failures, "it has not reached the append"
    assert await refusal(epoch=4, acks=2) is (E.INVALID_REQUIRED_ACKS if is_content else E.INVALID_RECORD)
    coordinator.error, coordinator.asked = E.INVALID_TXN_STATE, []
    assert await refusal(epoch=4) is (E.INVALID_TXN_STATE if is_content else E.INVALID_RECORD)
    assert len(coordinator.asked) == is_content
    coordinator.error = E.NONE
    assert await refusal(epoch=4) is (E.CORRUPT_MESSAGE if name == "CRC" else E.INVALID_RECORD)


async def test_a_batch_that_is_refused_by_its_form_is_of_no_producer(running: RunningNode, wire: Wire, topic: None):
    """Kafka looks at the producers of the other batches alone."""
    use(running, FakeCoordinator())
    batches = {T0: transactional(), ("t", 1): transactional(producer_id=8) * 2, ("t", 9): transactional(producer_id=9)}
    assert await produce(wire, batches) == [E.NONE, E.INVALID_RECORD, E.UNKNOWN_TOPIC_OR_PARTITION]


async def test_bytes_that_are_no_batch_need_no_transactional_id(running: RunningNode, wire: Wire, topic: None):
    for cut in (transactional()[:-1], transactional()[:30]):
        assert await produce(wire, {T0: cut}, transactional_id=None) == [E.INVALID_RECORD]
    for length in (10, 30):
        short = _with(transactional(), 8, ">i", length)
        assert await produce(wire, {T0: short}, transactional_id=None) == [E.CORRUPT_MESSAGE]
        assert await produce(wire, {T0: short}) == [E.CORRUPT_MESSAGE]
