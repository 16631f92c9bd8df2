"""What a test expects of a broker: records in a topic, a group that has read them.

Each helper waits until the broker shows it, and fails with an AssertionError that says what it shows
instead. They block: a test that runs an event loop calls them with `asyncio.to_thread`. They work on
any Kafka.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from tidelog.client.model import ConsumerRecord, TopicPartition
from tidelog.client.sync import Admin, Consumer
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.headers import RequestHeader
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic, MetadataResponse

Result = TypeVar("Result")

TIMEOUT_S = 30.0
_POLL_MS = 100
_POLL_S = 0.02
_PROBE_S = 2.0
_CONNECTION_SETUP_MS_MAX = 10_000
_METADATA_VERSION = 4


class HasBootstrapServers(Protocol):
    """A broker or a cluster of this package."""

    @property
    def bootstrap_servers(self) -> str: ...


Broker = str | HasBootstrapServers
"""A broker, a cluster, or their `bootstrap_servers`."""


def produced(
    broker: Broker,
    topic: str,
    count: int = 1,
    *,
    matching: Callable[[ConsumerRecord], bool] | None = None,
    isolation_level: str = "read_committed",
    timeout_s: float = TIMEOUT_S,
) -> list[ConsumerRecord]:
    """The records of a topic, in the order of each partition, as soon as there are `count` of them.

    Only records for which `matching` is true count and are returned. Reads from the log start, as
    no group. AssertionError after `timeout_s`, which says how many records there are. `count=0` reads
    what is there now: `assert not produced(broker, "errors", 0)`.
    """
    deadline_s = time.monotonic() + timeout_s

    def read() -> list[ConsumerRecord]:
        return _produced(broker, topic, count, matching, isolation_level, timeout_s, deadline_s)

    return _until(deadline_s, f"topic {topic!r} was not read in {timeout_s} s", read)


def _produced(
    broker: Broker,
    topic: str,
    count: int,
    matching: Callable[[ConsumerRecord], bool] | None,
    isolation_level: str,
    timeout_s: float,
    deadline_s: float,
) -> list[ConsumerRecord]:
    matches = matching or (lambda record: True)
    matching_records: list[ConsumerRecord] = []
    options: dict[str, Any] = {
        "auto_offset_reset": "earliest",
        "isolation_level": isolation_level,
        "allow_auto_create_topics": False,
        "default_api_timeout_ms": max(int(timeout_s * 1000), 1),
        **_connection_options(broker, deadline_s),
    }
    with Consumer(**options) as consumer:
        partitions = _partitions(consumer, topic, deadline_s)
        consumer.assign(partitions)
        while True:
            # What the topic has now is read to its end before it is counted.
            unread = f"topic {topic!r} was not read to its end in {timeout_s} s"
            try:
                ends = consumer.end_offsets(partitions)
            except KafkaError as error:
                _check(time.monotonic() < deadline_s, f"{unread}: {error}")
                time.sleep(_POLL_S)
                continue
            while any(consumer.position(partition) < end for partition, end in ends.items()):
                for records in consumer.poll(_POLL_MS).values():
                    matching_records += filter(matches, records)
                _check(time.monotonic() < deadline_s, unread)
            if len(matching_records) >= count:
                return matching_records
            kind = "matching records" if matching is not None else "records"
            _check(
                time.monotonic() < deadline_s,
                f"topic {topic!r} has {len(matching_records)} {kind} of {count} after {timeout_s} s",
            )
            time.sleep(_POLL_S)


def wait_for_lag(
    broker: Broker, group: str, lag: int = 0, *, topics: str | Iterable[str] | None = None, timeout_s: float = TIMEOUT_S
) -> None:
    """Wait until a group has committed to within `lag` records of the end of its topics.

    `topics`: these topics alone, or this one, count; without them the partitions for which the group has committed.
    AssertionError after `timeout_s`, with the lag of each partition.
    """
    deadline_s = time.monotonic() + timeout_s
    named = {topics} if isinstance(topics, str) else set(topics) if topics is not None else None
    late = f"group {group!r} is not within {lag} records of the end after {timeout_s} s"
    _until(deadline_s, late, lambda: _await_lag(broker, group, lag, named, deadline_s, late))


def _await_lag(broker: Broker, group: str, lag: int, named: set[str] | None, deadline_s: float, late: str) -> None:
    with Admin(**_connection_options(broker, deadline_s)) as admin:
        while True:
            shown = ""
            try:
                partitions = _topic_partitions(admin, named)
                # Without a committed offset every record of the partition is unread.
                lags = {
                    partition: each.log_end_offset if each.committed is None else each.lag
                    for partition, each in admin.group_lag(group, partitions).items()
                }
                if lags and all(each is not None and each <= lag for each in lags.values()):
                    return
                shown = ", ".join(f"{each.topic}-{each.partition}: {lags[each]}" for each in sorted(lags))
            except KafkaError as error:
                shown = str(error)
            _check(time.monotonic() < deadline_s, f"{late}: {shown or 'no offsets'}")
            time.sleep(_POLL_S)


def wait_for_topic(broker: Broker, topic: str, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until every broker in `bootstrap_servers` knows a topic and the leader of each partition, which
    takes a moment after `create_topics` in a cluster. AssertionError after `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    for address in _bootstrap_servers(broker).split(","):
        while not _knows_topic(address, topic):
            _check(time.monotonic() < deadline_s, f"{address} does not know the topic {topic!r} after {timeout_s} s")
            time.sleep(_POLL_S)


def _knows_topic(address: str, topic: str) -> bool:
    """Whether this broker knows the leader of each partition of a topic; does not create the topic."""
    header = RequestHeader(request_api_key=3, request_api_version=_METADATA_VERSION, client_id="tidelog-testing")
    request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
    frame = header.encode(1) + request.encode(_METADATA_VERSION)
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _PROBE_S) as connection:
            connection.settimeout(_PROBE_S)
            connection.sendall(len(frame).to_bytes(4, "big") + frame)
            with connection.makefile("rb") as answer:
                size_bytes = int.from_bytes(answer.read(4), "big")
                body = answer.read(size_bytes)
    except OSError:
        return False
    if not size_bytes or len(body) < size_bytes:
        return False
    response = MetadataResponse.decode(body[4:], _METADATA_VERSION)
    return all(
        entry.error_code == 0 and entry.partitions and all(each.error_code == 0 for each in entry.partitions)
        for entry in response.topics
    )


def _topic_partitions(admin: Admin, topics: set[str] | None) -> list[TopicPartition] | None:
    if topics is None:
        return None
    return [
        TopicPartition(name, partition.partition)
        for name, topic in admin.describe_topics(topics).items()
        for partition in topic.partitions
    ]


def _partitions(consumer: Consumer, topic: str, deadline_s: float) -> list[TopicPartition]:
    """The partitions of a topic, once it exists."""
    while True:
        partitions = consumer.partitions_for_topic(topic)
        if partitions:
            return [TopicPartition(topic, partition) for partition in sorted(partitions)]
        _check(time.monotonic() < deadline_s, f"topic {topic!r} does not exist")
        time.sleep(_POLL_S)


def _until(deadline_s: float, late: str, work: Callable[[], Result]) -> Result:
    """Do this, again and again until the deadline while no broker can be reached."""
    while True:
        try:
            return work()
        except KafkaError as error:
            if not error.retriable:
                raise
            _check(time.monotonic() < deadline_s, f"{late}: {error}")
            time.sleep(_POLL_S)


def _connection_options(broker: Broker, deadline_s: float) -> dict[str, Any]:
    left_ms = int((deadline_s - time.monotonic()) * 1000)
    return {
        "bootstrap_servers": _bootstrap_servers(broker),
        "socket_connection_setup_timeout_ms": min(max(left_ms, 1), _CONNECTION_SETUP_MS_MAX),
    }


def _bootstrap_servers(broker: Broker) -> str:
    return broker if isinstance(broker, str) else broker.bootstrap_servers


def _check(is_so: bool, message: str) -> None:
    if not is_so:
        raise AssertionError(message)
