"""`default_api_timeout_ms` limits a call of the admin client as a whole."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import HANDLERS, FakeCluster, FakeNode
from tests.unit.client.test_admin import FAST, T0
from tests.unit.client.test_admin_groups import describe_classic, describe_newer
from tidelog.cli.main import main
from tidelog.client import Admin, BrokerErrors, NewTopic, PartitionErrors, TopicPartition
from tidelog.client.model import Replica
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import (
    alter_replica_log_dirs,
    delete_groups,
    describe_configs,
    describe_log_dirs,
    incremental_alter_configs,
)
from tidelog.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from tidelog.protocol.messages.create_topics import CreateTopicsRequest
from tidelog.protocol.messages.delete_records import (
    DeleteRecordsPartitionResult,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest
from tidelog.protocol.messages.list_offsets import ListOffsetsRequest
from tidelog.protocol.messages.metadata import MetadataRequest
from tidelog.protocol.messages.offset_fetch import OffsetFetchRequest

LIMIT_MS = 600
STEP_S = 0.4


def admin(cluster: FakeCluster, request_timeout_ms: int = 500) -> Admin:
    limits = {"default_api_timeout_ms": LIMIT_MS, "request_timeout_ms": request_timeout_ms}
    return Admin(bootstrap_servers=cluster.bootstrap, **limits, **FAST)


async def late(request: Any, node: FakeNode) -> Any:
    await asyncio.sleep(STEP_S)
    return HANDLERS[request.API_KEY][2](node, request)


async def test_the_steps_of_a_call_share_its_limit():
    async with FakeCluster(t=1) as cluster, admin(cluster) as administrator:
        cluster.script(OffsetFetchRequest, late)
        assert await administrator.group_lag("g", [T0])  # one late step is in time
        cluster.script(OffsetFetchRequest, late)
        cluster.script(ListOffsetsRequest, late)
        with pytest.raises(KafkaError, match=f"default_api_timeout_ms={LIMIT_MS}") as caught:
            await administrator.group_lag("g", [T0])
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


async def test_a_group_of_either_protocol_is_looked_for_within_one_limit(monkeypatch: pytest.MonkeyPatch):
    """Its two protocols have a request each."""
    monkeypatch.setitem(HANDLERS, 15, (DescribeGroupsRequest, DescribeGroupsResponse, describe_classic))
    monkeypatch.setitem(HANDLERS, 69, (ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse, describe_newer))
    async with FakeCluster() as cluster, admin(cluster) as administrator:
        cluster.script(DescribeGroupsRequest, late)
        assert await administrator.describe_groups(["newer"])
        cluster.script(DescribeGroupsRequest, late)
        cluster.script(ConsumerGroupDescribeRequest, late)
        with pytest.raises(KafkaError, match=f"default_api_timeout_ms={LIMIT_MS}") as caught:
            await administrator.describe_groups(["newer"])
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


async def test_offsets_of_a_missing_topic_are_not_for_want_of_a_leader():
    missing = TopicPartition("missing", 0)
    async with FakeCluster(t=1) as cluster, admin(cluster) as administrator:
        with pytest.raises(PartitionErrors, match="UNKNOWN_TOPIC_OR_PARTITION: topic 'missing'") as caught:
            await administrator.list_offsets({T0: "latest", missing: "latest"})
        assert set(caught.value.answers) == {T0}


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.describe_producers([TopicPartition("missing", 0)]),
        lambda it: it.delete_records({TopicPartition("missing", 0): 1}),
        lambda it: it.abort_transaction(TopicPartition("missing", 0), 1, 0, 0),
    ],
)
async def test_a_call_that_waits_for_a_missing_topic_in_vain_names_the_topic(call: Callable[[Admin], Awaitable[Any]]):
    async with FakeCluster(t=1) as cluster, admin(cluster) as administrator:
        with pytest.raises(KafkaError, match="topic 'missing' did not come into the metadata") as caught:
            await call(administrator)
        assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_missing_topic_holds_back_no_other():
    missing = TopicPartition("missing", 0)
    async with FakeCluster(t=1) as cluster, admin(cluster) as administrator:
        with pytest.raises(PartitionErrors, match="topic 'missing' did not come into the metadata") as caught:
            await administrator.describe_producers([missing, T0])
        assert set(caught.value.answers) == {T0}
        assert {partition: error.code for partition, error in caught.value.errors.items()} == {
            missing: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        }


async def test_a_change_without_an_answer_may_be_under_way():
    async with FakeCluster(t=1) as cluster, admin(cluster, request_timeout_ms=30_000) as administrator:
        cluster.script(CreateTopicsRequest, later)
        with pytest.raises(KafkaError, match=f"default_api_timeout_ms={LIMIT_MS}: it may be under way"):
            await administrator.create_topics([NewTopic("u")])


async def test_a_command_says_how_it_waits_longer(capfd: pytest.CaptureFixture[str]):
    async with FakeCluster(t=1) as cluster:
        cluster.script(CreateTopicsRequest, later)
        words = ["topics", "create", "u", "-b", cluster.bootstrap, "-X", f"default.api.timeout.ms={LIMIT_MS}"]
        assert await asyncio.to_thread(main, words) == 1
        assert capfd.readouterr().err == (
            f"tidelog: REQUEST_TIMED_OUT: no answer within default_api_timeout_ms={LIMIT_MS}: it may be under way "
            "(-X default.api.timeout.ms=60000 waits longer)\n"
        )


async def later(request: Any, node: FakeNode) -> Any:
    await asyncio.sleep(LIMIT_MS / 1000)
    return await late(request, node)


async def test_producers_are_fenced_at_the_same_time_within_one_limit():
    lookups: list[int] = []

    async with FakeCluster() as cluster, admin(cluster) as administrator:

        async def note(request: Any, node: FakeNode) -> Any:
            lookups.append(len(cluster.sent(FindCoordinatorRequest)))
            return node.on_init_producer_id(request)

        cluster.script(InitProducerIdRequest, note)
        results = await administrator.fence_producers(["a", "b"])
        assert [type(result) for result in results.values()] == [tuple, tuple]
        assert list(results) == ["a", "b"]
        assert lookups == [2], "the second one waited for the first"


async def test_records_are_deleted_once_where_another_partition_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    """Up to the end (-1) means another end each time: records that came since are not to be deleted."""
    asked: list[list[int]] = []

    def answer(request: DeleteRecordsRequest, node: FakeNode) -> DeleteRecordsResponse:
        numbers = [each.partition_index for each in request.topics[0].partitions]
        asked.append(numbers)
        code = ErrorCode.KAFKA_STORAGE_ERROR if 1 in numbers and len(asked) < 3 else ErrorCode.NONE
        results = [
            DeleteRecordsPartitionResult(partition_index=each, low_watermark=7, error_code=code if each == 1 else 0)
            for each in sorted(numbers, reverse=True)
        ]
        return DeleteRecordsResponse(topics=[DeleteRecordsTopicResult(name="t", partitions=results)])

    monkeypatch.setitem(HANDLERS, 21, (DeleteRecordsRequest, DeleteRecordsResponse, None))
    async with FakeCluster(t=3) as cluster, admin(cluster) as administrator:
        cluster.script(DeleteRecordsRequest, *[answer] * 9)
        everything = {TopicPartition("t", number): -1 for number in range(3)}
        assert await administrator.delete_records(everything) == dict.fromkeys(everything, 7)
    assert sorted(number for numbers in asked for number in numbers if number != 1) == [0, 2]


@pytest.mark.parametrize("is_refused", [False, True])
async def test_the_other_leaders_answer_where_one_is_silent(monkeypatch: pytest.MonkeyPatch, is_refused: bool):
    """They were asked one after the other, and nothing said what they had done."""

    async def answer(request: DeleteRecordsRequest, node: FakeNode) -> DeleteRecordsResponse:
        if node.node_id == 1 and not is_refused:
            await asyncio.sleep(2 * LIMIT_MS / 1000)
        code = ErrorCode.OFFSET_OUT_OF_RANGE if node.node_id == 1 else ErrorCode.NONE
        (topic,) = request.topics
        (asked,) = topic.partitions
        result = DeleteRecordsPartitionResult(partition_index=asked.partition_index, low_watermark=7, error_code=code)
        return DeleteRecordsResponse(topics=[DeleteRecordsTopicResult(name="t", partitions=[result])])

    monkeypatch.setitem(HANDLERS, 21, (DeleteRecordsRequest, DeleteRecordsResponse, None))
    async with FakeCluster(nodes=3, t=3) as cluster, admin(cluster, 10_000) as administrator:
        cluster.script(DeleteRecordsRequest, *[answer] * 9)
        async with asyncio.timeout(LIMIT_MS / 1000):
            with pytest.raises(PartitionErrors) as caught:
                await administrator.delete_records({TopicPartition("t", number): -1 for number in range(3)})
    error = copy.copy(caught.value)  # as pickle does it
    assert error.code is (ErrorCode.OFFSET_OUT_OF_RANGE if is_refused else ErrorCode.REQUEST_TIMED_OUT)
    assert error.answers == {TopicPartition("t", 1): 7, TopicPartition("t", 2): 7}
    assert {each: problem.code for each, problem in error.errors.items()} == {T0: error.code}
    assert "t-0" in str(error.errors[T0])


async def test_one_request_asks_for_the_metadata_of_all_topics(monkeypatch: pytest.MonkeyPatch):
    def answer(request: DeleteRecordsRequest, node: FakeNode) -> DeleteRecordsResponse:
        result = DeleteRecordsPartitionResult(partition_index=0, low_watermark=7)
        return DeleteRecordsResponse(
            topics=[DeleteRecordsTopicResult(name=each.name, partitions=[result]) for each in request.topics]
        )

    monkeypatch.setitem(HANDLERS, 21, (DeleteRecordsRequest, DeleteRecordsResponse, None))
    names = [f"t{number}" for number in range(9)]
    async with FakeCluster(**dict.fromkeys(names, 1)) as cluster, admin(cluster, 10_000) as administrator:
        cluster.script(DeleteRecordsRequest, answer)
        asked_before = len(cluster.sent(MetadataRequest))
        await administrator.delete_records({TopicPartition(name, 0): -1 for name in names})
        assert len(cluster.sent(MetadataRequest)) <= asked_before + 2


@pytest.mark.parametrize("number", [0, 3])
async def test_what_concerns_no_leader_is_no_error_of_partitions(monkeypatch: pytest.MonkeyPatch, number: int):
    async def never(_: DeleteRecordsRequest, __: FakeNode) -> DeleteRecordsResponse:
        await asyncio.sleep(2 * LIMIT_MS / 1000)
        return DeleteRecordsResponse()

    monkeypatch.setitem(HANDLERS, 21, (DeleteRecordsRequest, DeleteRecordsResponse, None))
    async with FakeCluster(t=3) as cluster, admin(cluster, 10_000) as administrator:
        cluster.script(DeleteRecordsRequest, never)
        with pytest.raises(KafkaError) as caught:
            await administrator.delete_records({TopicPartition("t", 1): 1, TopicPartition("t", number): 1})
    assert type(caught.value) is KafkaError
    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if number == 3 else ErrorCode.REQUEST_TIMED_OUT
    assert caught.value.code is code


async def test_a_partition_whose_leader_moved_is_asked_again_where_another_is_refused(monkeypatch: pytest.MonkeyPatch):
    asked: list[list[int]] = []

    def answer(request: DeleteRecordsRequest, node: FakeNode) -> DeleteRecordsResponse:
        numbers = [each.partition_index for each in request.topics[0].partitions]
        asked.append(numbers)
        codes = {0: ErrorCode.OFFSET_OUT_OF_RANGE, 1: ErrorCode.NOT_LEADER_OR_FOLLOWER if len(asked) < 3 else 0}
        results = [
            DeleteRecordsPartitionResult(partition_index=each, low_watermark=7, error_code=codes.get(each, 0))
            for each in numbers
        ]
        return DeleteRecordsResponse(topics=[DeleteRecordsTopicResult(name="t", partitions=results)])

    monkeypatch.setitem(HANDLERS, 21, (DeleteRecordsRequest, DeleteRecordsResponse, None))
    async with FakeCluster(t=3) as cluster, admin(cluster, 10_000) as administrator:
        cluster.script(DeleteRecordsRequest, *[answer] * 9)
        with pytest.raises(PartitionErrors) as caught:
            await administrator.delete_records({TopicPartition("t", number): -1 for number in range(3)})
    assert asked == [[0, 1, 2], [1], [1]]
    assert caught.value.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert caught.value.answers == {TopicPartition("t", 1): 7, TopicPartition("t", 2): 7}
    assert set(caught.value.errors) == {T0}


def respond(request: Any) -> Any:
    """As a broker that carries out each request."""
    if isinstance(request, incremental_alter_configs.IncrementalAlterConfigsRequest):
        changed = [
            incremental_alter_configs.AlterConfigsResourceResponse(
                resource_type=each.resource_type, resource_name=each.resource_name
            )
            for each in request.resources
        ]
        return incremental_alter_configs.IncrementalAlterConfigsResponse(responses=changed)
    if isinstance(request, describe_configs.DescribeConfigsRequest):
        results = [
            describe_configs.DescribeConfigsResult(resource_type=each.resource_type, resource_name=each.resource_name)
            for each in request.resources
        ]
        return describe_configs.DescribeConfigsResponse(results=results)
    if isinstance(request, describe_log_dirs.DescribeLogDirsRequest):
        entries = [describe_log_dirs.DescribeLogDirsPartition(partition_index=0)]
        topics = [describe_log_dirs.DescribeLogDirsTopic(name="t", partitions=entries)]
        directory = describe_log_dirs.DescribeLogDirsResult(log_dir="/d", topics=topics)
        return describe_log_dirs.DescribeLogDirsResponse(results=[directory])
    if isinstance(request, alter_replica_log_dirs.AlterReplicaLogDirsRequest):
        moved = [alter_replica_log_dirs.AlterReplicaLogDirPartitionResult(partition_index=0)]
        result = alter_replica_log_dirs.AlterReplicaLogDirTopicResult(topic_name="t", partitions=moved)
        return alter_replica_log_dirs.AlterReplicaLogDirsResponse(results=[result])
    assert isinstance(request, delete_groups.DeleteGroupsRequest)
    deleted = [delete_groups.DeletableGroupResult(group_id=each) for each in request.groups_names]
    return delete_groups.DeleteGroupsResponse(results=deleted)


BROKERS = (1, 2, 3)
KEY: dict[str, str | None] = {"background.threads": "4"}
MOVED = {Replica("t", 0, broker): "/d" for broker in BROKERS}


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (incremental_alter_configs, lambda admin: admin.incremental_alter_configs(brokers=dict.fromkeys(BROKERS, KEY))),
        (describe_configs, lambda admin: admin.describe_configs(brokers=BROKERS)),
        (describe_log_dirs, lambda admin: admin.describe_log_dirs(BROKERS)),
        (describe_log_dirs, lambda admin: admin.describe_replica_log_dirs(MOVED)),
        (alter_replica_log_dirs, lambda admin: admin.alter_replica_log_dirs(MOVED)),
    ],
    ids=["alter-configs", "describe-configs", "log-dirs", "replica-log-dirs", "moves"],
)
async def test_the_other_brokers_are_asked_where_one_is_silent(
    monkeypatch: pytest.MonkeyPatch, module: Any, call: Callable[[Admin], Awaitable[Any]]
):
    """They were asked one after the other: those behind it were not, and nothing said what the others had done."""
    name = "".join(word.capitalize() for word in module.__name__.rpartition(".")[2].split("_"))
    request, response = getattr(module, f"{name}Request"), getattr(module, f"{name}Response")
    asked: set[int] = set()

    async def answer(asking: Any, node: FakeNode) -> Any:
        asked.add(node.node_id)
        if node.node_id == 2:
            await asyncio.sleep(2 * LIMIT_MS / 1000)
        return respond(asking)

    monkeypatch.setitem(HANDLERS, request.API_KEY, (request, response, None))
    async with FakeCluster(nodes=3, t=3) as cluster, admin(cluster, 10_000) as administrator:
        cluster.script(request, *[answer] * 9)
        if module is alter_replica_log_dirs:
            outcome = await call(administrator)
            assert [each.broker_id for each, error in outcome.items() if error is None] == [1, 3]
            assert outcome[Replica("t", 0, 2)].code is ErrorCode.REQUEST_TIMED_OUT
        else:
            with pytest.raises(BrokerErrors) as caught:
                await call(administrator)
            assert set(caught.value.errors) == {2}
            assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
            assert {getattr(each, "broker_id", each) for each in caught.value.answers} == {1, 3}
    assert asked == {1, 2, 3}


@pytest.mark.parametrize("is_silent", [True, False])
async def test_groups_are_deleted_where_the_coordinator_of_one_fails(monkeypatch: pytest.MonkeyPatch, is_silent: bool):
    async def answer(asking: Any, node: FakeNode) -> Any:
        if node.node_id == 2:
            await asyncio.sleep(2 * LIMIT_MS / 1000)
        return respond(asking)

    def find(asking: FindCoordinatorRequest, node: FakeNode) -> Any:
        (key,) = asking.coordinator_keys
        found: Any = node.on_find_coordinator(asking)
        for each in found.coordinators:
            if key == "lost" and is_silent:
                each.node_id, each.port = 2, cluster.nodes[2].port
            elif key == "lost":
                each.error_code, each.node_id = ErrorCode.COORDINATOR_NOT_AVAILABLE, -1
        return found

    request: Any = delete_groups.DeleteGroupsRequest
    monkeypatch.setitem(HANDLERS, 42, (request, delete_groups.DeleteGroupsResponse, None))
    async with FakeCluster(nodes=2) as cluster, admin(cluster, 10_000) as administrator:
        cluster.script(request, *[answer] * 9)
        cluster.script(FindCoordinatorRequest, *[find] * 999)
        outcome = await administrator.delete_groups(["lost", "a", "b"])
    failure = outcome.pop("lost")
    assert outcome == {"a": None, "b": None}
    assert failure is not None
    assert "group 'lost'" in str(failure)
    code = ErrorCode.REQUEST_TIMED_OUT if is_silent else ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert failure.code is code


async def test_a_topic_that_no_call_names_any_more_is_forgotten():
    """With one deleted the client asked for the metadata of all that it ever named, each second of its life."""
    async with FakeCluster(t=1, u=1) as cluster, Admin(bootstrap_servers=cluster.bootstrap, **FAST) as administrator:
        await administrator.list_offsets({T0: "latest", TopicPartition("u", 0): "latest"})
        inner = administrator._cluster
        assert inner is not None
        inner._topics = dict.fromkeys(inner._topics, -math.inf)
        # The first wait may be for the end of a refresh that began before, with both topics.
        for _ in range(2):
            assert await inner.wait_for_metadata(PATIENCE_S * 1000)
        assert [topic.name for topic in cluster.sent(MetadataRequest)[-1].topics or ()] == []
        assert await administrator.list_offsets({T0: "latest"})
