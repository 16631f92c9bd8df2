"""The clients of a damage case, each in a process of its own, because a broken answer can end a process of librdkafka.

    python -m tests.cluster.damage.client_process '{"role": "producer", ...}'

Orders come as lines on standard input, reports go as JSON lines to standard output; acknowledgements and records read
are appended to a file (`records.ACK`). The end of standard input ends the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import time
from typing import Any, BinaryIO

from tests.cluster.damage.records import ACK, TIMESTAMP_STEP_MS, number_of, value_of

IMPATIENT = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200, "log_level": 0}


class Orders:
    """Lines on standard input, taken without waiting."""

    def __init__(self) -> None:
        self._rest = b""
        os.set_blocking(0, False)

    def take(self) -> list[str]:
        if not select.select([0], [], [], 0)[0]:
            return []
        data = os.read(0, 65536)
        if not data:
            return ["end"]
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode() for line in lines]


def report(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class ProducerRole:
    """Numbered records to every partition in turn: a burst, then a steady rate; `settle` waits for all answers."""

    def __init__(self, plan: dict[str, Any]) -> None:
        import confluent_kafka

        self.plan, self.partitions = plan, int(plan["partitions"])
        self.acknowledgements: BinaryIO = open(plan["file"], "ab")  # noqa: SIM115
        self.numbers = [0] * self.partitions
        self.unanswered = 0
        self.last_answer = [0.0] * self.partitions
        self.stall_s = 0.0
        self.failures: list[str] = []
        self.began = time.monotonic()
        self.steady_since = 0.0
        self.sent_steadily = 0
        self.is_paused = self.settles = False
        self.error_type = confluent_kafka.KafkaException
        self.producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": plan["bootstrap"],
                "enable.idempotence": True,
                "compression.type": plan["compression"],
                "linger.ms": 4,
                "batch.num.messages": 20,
                "message.timeout.ms": 300_000,
                "retry.backoff.ms": 20,
                "error_cb": self._on_error,
                **IMPATIENT,
            }
        )

    def _on_error(self, error: Any) -> None:
        if error.fatal():
            self._fail(str(error))

    def _fail(self, message: str) -> None:
        if len(self.failures) < 20:
            self.failures.append(message)
            report(failed=message)

    def _send(self) -> None:
        partition = min(range(self.partitions), key=lambda one: self.numbers[one])
        number = self.numbers[partition]
        self.numbers[partition] = number + 1
        timestamp_ms = self.plan["base_timestamp_ms"] + TIMESTAMP_STEP_MS * number
        value = value_of(self.plan["seed"], partition, number)
        sent_at = time.monotonic()

        def answered(error: Any, message: Any) -> None:
            self.unanswered -= 1
            if error is not None:
                self._fail(f"record {number} of partition {partition}: {error}")
                return
            self.stall_s = max(self.stall_s, time.monotonic() - sent_at)
            self.acknowledgements.write(ACK.pack(partition, number, message.offset()))

        self.unanswered += 1
        self.producer.produce(
            self.plan["topic"], value, partition=partition, timestamp=timestamp_ms, on_delivery=answered
        )

    def _obey(self, order: str) -> bool:
        if order == "settle":
            self.is_paused = self.settles = True
        elif order == "go":
            self.is_paused, self.steady_since, self.sent_steadily = False, time.monotonic(), 0
        return order != "end"

    def _is_due(self) -> bool:
        if min(self.numbers) < self.plan["burst"]:
            return True
        if self.is_paused or self.unanswered > 5000:
            return False
        if not self.steady_since:
            self.steady_since = time.monotonic()
        return self.sent_steadily < (time.monotonic() - self.steady_since) * self.plan["rate"]

    def run(self) -> None:
        orders = Orders()
        while all(self._obey(order) for order in orders.take()):
            if self._is_due():
                self.sent_steadily += min(self.numbers) >= self.plan["burst"]
                try:
                    self._send()
                except (BufferError, self.error_type) as error:
                    self._fail(str(error))
                    self.is_paused = True
                self.producer.poll(0)
            else:
                self.producer.poll(0.005)
            self.acknowledgements.flush()
            if self.settles and not self.unanswered:
                self.settles = False
                report(settled=self.numbers, stall_s=round(self.stall_s, 2))


class ReaderRole:
    """Every partition from offset 0, every byte checked. With `ends` it is done when it has read up to them.

    Reports what it sees: `skipped` offsets, `wrong` records, each `error`.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.read_file: BinaryIO = open(plan["file"], "ab")  # noqa: SIM115
        self.positions: dict[int, int] = {int(one): 0 for one in plan["from"]}
        self.ends: dict[int, int] = {int(one): end for one, end in (plan.get("ends") or {}).items()}
        self.errors = 0
        self.committed: dict[int, int] = {}
        self.orders = Orders()

    def take(self, partition: int, offset: int, value: bytes | None) -> None:
        expected = self.positions[partition]
        if offset != expected:
            report(skipped=[partition, expected, offset], errors_before=self.errors)
        number = number_of(self.plan["seed"], partition, value)
        if number is None:
            report(wrong=[partition, offset])
        self.read_file.write(ACK.pack(partition, -1 if number is None else number, offset))
        self.positions[partition] = offset + 1

    def error(self, text: str) -> None:
        self.errors += 1
        if self.errors <= 30:
            report(error=text)

    @property
    def is_done(self) -> bool:
        return bool(self.ends) and all(self.positions[one] >= end for one, end in self.ends.items())

    def obey(self) -> bool:
        for order in self.orders.take():
            if order == "end":
                return False
            if order == "positions":
                self.read_file.flush()
                report(positions=self.positions, errors=self.errors, committed=self.committed)
        return not self.is_done

    def finish(self) -> None:
        self.read_file.close()
        report(positions=self.positions, errors=self.errors, committed=self.committed, done=self.is_done)


