"""DescribeCluster (key 60, versions 0-2): the cluster's id and controller, and its brokers.

On a controller's listener the answer has the controllers instead, for clients that bootstrap there (KIP-919). Each kind
of listener answers only for its own kind of nodes.
"""

from __future__ import annotations

from tidelog.broker.apis import authorized_operations
from tidelog.broker.apis.cluster_roles import at_controller, quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import cluster_controller, reachable_brokers
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)
from tidelog.replication.controller.metadata.image import MetadataImage

REQUEST = DescribeClusterRequest

BROKERS = 1
CONTROLLERS = 2
ENDPOINT_TYPE_FROM = 1
FENCED_FROM = 2
_ENDPOINT_NAMES = {BROKERS: "BROKER", CONTROLLERS: "CONTROLLER"}


def handle(services: Services, context: RequestContext, request: DescribeClusterRequest) -> DescribeClusterResponse:
    here = CONTROLLERS if at_controller(services, context) else BROKERS
    if request.endpoint_type != here:
        raise _wrong_endpoint(here, request.endpoint_type)
    image = services.image()
    if here == BROKERS:
        nodes = _brokers(image, context, request)
        controller_id = cluster_controller(image, services.node_id, services.quorum_leader_id())
    else:
        nodes = _controllers(image, context.listener_name)
        leader_id = quorum(services).leader_id
        controller_id = leader_id if any(node.broker_id == leader_id for node in nodes) else -1
    asks_operations = request.include_cluster_authorized_operations
    return DescribeClusterResponse(
        endpoint_type=here,
        cluster_id=services.cluster_id,
        controller_id=controller_id,
        brokers=nodes,
        cluster_authorized_operations=authorized_operations.CLUSTER
        if asks_operations
        else authorized_operations.NOT_ASKED,
    )


def _wrong_endpoint(here: int, requested: int) -> KafkaError:
    requested_name = _ENDPOINT_NAMES.get(requested)
    if requested_name is None:
        return KafkaError(ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {requested}")
    return KafkaError(
        ErrorCode.MISMATCHED_ENDPOINT_TYPE,
        f"The request was sent to an endpoint of type {_ENDPOINT_NAMES[here]}, "
        f"but we wanted an endpoint of type {requested_name}",
    )


def _brokers(
    image: MetadataImage, context: RequestContext, request: DescribeClusterRequest
) -> list[DescribeClusterBroker]:
    return [
        DescribeClusterBroker(
            broker_id=broker.node_id,
            host=endpoint.host,
            port=endpoint.port,
            rack=broker.rack,
            is_fenced=broker.fenced and context.api_version >= FENCED_FROM,
        )
        for broker, endpoint in reachable_brokers(
            image, context.listener_name, include_fenced=request.include_fenced_brokers
        )
    ]


def _controllers(image: MetadataImage, listener_name: str) -> list[DescribeClusterBroker]:
    return [
        DescribeClusterBroker(broker_id=node_id, host=endpoint.host, port=endpoint.port)
        for node_id, controller in sorted(image.controllers.items())
        if (endpoint := controller.endpoints.get(listener_name)) is not None
    ]


def refuse(request: DescribeClusterRequest, error: KafkaError, version: int) -> DescribeClusterResponse:
    code = error.code
    if version < ENDPOINT_TYPE_FROM and code in (
        ErrorCode.MISMATCHED_ENDPOINT_TYPE,
        ErrorCode.UNSUPPORTED_ENDPOINT_TYPE,
    ):
        code = ErrorCode.INVALID_REQUEST  # clients of version 0 do not know the newer codes
    return DescribeClusterResponse(error_code=code, error_message=error.message)
