"""A consumer process for `endurance`: it reads along, and checks that each record comes once and in order.

`python -m tidelog.bench.studies.reader BOOTSTRAP TOPIC PARTITIONS` prints one line of JSON every `SAMPLE_S` seconds:
the records read, how many of them came again, and the ranges of numbers that were passed over. Number N stands in
partition N modulo PARTITIONS. The process ends on SIGTERM. It exits with 1 and a line on standard error when a
partition can no longer be read.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
import time
from dataclasses import dataclass, field

HEAD = struct.Struct(">qq")
"""The beginning of a record: its number, and the monotonic nanoseconds at which it was due."""
SAMPLE_S = 0.5
_MISSING_RANGES_MAX = 1000


@dataclass(slots=True)
class Order:
    """What has come of the numbered records, each partition in order."""

    partitions: int
    records: int = 0
    doubled: int = 0
    missing: list[tuple[int, int]] = field(default_factory=list)
    """(first, last) of the numbers of one partition that were passed over; at most `_MISSING_RANGES_MAX` are kept."""
    missing_count: int = 0
    _next: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._next = list(range(self.partitions))

    def add(self, number: int) -> None:
        partition = number % self.partitions
        expected = self._next[partition]
        if number < expected:
            self.doubled += 1
            return
        if number > expected:
            self.missing_count += (number - expected) // self.partitions
            if len(self.missing) < _MISSING_RANGES_MAX:
                self.missing.append((expected, number - self.partitions))
        self.records += 1
        self._next[partition] = number + self.partitions


def main(bootstrap: str, topic: str, partitions: int) -> int:
    from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, TopicPartition

    is_ending = False

    def end(signal_number: int, frame: object) -> None:
        nonlocal is_ending
        is_ending = True

    signal.signal(signal.SIGTERM, end)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "reconnect.backoff.max.ms": 1000,
            "log_level": 0,
        }
    )
    order = Order(partitions)
    try:
        consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(partitions)])
        next_s = time.monotonic()
        while not is_ending:
            for message in consumer.consume(5000, 0.1):
                error = message.error()
                if error is None:
                    order.add(HEAD.unpack_from(message.value() or b"")[0])
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                    print(f"{topic}-{message.partition()}: {error.str()}", file=sys.stderr)
                    return 1
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + SAMPLE_S
                sample = {"records": order.records, "doubled": order.doubled, "missing": order.missing,
                          "missing_count": order.missing_count}  # fmt: skip
                print(json.dumps(sample), flush=True)
    finally:
        consumer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