class ConfluentReader(ReaderRole):
    def run(self) -> None:
        import confluent_kafka as confluent

        consumer = confluent.Consumer(
            {
                "bootstrap.servers": self.plan["bootstrap"],
                "group.id": self.plan["group"],
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "check.crcs": True,
                "fetch.wait.max.ms": 100,
                "fetch.error.backoff.ms": 50,
                "error_cb": lambda error: None,
                "on_commit": self._committed,
                **IMPATIENT,
            }
        )
        topic = self.plan["topic"]
        consumer.assign([confluent.TopicPartition(topic, one, 0) for one in self.positions])
        committed_at = time.monotonic()
        while self.obey():
            for message in consumer.consume(500, 0.05):
                error = message.error()
                if error is None:
                    self.take(message.partition() or 0, message.offset() or 0, message.value())
                else:
                    self.error(f"{message.topic()} {message.partition()} {message.offset()}: {error}")
                    if error.code() == confluent.KafkaError._AUTO_OFFSET_RESET:
                        # librdkafka may take bytes behind a wrong CRC for a batch, and their offset for the next one.
                        one = message.partition() or 0
                        consumer.seek(confluent.TopicPartition(topic, one, self.positions[one]))
            if self.plan.get("commits") and time.monotonic() - committed_at > 0.3:
                committed_at = time.monotonic()
                where = [confluent.TopicPartition(topic, one, at) for one, at in self.positions.items() if at]
                if where:
                    consumer.commit(offsets=where, asynchronous=True)
        self.finish()
        if not self.plan.get("commits"):
            consumer.close()

    def _committed(self, error: Any, partitions: list[Any]) -> None:
        for one in partitions if error is None else ():
            if one.error is None:
                self.committed[one.partition] = one.offset


class OwnReader(ReaderRole):
    """Tidelog's own consumer."""

    def run(self) -> None:
        asyncio.run(self._read())
        self.finish()

    async def _read(self) -> None:
        from tidelog import Consumer
        from tidelog.client.model import TopicPartition
        from tidelog.protocol.errors import KafkaError

        options: dict[str, Any] = {"bootstrap_servers": self.plan["bootstrap"], "auto_offset_reset": "none"}
        async with Consumer(**options, request_timeout_ms=5_000) as consumer:
            consumer.assign([TopicPartition(self.plan["topic"], one) for one in self.positions])
            for one in self.positions:
                consumer.seek(TopicPartition(self.plan["topic"], one), 0)
            while self.obey():
                try:
                    polled = await consumer.poll(timeout_ms=50)
                except KafkaError as error:
                    self.error(str(error))
                    await asyncio.sleep(0.05)
                    continue
                for where, records in polled.items():
                    for record in records:
                        self.take(where.partition, record.offset, record.value)


ROLES: dict[str, Any] = {"producer": ProducerRole, "reader": ConfluentReader, "own_reader": OwnReader}


def main() -> None:
    plan = json.loads(sys.argv[1])
    ROLES[plan["role"]](plan).run()


if __name__ == "__main__":
    main()
