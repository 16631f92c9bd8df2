"""aiokafka for the client matrix: its loop runs in a thread, the adapter's methods wait for what they start there."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import aiokafka
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.assignors.range import RangePartitionAssignor
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.errors import for_code
from aiokafka.structs import TopicPartition

from tests.compatibility.clients.speaking import Offsets, headers_in, record_out, serve, to_bytes

STRATEGIES = {"range": RangePartitionAssignor, "roundrobin": RoundRobinPartitionAssignor}
WAIT_S = 60.0


class Member:
    """A consumer in a group, polled by a task."""

    def __init__(self, consumer: Any) -> None:
        self.consumer = consumer
        self.got: list[tuple[int, int]] = []
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        await self.consumer.start()
        try:
            while True:
                for records in (await self.consumer.getmany(timeout_ms=100)).values():
                    self.got += [(record.partition, record.offset) for record in records]
        finally:
            await self.consumer.stop()


def succeeded(answers: list[Any]) -> None:
    """Raise the first error of responses about configs; all have (error code, message, ...) per resource."""
    for answer in answers:
        for code, message, *_ in answer.resources:
            if code:
                raise for_code(code)(message)


class Adapter:
    def __init__(self, bootstrap: str) -> None:
        self.common = {"bootstrap_servers": bootstrap.split(","), "client_id": "aiokafka"}
        self.members: dict[str, Member] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.admin = self.wait(self._admin())

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S + 10)

    async def _admin(self) -> Any:
        admin = AIOKafkaAdminClient(**self.common)
        await admin.start()
        return admin

    def version(self) -> str:
        return str(aiokafka.__version__)

    # -- records -----------------------------------------------------------------------------------------------------

    def produce(self, topic: str, codec: str, records: list[dict[str, Any]], acks: str, idempotent: bool) -> list[int]:
        return list(self.wait(self._produce(topic, codec, records, acks, idempotent)))

    async def _produce(self, topic: str, codec: str, records: list[Any], acks: str, idempotent: bool) -> list[int]:
        producer = aiokafka.AIOKafkaProducer(
            **self.common,
            compression_type=None if codec == "none" else codec,
            acks="all" if acks == "all" else int(acks),
            enable_idempotence=idempotent,
        )
        await producer.start()
        try:
            sent = [
                await producer.send(
                    topic,
                    to_bytes(record["value"]),
                    to_bytes(record["key"]),
                    partition=record["partition"],
                    timestamp_ms=record["timestamp"],
                    headers=headers_in(record),
                )
                for record in records
            ]
            # With acks=0 there is nobody to tell the offset.
            return [getattr(await one, "offset", -1) for one in sent]
        finally:
            await producer.stop()

    def _consumer(self, *topics: str, **more: Any) -> Any:
        settings = {"enable_auto_commit": False, "auto_offset_reset": "earliest", **self.common, **more}
        return aiokafka.AIOKafkaConsumer(*topics, **settings)

    def read(self, topic: str, partitions: int, count: int) -> list[dict[str, Any]]:
        return list(self.wait(self._read(topic, partitions, count)))

    async def _read(self, topic: str, partitions: int, count: int) -> list[dict[str, Any]]:
        consumer = self._consumer()
        consumer.assign([TopicPartition(topic, index) for index in range(partitions)])
        await consumer.start()
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + WAIT_S
        try:
            while len(found) < count and time.monotonic() < deadline:
                for records in (await consumer.getmany(timeout_ms=100, max_records=count - len(found))).values():
                    for one in records:
                        what = (one.timestamp, one.key, one.value, list(one.headers))
                        found.append(record_out(one.partition, one.offset, *what))
        finally:
            await consumer.stop()
        return found

    # -- groups ------------------------------------------------------------------------------------------------------

    def join(self, member: str, group: str, topic: str, strategy: str) -> None:
        async def join() -> Member:
            return Member(
                self._consumer(
                    topic,  # not by `subscribe` later, which is for the loop's own thread
                    group_id=group,
                    session_timeout_ms=10_000,
                    heartbeat_interval_ms=200,
                    partition_assignment_strategy=[STRATEGIES[strategy]],
                )
            )

        self.members[member] = self.wait(join())

    def member(self, member: str) -> dict[str, Any]:
        one = self.members[member]
        return {"assigned": sorted(found.partition for found in one.consumer.assignment()), "got": one.got}

    def leave(self, member: str) -> None:
        async def leave(one: Member) -> None:
            one.task.cancel()
            await asyncio.wait([one.task])

        self.wait(leave(self.members.pop(member)))

    def commit(self, group: str, topic: str, offsets: dict[str, int]) -> None:
        async def commit() -> None:
            consumer = self._consumer(group_id=group)
            wanted = {TopicPartition(topic, int(index)): offset for index, offset in offsets.items()}
            consumer.assign(list(wanted))
            await consumer.start()
            try:
                await consumer.commit(wanted)
            finally:
                await consumer.stop()

        self.wait(commit())

    def committed(self, group: str, topic: str, partitions: int) -> Offsets:
        async def committed() -> Offsets:
            consumer = self._consumer(group_id=group)
            consumer.assign([TopicPartition(topic, index) for index in range(partitions)])
            await consumer.start()
            try:
                found = {index: await consumer.committed(TopicPartition(topic, index)) for index in range(partitions)}
            finally:
                await consumer.stop()
            return {index: -1 if offset is None else offset for index, offset in found.items()}

        return dict(self.wait(committed()))

    # -- administration ----------------------------------------------------------------------------------------------

    def create_topic(self, topic: str, partitions: int, replicas: int, configs: dict[str, str]) -> None:
        answer = self.wait(self.admin.create_topics([NewTopic(topic, partitions, replicas, topic_configs=configs)]))
        self._no_topic_error(answer.topic_errors)

    def delete_topic(self, topic: str) -> None:
        self._no_topic_error(self.wait(self.admin.delete_topics([topic])).topic_error_codes)

    def _no_topic_error(self, errors: list[Any]) -> None:
        for topic, code, *message in errors:
            if code:
                raise for_code(code)(topic, *message)

    def topics(self) -> list[str]:
        return sorted(self.wait(self.admin.list_topics()))

    def partitions(self, topic: str) -> int:
        (found,) = self.wait(self.admin.describe_topics([topic]))
        return len(found["partitions"])

    def add_partitions(self, topic: str, total: int) -> None:
        self.wait(self.admin.create_partitions({topic: NewPartitions(total)}))

    def config(self, topic: str, name: str) -> str:
        answers = self.wait(self.admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)]))
        succeeded(answers)
        ((*_, entries),) = answers[0].resources
        return str({entry[0]: entry[1] for entry in entries}[name])

    def set_config(self, topic: str, name: str, value: str) -> None:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {name: value})
        succeeded(self.wait(self.admin.alter_configs([resource])))

    def brokers(self) -> int:
        return len(self.wait(self.admin.describe_cluster())["brokers"])

    def start_offset(self, topic: str) -> int:
        async def start() -> int:
            consumer = self._consumer()
            await consumer.start()
            try:
                partition = TopicPartition(topic, 0)
                return int((await consumer.beginning_offsets([partition]))[partition])
            finally:
                await consumer.stop()

        return int(self.wait(start()))

    def end_offset(self, topic: str) -> int:
        async def end() -> int:
            consumer = self._consumer()
            await consumer.start()
            try:
                partition = TopicPartition(topic, 0)
                return int((await consumer.end_offsets([partition]))[partition])
            finally:
                await consumer.stop()

        return int(self.wait(end()))

    def delete_records(self, topic: str, before: int) -> None:
        self.wait(self.admin.delete_records({TopicPartition(topic, 0): RecordsToDelete(before)}))

    def groups(self) -> list[str]:
        return sorted(group for group, *_ in self.wait(self.admin.list_consumer_groups()))

    def group(self, group: str) -> dict[str, Any]:
        (answer,) = self.wait(self.admin.describe_consumer_groups([group]))
        ((code, _, state, _, _, members, *_),) = answer.groups
        if code:
            raise for_code(code)(group)
        return {"state": state, "members": len(members)}

    def group_offsets(self, group: str) -> dict[str, Offsets]:
        offsets: dict[str, Offsets] = {}
        for partition, found in self.wait(self.admin.list_consumer_group_offsets(group)).items():
            offsets.setdefault(partition.topic, {})[partition.partition] = found.offset
        return offsets


if __name__ == "__main__":
    serve(Adapter(sys.argv[1]))
