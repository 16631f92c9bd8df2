"""Requests to the transaction coordinators of both brokers, at every version, and what their operators see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.odd_batches import NOW_MS, batch, record
from tests.compatibility.side_by_side import Brokers, Each, _of
from tidelog.protocol.batches.compression import ZSTD, compress

NEXT = itertools.count(1)
LOAD_IN_PROGRESS, NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT = 14, 15, 16, 51
NewTopic = Callable[..., str]


class Clients:
    """A transactional id in both brokers. What a coordinator still works at is asked again until it is done."""

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers
        self.id = f"tx-{next(NEXT)}"
        brokers.ignored = frozenset({"producer_id", "transaction_start_time_ms", "transaction_start_time"})
        self.ask("find_coordinator", 3, key=self.id, key_type=1)
        self.producer_id: Any = -1
        self.epoch: Any = -1

    def ask(self, api: str, version: int, **values: Any) -> Each:
        self.brokers.compare(answers := self.settled(api, version, **values))
        return answers

    def settled(self, api: str, version: int, **values: Any) -> Each:
        def settle(number: int, wire: Any) -> Any:
            deadline = time.monotonic() + 60
            while True:
                answer = wire.ask(api, version, **_of(values, number))
                again = {LOAD_IN_PROGRESS, NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT}
                if not codes(answer) & again or time.monotonic() > deadline:
                    return answer
                time.sleep(0.02)

        return Each(settle(number, wire) for number, wire in enumerate(self.brokers._wires))

    def init(self, version: int = 5, **values: Any) -> Each:
        answers = self.ask("init_producer_id", version, transactional_id=self.id, transaction_timeout=60_000, **values)
        if answers[0].error_code == 0:
            self.producer_id, self.epoch = answers.of("producer_id"), answers.of("producer_epoch")
        return answers

    def identity(self, epochs_ahead: int = 0) -> dict[str, Any]:
        return {"producer_id": self.producer_id, "producer_epoch": Each(epoch + epochs_ahead for epoch in self.epoch)}

    def add(self, topic: str, version: int, epochs_ahead: int = 0, *partitions: int, verify: bool = False) -> None:
        topics = [{"name": topic, "partitions": list(partitions or (0,))}]
        if version >= 4:
            transaction = {"transactional_id": self.id, **self.identity(epochs_ahead), "topics": topics}
            self.ask("add_partitions_to_txn", version, transactions=[transaction | {"verify_only": verify}])
            return
        identity = {f"v3_and_below_{key}": value for key, value in self.identity(epochs_ahead).items()}
        self.ask(
            "add_partitions_to_txn", version, v3_and_below_transactional_id=self.id, v3_and_below_topics=topics,
            **identity,
        )  # fmt: skip

    def end(self, version: int, committed: bool, epochs_ahead: int = 0, **other: Any) -> Each:
        values = {"transactional_id": self.id, **self.identity(epochs_ahead), "committed": committed} | other
        return self.ask("end_txn", version, **values)


def codes(answer: Any) -> set[int]:
    """Every error code anywhere in an answer."""
    found: set[int] = set()
    pending = [answer]
    while pending:
        value = pending.pop()
        if isinstance(value, tuple | list):
            pending += value
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                field = getattr(value, name)
                if name.endswith("error_code"):
                    found.add(int(field))
                else:
                    pending.append(field)
    return found


@pytest.mark.parametrize("version", range(6))
def test_identities_are_given(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both()
    clients = Clients(brokers)
    for timeout in (0, -1, 900_001, 2**31 - 1):
        clients.ask("init_producer_id", version, transactional_id=clients.id, transaction_timeout=timeout)
    for _ in range(3):
        clients.init(version)
    clients.add(topic, 3)
    clients.init(version)  # over an open transaction
    clients.add(topic, 5)
    clients.init(version)
    if version >= 3:
        for ahead in (0, -1, -1, 5, -2):
            clients.init(version, **clients.identity(ahead))
        clients.init(version, producer_id=99_999, producer_epoch=3)
        clients.init(version, producer_id=99_999, producer_epoch=32_766)


@pytest.mark.parametrize("version", range(6))
def test_partitions_are_added(brokers: Brokers, topic_in_both: NewTopic, version: int) -> None:
    topic = topic_in_both(2)
    clients = Clients(brokers)
    clients.producer_id, clients.epoch = Each((5, 5)), Each((0, 0))
    clients.add(topic, version)  # an unknown id
    clients.init()
    clients.add(topic, version, 0, 0, 1)
    clients.add(topic, version, 0, 0)
    clients.add(topic, version, 0, 0, 7)  # no such partition
    clients.add("nowhere", version)
    for ahead in (1, -1, 40):
        clients.add(topic, version, ahead)
    if version >= 4:
        for ahead in (0, 1):
            clients.add(topic, version, ahead, 0, 1, verify=True)
        clients.end(5, True)
        clients.add(topic, version, 0, 0, verify=True)
        clients.add(topic, version, 1, 0, verify=True)


@pytest.mark.parametrize("version", range(5))
def test_offsets_are_added(brokers: Brokers, version: int) -> None:
    clients = Clients(brokers)
    clients.init()
    for ahead in (0, 0, 1, -1):
        values = {"transactional_id": clients.id, **clients.identity(ahead), "group_id": "g"}
        clients.ask("add_offsets_to_txn", version, **values)
    clients.ask("add_offsets_to_txn", version, transactional_id="", producer_id=1, producer_epoch=0, group_id="g")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("version", range(6))
def test_transactions_end(brokers: Brokers, topic_in_both: NewTopic, version: int, first: bool) -> None:
    topic = topic_in_both()
    clients = Clients(brokers)
    clients.init()
    clients.end(version, first)  # nothing was added
    clients.init()
    clients.add(topic, 5 if version == 5 else 3)
    for committed, ahead in ((first, 5), (first, -1), (first, 0), (first, 0), (not first, 0), (True, 1), (False, 1)):
        clients.end(version, committed, ahead)
    clients.end(version, first, 0, producer_id=99_999)
    clients.end(version, first, 0, transactional_id="")
    clients.end(version, first, 0, transactional_id="unknown")


def test_operators_see_the_same(brokers: Brokers, topic_in_both: NewTopic) -> None:
    topic = topic_in_both(3)
    clients = Clients(brokers)

    def look(*own: str) -> None:
        clients.ask("describe_transactions", 0, transactional_ids=[*own, "unknown", ""])
        for states in ([], ["Ongoing"], ["Empty", "CompleteAbort"], ["ongoing"], ["Dead"]):
            for version in range(3):
                pattern = {"transactional_id_pattern": clients.id} if version == 2 else {}
                answers = clients.settled("list_transactions", version, state_filters=states, **pattern)
                listed = Each([each for each in answer.transaction_states if each.transactional_id == clients.id]
                           for answer in answers)  # fmt: skip
                brokers.compare(listed)
                brokers.compare(answers.of("unknown_state_filters"))

    clients.init()
    look()  # kio cannot read the start of a transaction that never was, -1
    clients.add(topic, 5, 0, 2, 0)
    look(clients.id)
    clients.end(5, False)
    while any(each.transaction_states[0].transaction_state != "CompleteAbort"
              for each in clients.settled("describe_transactions", 0, transactional_ids=[clients.id])):  # fmt: skip
        time.sleep(0.02)
    look(clients.id)


# Of these batches each has a fault of its own, as well as that of its transaction.
FAULTY: dict[str, dict[str, Any]] = {
    "good": {},
    "CRC": {"crc": 1},
    "base offset": {"base_offset": 4},
    "control": {"attributes": 48},
    "count": {"values": 2, "count": 3},
    "large": {"values": [b"x" * 2_000_000]},
    "in two days": {"timestamp": NOW_MS + 2 * 86_400_000},
    "log append time": {"attributes": 24},
    "zstd": {"attributes": 20, "payload": bytes(compress(ZSTD, record(b"v")))},
}


@pytest.mark.parametrize(
    "fault", ["older epoch", "newer epoch", "not added", "other producer", "no id", "other id", "acks"]
)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("version", [6, 9, 12])
def test_a_batch_has_two_faults(
    brokers: Brokers, topic_in_both: NewTopic, version: int, beside: bool, fault: str
) -> None:
    topic = topic_in_both(2)
    clients = Clients(brokers)
    # The times of batches that are in the log already differ, see docs/compatibility.md.
    brokers.ignored |= {"error_message", "batch_index_error_message", "log_append_time"}

    def produce(batches: Each, version: int = 9, **values: Any) -> None:
        partitions = [{"index": 0, "records": batches}]
        if beside:
            partitions.append({"index": 1, "records": batch()})
        data = [{"name": topic, "partition_data": partitions}]
        values = {"acks": -1, "timeout": 5000, "transactional_id": clients.id, "topic_data": data} | values
        clients.ask("produce", version, **values)

    def of_producer(sequence: int, epochs_ahead: int = 0, ids_ahead: int = 0, **fields: Any) -> Each:
        fields = {"attributes": 16} | fields
        return Each(
            batch(producer=(producer_id + ids_ahead, epoch + epochs_ahead, sequence), **fields)
            for producer_id, epoch in zip(clients.producer_id, clients.epoch)
        )

    for _ in range(2):
        clients.init()
        clients.add(topic, 3)
        produce(of_producer(0))
        for _ in range(2):  # the second is answered when the transaction is complete
            clients.end(3, True)
    if fault != "not added":
        clients.add(topic, 3)
    ahead = {"older epoch": (-1,), "newer epoch": (1,), "other producer": (0, 1000)}.get(fault, ())
    others: dict[str, dict[str, Any]] = {
        "no id": {"transactional_id": None}, "other id": {"transactional_id": "unknown"}, "acks": {"acks": 2},
    }  # fmt: skip
    other = others.get(fault, {})
    for fields in FAULTY.values():
        produce(of_producer(1, *ahead, **fields), version, **other)
    for sequence in (-1, 6):
        produce(of_producer(sequence, *ahead), version, **other)
    whole = of_producer(1, *ahead)
    for odd in (Each(each[:-1] for each in whole), Each(each * 2 for each in whole), Each((b"", b""))):
        produce(odd, version, **other)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("version", "transaction_version"), [(1, None), (2, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("epochs", [(-2, -1, -1, -2, 0, -1), (5, 5, -1, 4, 5)])
def test_the_epoch_of_a_coordinator_falls(
    brokers: Brokers,
    topic_in_both: NewTopic,
    is_open: bool,
    version: int,
    transaction_version: int | None,
    epochs: tuple[int, ...],
) -> None:
    topic = topic_in_both()
    clients = Clients(brokers)
    clients.init()
    if is_open:
        clients.add(topic, 3)
        identities = zip(clients.producer_id, clients.epoch)
        opening = Each(batch(attributes=16, producer=(producer_id, epoch, 0)) for producer_id, epoch in identities)
        data = [{"name": topic, "partition_data": [{"index": 0, "records": opening}]}]
        clients.ask("produce", 9, acks=-1, timeout=5000, transactional_id=clients.id, topic_data=data)
    brokers.ignored |= {"last_timestamp"}
    marker = {
        **clients.identity(1 if transaction_version == 2 else 0),
        "transaction_result": False,
        "topics": [{"name": topic, "partition_indexes": [0]}],
    }
    if transaction_version is not None:
        marker["transaction_version"] = transaction_version
    for epoch in epochs:
        brokers.same("write_txn_markers", version, markers=[{**marker, "coordinator_epoch": epoch}])
        brokers.same("describe_producers", 0, topics=[{"name": topic, "partition_indexes": [0]}])
