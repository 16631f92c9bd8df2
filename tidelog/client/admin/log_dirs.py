"""Admin calls about log directories: places of replicas, and moves within a broker.

Each broker answers for its own replicas. Invariant: results are returned by replica, because the
error of one broker does not concern the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidelog.client.admin.base import (
    WAIT_SHARE,
    AdminBase,
    Response,
    error_of,
    in_one_limit,
    outcomes_of,
    raise_broker_errors,
    raise_on_error,
)
from tidelog.client.arguments import as_broker_ids, as_list_of, as_mapping, as_replica, as_text, as_topic_names
from tidelog.client.model import LogDirDescription, Replica, ReplicaLogDirs, ReplicaSize, TopicPartition
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
    """The log directory calls of `Admin`."""

    @in_one_limit
    async def describe_log_dirs(
        self, broker_ids: Iterable[int], topics: Iterable[str] | None = None
    ) -> dict[int, list[LogDirDescription]]:
        """The log directories of these brokers and the replicas in them, of all topics or of
        `topics`.

        Raises the KafkaError of a broker that does not answer, BROKER_NOT_AVAILABLE where there is none;
        BrokerErrors, with the log directories of the others, where some have answered.
        """
        topic_names = None if topics is None else set(as_topic_names("topics", topics))
        requests = {
            broker_id: DescribeLogDirsRequest(topics=None) for broker_id in as_broker_ids("broker_ids", broker_ids)
        }
        answers, errors = await self._describe_log_dirs(requests)
        descriptions = {
            broker_id: [_to_description(directory, topic_names) for directory in answer.results]
            for broker_id, answer in answers.items()
        }
        raise_broker_errors(errors, descriptions)
        return descriptions

    @in_one_limit
    async def describe_replica_log_dirs(self, replicas: Iterable[Replica]) -> dict[Replica, ReplicaLogDirs]:
        """The current directory of each replica and the target of its move.

        Omits replicas not on their broker. Raises KafkaError; BrokerErrors, with the replicas of the other brokers,
        where some have failed.
        """
        by_broker: dict[int, dict[str, list[int]]] = {}
        for topic, number, broker_id in as_list_of("replicas", replicas, "Replicas", as_replica):
            by_broker.setdefault(broker_id, {}).setdefault(topic, []).append(number)
        requests = {
            broker_id: DescribeLogDirsRequest(
                topics=[DescribableLogDirTopic(topic=topic, partitions=numbers) for topic, numbers in topics.items()]
            )
            for broker_id, topics in by_broker.items()
        }
        log_dirs: dict[Replica, ReplicaLogDirs] = {}
        answers, errors = await self._describe_log_dirs(requests)
        for broker_id, response in answers.items():
            for directory in response.results:
                for dir_topic in directory.topics:
                    for entry in dir_topic.partitions:
                        replica = Replica(dir_topic.name, entry.partition_index, broker_id)
                        field = "future" if entry.is_future_key else "current"
                        previous = log_dirs.get(replica, ReplicaLogDirs())
                        log_dirs[replica] = previous._replace(**{field: directory.log_dir})
        raise_broker_errors(errors, log_dirs)
        return log_dirs

    async def _describe_log_dirs(
        self, requests: Mapping[int, DescribeLogDirsRequest]
    ) -> tuple[dict[int, DescribeLogDirsResponse], dict[int, KafkaError]]:
        deadline = self._deadline(WAIT_SHARE)

        async def ask(broker_id: int, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
            answer = await self._call_broker(broker_id, request, DescribeLogDirsResponse, deadline)
            raise_on_error(answer.error_code, None, f"log directories of broker {broker_id}")
            return answer

        return await outcomes_of({broker_id: ask(broker_id, request) for broker_id, request in requests.items()})

    @in_one_limit
    async def alter_replica_log_dirs(self, paths: Mapping[Replica, str]) -> dict[Replica, KafkaError | None]:
        """Move each replica to a directory of its broker.

        The result is None for a replica whose move has started or that is there already. Raises the KafkaError of a
        broker where none answers.
        """
        by_broker: dict[int, dict[str, dict[str, list[int]]]] = {}
        for replica, path in as_mapping("paths", paths, "paths by Replica").items():
            topic, number, broker_id = as_replica("a key of paths", replica)
            path = as_text(f"paths: {topic}-{number}", path)
            by_broker.setdefault(broker_id, {}).setdefault(path, {}).setdefault(topic, []).append(number)
        deadline = self._deadline(WAIT_SHARE)
        answers, errors = await outcomes_of(
            {
                broker_id: self._call_broker(broker_id, _moves(by_path), AlterReplicaLogDirsResponse, deadline)
                for broker_id, by_path in by_broker.items()
            }
        )
        if not answers:
            raise_broker_errors(errors, answers)
        results: dict[Replica, KafkaError | None] = {
            Replica(name, number, broker_id): error
            for broker_id, error in errors.items()
            for topics in by_broker[broker_id].values()
            for name, numbers in topics.items()
            for number in numbers
        }
        for broker_id, response in answers.items():
            for topic_result in response.results:
                for result in topic_result.partitions:
                    partition = TopicPartition(topic_result.topic_name, result.partition_index)
                    error = error_of(result.error_code, None, f"{partition} on broker {broker_id}")
                    results[Replica(*partition, broker_id)] = error
        return results

    async def _call_broker(self, broker_id: int, request: Message, answer: type[Response], deadline: float) -> Response:
        async def attempt() -> Response:
            connection = await self._connection_to(broker_id)
            return await connection.call(request, answer, self._config.request_timeout_ms)

        return await self._retry(attempt, deadline=deadline)


def _moves(by_path: Mapping[str, Mapping[str, list[int]]]) -> AlterReplicaLogDirsRequest:
    """The request to move replicas, numbers by topic and path."""
    return AlterReplicaLogDirsRequest(
        dirs=[
            AlterReplicaLogDir(
                path=path,
                topics=[AlterReplicaLogDirTopic(name=name, partitions=numbers) for name, numbers in topics.items()],
            )
            for path, topics in by_path.items()
        ]
    )


def _to_description(result: DescribeLogDirsResult, topics: set[str] | None) -> LogDirDescription:
    replicas = [
        ReplicaSize(topic.name, entry.partition_index, entry.partition_size, entry.offset_lag, entry.is_future_key)
        for topic in result.topics
        if topics is None or topic.name in topics
        for entry in topic.partitions
    ]
    return LogDirDescription(
        result.log_dir,
        error_of(result.error_code, None, result.log_dir),
        tuple(sorted(replicas)),
        result.total_bytes,
        result.usable_bytes,
        result.is_cordoned,
    )
