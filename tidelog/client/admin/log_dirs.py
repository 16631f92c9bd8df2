"""In which log directories replicas lie, and moving them between those of one broker.

Each broker answers for its own replicas. Invariant: answers per replica are given per replica, since what one broker
refuses says nothing of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidelog.client.admin.base import AdminBase, Response, check, refusal
from tidelog.client.model import LogDirDescription, Replica, ReplicaLogDirs, ReplicaSize, TopicPartition, as_names
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.alter_replica_log_dirs import (
    AlterReplicaLogDir,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopic,
)
from tidelog.protocol.messages.describe_log_dirs import (
    DescribableLogDirTopic,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
)


class LogDirsAdmin(AdminBase):
    """The part of `Admin` that is about log directories."""

    async def describe_log_dirs(
        self, broker_ids: Iterable[int], topics: Iterable[str] | None = None
    ) -> dict[int, list[LogDirDescription]]:
        """The log directories of these brokers with the replicas in them, of `topics` only where they are given.

        Raises KafkaError of a broker that does not answer.
        """
        wanted = None if topics is None else set(as_names(topics))
        described: dict[int, list[LogDirDescription]] = {}
        for broker_id in broker_ids:
            answer = await self._ask(broker_id, DescribeLogDirsRequest(topics=None), DescribeLogDirsResponse)
            check(answer.error_code, None, f"log directories of broker {broker_id}")
            described[broker_id] = [_described(each, wanted) for each in answer.results]
        return described

    async def describe_replica_log_dirs(self, replicas: Iterable[Replica]) -> dict[Replica, ReplicaLogDirs]:
        """Where each of them lies, and where it is on its way to; none that its broker does not have."""
        wanted: dict[int, dict[str, list[int]]] = {}
        for topic, partition, broker_id in replicas:
            wanted.setdefault(broker_id, {}).setdefault(topic, []).append(partition)
        found: dict[Replica, ReplicaLogDirs] = {}
        for broker_id, topics in wanted.items():
            request = DescribeLogDirsRequest(
                topics=[DescribableLogDirTopic(topic=topic, partitions=numbers) for topic, numbers in topics.items()]
            )
            answer = await self._ask(broker_id, request, DescribeLogDirsResponse)
            check(answer.error_code, None, f"log directories of broker {broker_id}")
            for result in answer.results:
                for told in result.topics:
                    for each in told.partitions:
                        replica = Replica(told.name, each.partition_index, broker_id)
                        known = found.get(replica, ReplicaLogDirs())
                        place = {"future" if each.is_future_key else "current": result.log_dir}
                        found[replica] = known._replace(**place)
        return found

    async def alter_replica_log_dirs(self, paths: Mapping[Replica, str]) -> dict[Replica, KafkaError | None]:
        """Have each replica lie in that directory of its broker. None: it is on its way, or there already."""
        wanted: dict[int, dict[str, dict[str, list[int]]]] = {}
        for (topic, partition, broker_id), path in paths.items():
            wanted.setdefault(broker_id, {}).setdefault(path, {}).setdefault(topic, []).append(partition)
        outcomes: dict[Replica, KafkaError | None] = {}
        for broker_id, by_path in wanted.items():
            request = AlterReplicaLogDirsRequest(
                dirs=[
                    AlterReplicaLogDir(
                        path=path,
                        topics=[AlterReplicaLogDirTopic(name=name, partitions=own) for name, own in topics.items()],
                    )
                    for path, topics in by_path.items()
                ]
            )
            answer = await self._ask(broker_id, request, AlterReplicaLogDirsResponse)
            for told in answer.results:
                for each in told.partitions:
                    place = TopicPartition(told.topic_name, each.partition_index)
                    error = refusal(each.error_code, None, f"{place} on broker {broker_id}")
                    outcomes[Replica(*place, broker_id)] = error
        return outcomes

    async def _ask(self, broker_id: int, request: Message, answer: type[Response]) -> Response:
        async def attempt() -> Response:
            connection = await (await self._reach()).connection(broker_id)
            return await connection.call(request, answer, self._config.request_timeout_ms)

        return await self._until(attempt)


def _described(result: DescribeLogDirsResult, topics: set[str] | None) -> LogDirDescription:
    replicas = [
        ReplicaSize(topic.name, each.partition_index, each.partition_size, each.offset_lag, each.is_future_key)
        for topic in result.topics
        if topics is None or topic.name in topics
        for each in topic.partitions
    ]
    return LogDirDescription(
        result.log_dir,
        refusal(result.error_code, None, result.log_dir),
        tuple(sorted(replicas)),
        result.total_bytes,
        result.usable_bytes,
        result.is_cordoned,
    )
