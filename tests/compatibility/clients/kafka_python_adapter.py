"""kafka-python for the client matrix."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import kafka
from kafka.admin import (
    ConfigFilterType,
    ConfigResource,
    ConfigResourceType,
    KafkaAdminClient,
    NewPartitions,
    NewTopic,
    OffsetSpec,
)
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from kafka.structs import OffsetAndMetadata, TopicPartition

from tests.compatibility.clients.speaking import Offsets, headers_in, record_out, serve, to_bytes

STRATEGIES = {
    "range": RangePartitionAssignor,
    "roundrobin": RoundRobinPartitionAssignor,
    "cooperative": CooperativeStickyAssignor,
}
WAIT_S = 60.0


class Member:
    """A consumer in a group, polled by a thread of its own."""

    def __init__(self, consumer: Any, topic: str) -> None:
        self.consumer = consumer
        self.got: list[tuple[int, int]] = []
        self.assigned: list[int] = []
        self._ending = threading.Event()
        consumer.subscribe([topic])
        # Else it joins before it knows the partitions, and again when it does; and if the time of a poll is over in the
        # middle of that, 3.0.12 forgets that it was joining and stays without partitions for ever.
        deadline = time.monotonic() + WAIT_S
        while not consumer.partitions_for_topic(topic) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            for records in self.consumer.poll(timeout_ms=100).values():
                self.got += [(record.partition, record.offset) for record in records]
            self.assigned = sorted(one.partition for one in self.consumer.assignment())
        self.consumer.close(autocommit=False)

    def leave(self) -> None:
        self._ending.set()
        self._thread.join(WAIT_S)


class Adapter:
    def __init__(self, bootstrap: str) -> None:
        self.common = {"bootstrap_servers": bootstrap.split(","), "client_id": "kafka-python"}
        self.admin = KafkaAdminClient(**self.common)
        self.members: dict[str, Member] = {}

    def version(self) -> str:
        return str(kafka.__version__)

    def produce(self, topic: str, codec: str, records: list[dict[str, Any]], acks: str, idempotent: bool) -> list[int]:
        producer = kafka.KafkaProducer(
            **self.common,
            compression_type=None if codec == "none" else codec,
            acks="all" if acks == "all" else int(acks),
            enable_idempotence=idempotent,
            linger_ms=1,
        )
        try:
            sent = [
                producer.send(
                    topic,
                    to_bytes(record["value"]),
                    to_bytes(record["key"]),
                    headers=headers_in(record),
                    partition=record["partition"],
                    timestamp_ms=record["timestamp"],
                )
                for record in records
            ]
            return [one.get(timeout=WAIT_S).offset for one in sent]
        finally:
            producer.close()

    def _consumer(self, **more: Any) -> Any:
        return kafka.KafkaConsumer(**self.common, enable_auto_commit=False, auto_offset_reset="earliest", **more)

    def read(self, topic: str, partitions: int, count: int) -> list[dict[str, Any]]:
        consumer = self._consumer()
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + WAIT_S
        try:
            consumer.assign([TopicPartition(topic, index) for index in range(partitions)])
            consumer.seek_to_beginning()
            while len(found) < count and time.monotonic() < deadline:
                for records in consumer.poll(timeout_ms=100, max_records=count - len(found)).values():
                    for one in records:
                        what = (one.timestamp, one.key, one.value, list(one.headers))
                        found.append(record_out(one.partition, one.offset, *what))
        finally:
            consumer.close()
        return found

    # -- groups ------------------------------------------------------------------------------------------------------

    def join(self, member: str, group: str, topic: str, strategy: str) -> None:
        consumer = self._consumer(
            group_id=group,
            session_timeout_ms=10_000,
            heartbeat_interval_ms=200,
            partition_assignment_strategy=[STRATEGIES[strategy]],
        )
        self.members[member] = Member(consumer, topic)

    def member(self, member: str) -> dict[str, Any]:
        one = self.members[member]
        return {"assigned": one.assigned, "got": one.got}

    def leave(self, member: str) -> None:
        self.members.pop(member).leave()

    def commit(self, group: str, topic: str, offsets: dict[str, int]) -> None:
        consumer = self._consumer(group_id=group)
        try:
            wanted = {TopicPartition(topic, int(index)): offset for index, offset in offsets.items()}
            consumer.assign(list(wanted))
            consumer.commit({partition: OffsetAndMetadata(offset, "", -1) for partition, offset in wanted.items()})
        finally:
            consumer.close(autocommit=False)

    def committed(self, group: str, topic: str, partitions: int) -> Offsets:
        consumer = self._consumer(group_id=group)
        try:
            found = {index: consumer.committed(TopicPartition(topic, index)) for index in range(partitions)}
            return {index: -1 if offset is None else offset for index, offset in found.items()}
        finally:
            consumer.close(autocommit=False)

    # -- administration ----------------------------------------------------------------------------------------------

    def create_topic(self, topic: str, partitions: int, replicas: int, configs: dict[str, str]) -> None:
        self.admin.create_topics([NewTopic(topic, partitions, replicas, topic_configs=configs)])

    def topics(self) -> list[str]:
        return sorted(self.admin.list_topics())

    def partitions(self, topic: str) -> int:
        (found,) = self.admin.describe_topics([topic])
        return len(found["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        self.admin.create_partitions({topic: NewPartitions(total)})

    def delete_topic(self, topic: str) -> None:
        self.admin.delete_topics([topic])

    def config(self, topic: str, name: str) -> str:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic)
        found = self.admin.describe_configs([resource], config_filter=ConfigFilterType.ALL)
        return str(found["topic"][topic][name]["value"])

    def set_config(self, topic: str, name: str, value: str) -> None:
        done = self.admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})])
        assert done["topic"][topic] == "OK", done

    def brokers(self) -> int:
        return len(self.admin.describe_cluster()["brokers"])

    def end_offset(self, topic: str) -> int:
        return self._offset(topic, OffsetSpec.LATEST)

    def start_offset(self, topic: str) -> int:
        return self._offset(topic, OffsetSpec.EARLIEST)

    def _offset(self, topic: str, which: Any) -> int:
        partition = TopicPartition(topic, 0)
        return int(self.admin.list_partition_offsets({partition: which})[partition].offset)

    def delete_records(self, topic: str, before: int) -> None:
        self.admin.delete_records({TopicPartition(topic, 0): before})

    def groups(self) -> list[str]:
        return sorted(one["group_id"] for one in self.admin.list_groups())

    def group(self, group: str) -> dict[str, Any]:
        found = self.admin.describe_groups([group])[group]
        return {"state": found["group_state"], "members": len(found["members"])}

    def group_offsets(self, group: str) -> dict[str, Offsets]:
        offsets: dict[str, Offsets] = {}
        for partition, found in self.admin.list_group_offsets(group)[group].items():
            offsets.setdefault(partition.topic, {})[partition.partition] = found.offset
        return offsets

    def set_group_offset(self, group: str, topic: str, offset: int) -> None:
        self.admin.alter_group_offsets(group, {TopicPartition(topic, 0): OffsetAndMetadata(offset, "", -1)})

    def delete_group(self, group: str) -> None:
        assert self.admin.delete_groups([group]) == {group: "OK"}


if __name__ == "__main__":
    serve(Adapter(sys.argv[1]))
