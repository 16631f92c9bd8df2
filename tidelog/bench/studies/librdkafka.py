"""Records in and out by librdkafka, as fast as it can, for the studies of cost."""

from __future__ import annotations

import time
from typing import Any

from tidelog.bench.raw import BenchError
from tidelog.bench.scenarios.base import Contestant
from tidelog.bench.stock_client import deliver_all, new_consumer, new_producer

_TIMEOUT_S = 120.0
_ITS_PARTITIONER = -1


def produce(
    contestant: Contestant,
    name: str,
    records: int,
    size_bytes: int,
    *,
    partitions: int | None = None,
    producers: int = 1,
    acks: str = "all",
    is_keyed: bool = False,
) -> None:
    """The records, from each producer in turn: into each of `partitions` in turn, or where its partitioner says.

    Raises BenchError when one is not acknowledged.
    """
    failures: list[Any] = []
    bootstrap = contestant.cluster.bootstrap_servers
    all_of_them = [new_producer(bootstrap, failures, acks) for _ in range(producers)]
    value = b"v" * size_bytes
    for number in range(records):
        producer = all_of_them[number % producers]
        partition = _ITS_PARTITIONER if partitions is None else number % partitions
        key = b"%08d" % number if is_keyed else None
        while True:
            try:
                producer.produce(name, value, key, partition)
                break
            except BufferError:
                producer.poll(0.05)
    deliver_all(all_of_them, failures, _TIMEOUT_S)


def consume(contestant: Contestant, name: str, partitions: int, records: int, *, consumers: int = 1) -> None:
    """So many consumers without a group, each reading all records, in turn.

    Raises BenchError when they do not come.
    """
    left: dict[Any, int] = {}
    try:
        for _ in range(consumers):
            consumer = new_consumer(
                contestant.cluster.bootstrap_servers, name, partitions, **{"queued.max.messages.kbytes": 4096}
            )
            left[consumer] = records
        deadline_s = time.monotonic() + _TIMEOUT_S
        while any(left.values()):
            for consumer in left:
                if left[consumer]:
                    left[consumer] -= len(consumer.consume(min(left[consumer], 10_000), 0.05))
            if time.monotonic() > deadline_s:
                raise BenchError(f"{sum(left.values()):,} records do not come")
    finally:
        for consumer in left:
            consumer.close()
