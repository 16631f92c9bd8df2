"""librdkafka (confluent-kafka) with its own defaults, but for what would measure its waits: larger queues, no pause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tidelog.bench.raw import BenchError


def new_producer(bootstrap_servers: str, failures: list[Any], acks: str = "all") -> Any:
    """A confluent_kafka.Producer. Errors of records that it cannot deliver are added to `failures`."""
    from confluent_kafka import Producer

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failures.append(error)

    return Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "acks": acks,
            "log_level": 0,
            "queue.buffering.max.messages": 1_000_000,
            "delivery.report.only.error": True,
            "on_delivery": delivered,
        }
    )


def deliver_all(producers: Iterable[Any], failures: Sequence[Any], timeout_s: float) -> None:
    """Wait until every record is acknowledged, so long for each producer. Raises BenchError where one is not."""
    left = sum(producer.flush(timeout_s) for producer in producers)
    if left or failures:
        raise BenchError(f"{left} records not sent, {len(failures)} failed: {failures[:1]}")


def new_consumer(bootstrap_servers: str, topic: str, partitions: int, **settings: str | int) -> Any:
    """A confluent_kafka.Consumer without a group that reads every partition from its beginning."""
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            # Its default of a second after a full queue would measure sleep.
            "fetch.queue.backoff.ms": 5,
            "log_level": 0,
            **settings,
        }
    )
    consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(partitions)])
    return consumer
