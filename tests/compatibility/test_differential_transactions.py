"""Requests to the transaction coordinators of both brokers, at every version, and what their operators see."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.compatibility.side_by_side import Brokers, Each, _of

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
