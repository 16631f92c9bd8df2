"""Static members (KIP-345) of stock clients, on Tidelog and on Kafka: who comes back in time disturbs nobody."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import Consumer

from tidelog.client import sync
from tidelog.client.groups.model import GroupDescription
from tidelog.testing.processes import ServerProcess

NewTopic = Callable[..., str]
pytestmark = pytest.mark.usefixtures("server")
WAIT_S = 90.0
QUIET_S = 1.0


class Member:
    """A librdkafka consumer that notes what happens to its partitions."""

    def __init__(self, server: ServerProcess, group: str, instance: str, topic: str, **options: Any) -> None:
        self.events: list[str] = []
        self.problems: list[int] = []
        self.consumer = Consumer(
            {
                "bootstrap.servers": server.bootstrap_servers,
                "group.id": group,
                "group.instance.id": instance,
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 300,
                "auto.offset.reset": "earliest",
                **{key.replace("_", "."): value for key, value in options.items()},
            }
        )
        self.consumer.subscribe(
            [topic],
            on_assign=lambda _, partitions: self.events.append(f"+{_numbers(partitions)}"),
            on_revoke=lambda _, partitions: self.events.append(f"-{_numbers(partitions)}"),
            on_lost=lambda _, partitions: self.events.append(f"lost {_numbers(partitions)}"),
        )

    @property
    def is_settled(self) -> bool:
        """Whether the last rebalance has come to its end here. Without new partitions its end is an empty "+"."""
        return self.events[-1:] != [] and self.events[-1].startswith("+")

    def owned(self) -> set[int]:
        return {partition.partition for partition in self.consumer.assignment()}


def _numbers(partitions: list[confluent_kafka.TopicPartition]) -> str:
    return ",".join(str(each.partition) for each in sorted(partitions, key=lambda part: part.partition))


def poll_until(condition: Callable[[], bool], *members: Member, wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, [member.events for member in members]
        for member in members:
            message = member.consumer.poll(0.05)
            if message is not None and (error := message.error()) is not None:
                member.problems.append(error.code())


def poll_until_quiet(condition: Callable[[], bool], *members: Member) -> None:
    """And nothing happens for QUIET_S: librdkafka joins again when it learns of a new topic's partitions late."""
    for _ in range(10):
        poll_until(condition, *members)
        before = [[*member.events] for member in members]
        quiet_at = time.monotonic() + QUIET_S
        poll_until(partial(_is_past, quiet_at), *members)
        if before == [member.events for member in members]:
            return
    raise AssertionError([member.events for member in members])


def _is_past(due: float) -> bool:
    return time.monotonic() >= due


def described(server: ServerProcess, group: str) -> GroupDescription:
    with sync.Admin(bootstrap_servers=server.bootstrap_servers) as admin:
        return admin.describe_groups([group])[group]


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
def test_a_restart_within_the_session_moves_nothing(server: ServerProcess, new_topic: NewTopic, strategy: str) -> None:
    topic, group = new_topic(4), f"static-{strategy}-{time.time_ns()}"

    def start(instance: str) -> Member:
        return Member(server, group, instance, topic, partition_assignment_strategy=strategy)

    first, second = start("one"), start("two")
    poll_until_quiet(
        lambda: (
            len(first.owned() | second.owned()) == 4
            and bool(first.owned() and second.owned())
            and first.is_settled
            and second.is_settled
        ),
        first,
        second,
    )
    owned = second.owned()
    before = {each.instance_id: each for each in described(server, group).members}
    first.events.clear()

    second.consumer.close()  # a static member says no farewell
    second = start("two")
    poll_until(lambda: bool(second.owned()), first, second)
    assert second.owned() == owned
    assert first.events == []
    after = {each.instance_id: each for each in described(server, group).members}
    assert after["one"] == before["one"]
    assert after["two"].assignment == before["two"].assignment
    assert after["two"].member_id != before["two"].member_id

    with sync.Admin(bootstrap_servers=server.bootstrap_servers) as admin:
        second.consumer.close()
        assert admin.remove_group_members(group, ["two"]) == {"two": None}
    poll_until(lambda: len(first.owned()) == 4, first)
    first.consumer.close()


def test_a_second_process_of_one_instance_fences_the_first(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(2), f"fenced-{time.time_ns()}"
    first = Member(server, group, "one", topic)
    poll_until(lambda: len(first.owned()) == 2, first)
    second = Member(server, group, "one", topic)
    poll_until(lambda: len(second.owned()) == 2, second)
    poll_until(lambda: confluent_kafka.KafkaError._FATAL in first.problems, first, second)
    assert second.problems == []
    assert [each.instance_id for each in described(server, group).members] == ["one"]
    first.consumer.close()
    second.consumer.close()


def test_a_static_member_that_stays_away_loses_its_place(server: ServerProcess, new_topic: NewTopic) -> None:
    topic, group = new_topic(2), f"away-{time.time_ns()}"
    first, second = Member(server, group, "one", topic), Member(server, group, "two", topic)
    poll_until(lambda: len(first.owned()) == len(second.owned()) == 1, first, second)
    gone = time.monotonic()
    second.consumer.close()
    poll_until(lambda: len(first.owned()) == 2, first)
    assert time.monotonic() - gone > 3, "its session has its time"
    assert [each.instance_id for each in described(server, group).members] == ["one"]
    first.consumer.close()
