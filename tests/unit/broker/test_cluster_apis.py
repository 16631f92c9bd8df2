"""ApiVersions, DescribeCluster, FindCoordinator, InitProducerId: small handlers, each in every version."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest

from tests.unit.broker.metadata_services import context, encoded
from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.cluster import api_versions, describe_cluster, find_coordinator
from tidelog.broker.apis.records import init_producer_id
from tidelog.protocol.api import SERVED
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.describe_cluster import DescribeClusterRequest
from tidelog.protocol.messages.find_coordinator import FindCoordinatorRequest
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest


def software(name="librdkafka", version="2.15.0-rc1"):
    return ApiVersionsRequest(client_software_name=name, client_software_version=version)


@pytest.mark.parametrize("version", ApiVersionsRequest.VERSIONS)
async def test_versions_are_what_is_served(services, version):
    request = software() if version >= 3 else ApiVersionsRequest()
    response = encoded(api_versions.handle(services, context(version), request), version)
    assert {one.api_key: (one.min_version, one.max_version) for one in response.api_keys} == {
        key: (versions[0], versions[-1]) for key, versions in SERVED.items()
    }
    if version >= 3:
        # Before version 4 a feature that starts at level 0 cannot be told.
        supported = [
            ("metadata.version", 7, 30),
            ("eligible.leader.replicas.version", 0, 1),
            ("transaction.version", 0, 2),
            ("kraft.version", 0, 1),
        ]
        assert [(f.name, f.min_version, f.max_version) for f in response.supported_features] == (
            supported if version >= 4 else supported[:1]
        )
        assert {f.name: f.max_version_level for f in response.finalized_features} == {
            "metadata.version": 30,
            "eligible.leader.replicas.version": 1,
            "transaction.version": 2,
        }
        assert response.finalized_features_epoch == services.image().offset


async def test_features_that_are_not_served_are_not_finalized(services):
    services.image().features["group.version"] = 1
    response = api_versions.handle(services, context(4), software())
    assert "group.version" not in [f.name for f in response.finalized_features]


@pytest.mark.parametrize(("name", "version"), [("", "1"), ("x y", "1"), ("x", "-1"), ("x", "")])
async def test_software_without_a_proper_name_is_refused(services, name, version):
    with pytest.raises(KafkaError) as caught:
        api_versions.handle(services, context(3), software(name, version))
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert api_versions.refuse(None, caught.value, 3).api_keys == []


def test_an_unknown_version_is_answered_in_version_0_with_our_own():
    response = encoded(api_versions.refuse(None, KafkaError(ErrorCode.UNSUPPORTED_VERSION), 0), 0)
    assert response.error_code == 35
    assert [(one.api_key, one.min_version, one.max_version) for one in response.api_keys] == [(18, 0, 4)]


@pytest.mark.parametrize("version", DescribeClusterRequest.VERSIONS)
async def test_the_cluster_is_described(services, version):
    request = DescribeClusterRequest(include_cluster_authorized_operations=True)
    response = encoded(describe_cluster.handle(services, context(version), request), version)
    assert (response.cluster_id, response.controller_id) == (services.cluster_id, 1)
    assert [(broker.broker_id, broker.host, broker.port) for broker in response.brokers] == [(1, "host", 9001)]
    assert response.cluster_authorized_operations == authorized_operations.CLUSTER


@pytest.mark.parametrize(
    ("endpoint", "code"), [(2, ErrorCode.MISMATCHED_ENDPOINT_TYPE), (3, ErrorCode.UNSUPPORTED_ENDPOINT_TYPE)]
)
async def test_controllers_are_not_described_by_a_broker(services, endpoint, code):
    request = DescribeClusterRequest(endpoint_type=endpoint)
    with pytest.raises(KafkaError) as caught:
        describe_cluster.handle(services, context(1), request)
    assert caught.value.code is code
    assert encoded(describe_cluster.refuse(request, caught.value, 1), 1).error_code == code


async def find(services, version, keys=("g",), kind=0):
    request = (
        FindCoordinatorRequest(coordinator_keys=list(keys), key_type=kind)
        if version >= 4
        else FindCoordinatorRequest(key=keys[0], key_type=kind)
    )
    answer = find_coordinator.handle(services, context(version), request)
    response = encoded(await answer if inspect.iscoroutine(answer) else answer, version)
    return response.coordinators if version >= 4 else [response]


@pytest.mark.parametrize("version", FindCoordinatorRequest.VERSIONS)
async def test_the_offsets_topic_is_created_on_the_way_to_the_coordinator(services, version):
    for _ in range(2):
        (found,) = await find(services, version)
        assert (found.error_code, found.node_id, found.host, found.port) == (0, 1, "host", 9001)
    topic = services.image().topics_by_name["__consumer_offsets"]
    assert len(topic.partitions) == 5
    assert services.image().topic_config(topic.name) == {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "segment.bytes": "104857600",
    }


@pytest.mark.parametrize("version", [4, 5, 6])
async def test_many_groups_at_once(services, version):
    assert [found.key for found in await find(services, version, ["a", "b", "c"])] == ["a", "b", "c"]


@pytest.mark.parametrize("version", range(1, 7))
async def test_the_topic_of_transactions_is_created_on_the_way_to_their_coordinator(services, version):
    for _ in range(2):
        (found,) = await find(services, version, kind=1)
        assert (found.error_code, found.node_id, found.host, found.port) == (0, 1, "host", 9001)
    (topic,) = services.image().topics_by_name.values()
    assert (topic.name, len(topic.partitions)) == ("__transaction_state", 50)
    assert services.image().topic_config(topic.name) == {
        "cleanup.policy": "compact",
        "compression.type": "uncompressed",
        "min.insync.replicas": "1",
        "segment.bytes": "104857600",
        "unclean.leader.election.enable": "false",
    }


@pytest.mark.parametrize("version", range(1, 7))
async def test_other_coordinators_are_not_there(services, version):
    (found,) = await find(services, version, kind=9)
    assert (found.error_code, found.node_id, found.port) == (ErrorCode.INVALID_REQUEST, -1, -1)
    assert not services.image().topics_by_name


async def test_without_its_partition_there_is_no_coordinator(services):
    services.groups.partition_for = lambda group: 77
    (found,) = await find(services, 6)
    assert found.error_code == ErrorCode.COORDINATOR_NOT_AVAILABLE


@pytest.mark.parametrize("version", FindCoordinatorRequest.VERSIONS)
def test_a_refusal_names_every_key(version):
    error = KafkaError(ErrorCode.GROUP_AUTHORIZATION_FAILED)
    request = FindCoordinatorRequest(coordinator_keys=["a", "b"]) if version >= 4 else FindCoordinatorRequest(key="a")
    response = encoded(find_coordinator.refuse(request, error, version), version)
    codes = [one.error_code for one in response.coordinators] if version >= 4 else [response.error_code]
    assert codes == [error.code] * (2 if version >= 4 else 1)


@pytest.mark.parametrize("version", InitProducerIdRequest.VERSIONS)
async def test_every_producer_gets_its_own_id(services, version):
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1000)
    answers = await asyncio.gather(*(init_producer_id.handle(services, context(version), request) for _ in range(2500)))
    ids = [encoded(answer, version).producer_id for answer in answers]
    assert sorted(ids) == list(range(2500))
    assert services.image().next_producer_id == 3000


async def test_an_id_a_producer_had_is_not_kept_without_a_transaction(services):
    request = InitProducerIdRequest(
        transactional_id=None, transaction_timeout_ms=1000, producer_id=700, producer_epoch=4
    )
    answer: Any = await init_producer_id.handle(services, context(5), request)
    assert (answer.producer_id, answer.producer_epoch) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"producer_id": 5}, ErrorCode.INVALID_REQUEST),
        ({"producer_epoch": 5}, ErrorCode.INVALID_REQUEST),
    ],
)
async def test_what_cannot_be_had_is_refused(services, fields, code):
    fields = {"transactional_id": None, "producer_epoch": -1, "producer_id": -1} | fields
    request = InitProducerIdRequest(transaction_timeout_ms=1000, **fields)
    with pytest.raises(KafkaError) as caught:
        await init_producer_id.handle(services, context(5), request)
    assert caught.value.code is code
    refused = encoded(init_producer_id.refuse(request, caught.value, 5), 5)
    assert (refused.error_code, refused.producer_id) == (code, -1)
