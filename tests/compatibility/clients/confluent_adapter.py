"""confluent-kafka (librdkafka) for the client matrix."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import confluent_kafka
import confluent_kafka.admin

from tests.compatibility.clients.speaking import Offsets, headers_in, record_out, serve, to_bytes

# Its types say that every field of a message may be missing, and its admin module exports nothing.
confluent: Any = confluent_kafka
admin: Any = confluent_kafka.admin
STRATEGIES = {"range": "range", "roundrobin": "roundrobin", "cooperative": "cooperative-sticky"}
WAIT_S = 60.0


class Member:
    """A consumer in a group, polled by a thread of its own."""

    def __init__(self, settings: dict[str, Any], topic: str) -> None:
        self.consumer = confluent.Consumer(settings)
        self.got: list[tuple[int, int]] = []
        self.assigned: list[int] = []
        self._ending = threading.Event()
        self.consumer.subscribe([topic])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            for message in self.consumer.consume(100, 0.1):
                if message.error() is None:
                    self.got.append((message.partition(), message.offset()))
            self.assigned = sorted(one.partition for one in self.consumer.assignment())
        self.consumer.close()

    def leave(self) -> None:
        self._ending.set()
        self._thread.join(WAIT_S)


class Adapter:
    def __init__(self, bootstrap: str) -> None:
        self.common = {"bootstrap.servers": bootstrap, "client.id": "confluent-kafka", "log_level": 0}
        self.admin = admin.AdminClient(self.common)
        self.members: dict[str, Member] = {}

    def version(self) -> str:
        return f"{confluent.version()} (librdkafka {confluent.libversion()[0]})"

    def produce(self, topic: str, codec: str, records: list[dict[str, Any]], acks: str, idempotent: bool) -> list[int]:
        producer = confluent.Producer(
            {**self.common, "compression.type": codec, "acks": acks, "enable.idempotence": idempotent, "linger.ms": 1}
        )
        sent: list[Any] = []
        for record in records:
            producer.produce(
                topic,
                to_bytes(record["value"]),
                to_bytes(record["key"]),
                partition=record["partition"],
                headers=headers_in(record) or None,
                timestamp=record["timestamp"],
                on_delivery=lambda error, message: sent.append(error or message),
            )
        assert producer.flush(WAIT_S) == 0, "not all was acknowledged"
        assert not [one for one in sent if isinstance(one, confluent.KafkaError)], sent
        return [message.offset() for message in sent]

    def read(self, topic: str, partitions: int, count: int) -> list[dict[str, Any]]:
        settings = {"group.id": "unused", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = confluent.Consumer({**self.common, **settings})
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + WAIT_S
        try:
            consumer.assign([confluent.TopicPartition(topic, index, 0) for index in range(partitions)])
            while len(found) < count and time.monotonic() < deadline:
                for one in consumer.consume(count - len(found), 0.1):
                    assert one.error() is None, one.error()
                    what = (one.timestamp()[1], one.key(), one.value(), one.headers() or [])
                    found.append(record_out(one.partition(), one.offset(), *what))
        finally:
            consumer.close()
        return found

    # -- groups ------------------------------------------------------------------------------------------------------

    def join(self, member: str, group: str, topic: str, strategy: str) -> None:
        settings = {
            **self.common,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 200,
            "partition.assignment.strategy": STRATEGIES[strategy],
        }
        self.members[member] = Member(settings, topic)

    def member(self, member: str) -> dict[str, Any]:
        one = self.members[member]
        return {"assigned": one.assigned, "got": one.got}

    def leave(self, member: str) -> None:
        self.members.pop(member).leave()

    def commit(self, group: str, topic: str, offsets: dict[str, int]) -> None:
        consumer = confluent.Consumer({**self.common, "group.id": group, "enable.auto.commit": False})
        try:
            wanted = [confluent.TopicPartition(topic, int(index), offset) for index, offset in offsets.items()]
            done = consumer.commit(offsets=wanted, asynchronous=False)
            assert all(one.error is None for one in done), done
        finally:
            consumer.close()

    def committed(self, group: str, topic: str, partitions: int) -> Offsets:
        consumer = confluent.Consumer({**self.common, "group.id": group, "enable.auto.commit": False})
        try:
            wanted = [confluent.TopicPartition(topic, index) for index in range(partitions)]
            return {one.partition: max(one.offset, -1) for one in consumer.committed(wanted, timeout=WAIT_S)}
        finally:
            consumer.close()

    # -- administration ----------------------------------------------------------------------------------------------

    def create_topic(self, topic: str, partitions: int, replicas: int, configs: dict[str, str]) -> None:
        self.admin.create_topics([admin.NewTopic(topic, partitions, replicas, config=configs)])[topic].result(WAIT_S)

    def topics(self) -> list[str]:
        return sorted(self.admin.list_topics(timeout=WAIT_S).topics)

    def partitions(self, topic: str) -> int:
        wanted = confluent.TopicCollection([topic])
        return len(self.admin.describe_topics(wanted)[topic].result(WAIT_S).partitions)

    def add_partitions(self, topic: str, total: int) -> None:
        self.admin.create_partitions([admin.NewPartitions(topic, total)])[topic].result(WAIT_S)

    def delete_topic(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(WAIT_S)

    def config(self, topic: str, name: str) -> str:
        resource = admin.ConfigResource(admin.ResourceType.TOPIC, topic)
        found = self.admin.describe_configs([resource])[resource].result(WAIT_S)
        value = found[name].value
        assert isinstance(value, str)
        return value

    def set_config(self, topic: str, name: str, value: str) -> None:
        entry = admin.ConfigEntry(name, value, incremental_operation=admin.AlterConfigOpType.SET)
        resource = admin.ConfigResource(admin.ResourceType.TOPIC, topic, incremental_configs=[entry])
        self.admin.incremental_alter_configs([resource])[resource].result(WAIT_S)

    def brokers(self) -> int:
        return len(self.admin.describe_cluster().result(WAIT_S).nodes)

    def end_offset(self, topic: str) -> int:
        partition = confluent.TopicPartition(topic, 0)
        offset = self.admin.list_offsets({partition: admin.OffsetSpec.latest()})[partition].result(WAIT_S).offset
        assert isinstance(offset, int)
        return offset

    def delete_records(self, topic: str, before: int) -> None:
        partition = confluent.TopicPartition(topic, 0, before)
        for done in self.admin.delete_records([partition]).values():
            done.result(WAIT_S)

    def start_offset(self, topic: str) -> int:
        partition = confluent.TopicPartition(topic, 0)
        offset = self.admin.list_offsets({partition: admin.OffsetSpec.earliest()})[partition].result(WAIT_S).offset
        assert isinstance(offset, int)
        return offset

    def groups(self) -> list[str]:
        return sorted(one.group_id for one in self.admin.list_consumer_groups().result(WAIT_S).valid)

    def group(self, group: str) -> dict[str, Any]:
        found = self.admin.describe_consumer_groups([group])[group].result(WAIT_S)
        return {"state": found.state.name, "members": len(found.members)}

    def group_offsets(self, group: str) -> dict[str, Offsets]:
        asked = confluent.ConsumerGroupTopicPartitions(group)
        found = self.admin.list_consumer_group_offsets([asked])[group].result(WAIT_S)
        offsets: dict[str, Offsets] = {}
        for one in found.topic_partitions:
            offsets.setdefault(one.topic, {})[one.partition] = one.offset
        return offsets

    def set_group_offset(self, group: str, topic: str, offset: int) -> None:
        wanted = confluent.ConsumerGroupTopicPartitions(group, [confluent.TopicPartition(topic, 0, offset)])
        self.admin.alter_consumer_group_offsets([wanted])[group].result(WAIT_S)

    def delete_group(self, group: str) -> None:
        self.admin.delete_consumer_groups([group])[group].result(WAIT_S)


if __name__ == "__main__":
    serve(Adapter(sys.argv[1]))
