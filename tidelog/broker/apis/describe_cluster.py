"""DescribeCluster (key 60, versions 0-2): the cluster's id, brokers and controller."""

from __future__ import annotations

from tidelog.broker import authorized_operations
from tidelog.broker.cluster_view import cluster_controller, reachable_brokers
from tidelog.broker.request import RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)

REQUEST = DescribeClusterRequest

BROKERS = 1
CONTROLLERS = 2
_ENDPOINT_NAMES = {BROKERS: "BROKER", CONTROLLERS: "CONTROLLER"}


def handle(services: Services, context: RequestContext, request: DescribeClusterRequest) -> DescribeClusterResponse:
    if request.endpoint_type != BROKERS:
        wanted = _ENDPOINT_NAMES.get(request.endpoint_type)
        if wanted is None:
            raise KafkaError(ErrorCode.UNSUPPORTED_ENDPOINT_TYPE, f"Unsupported endpoint type {request.endpoint_type}")
        raise KafkaError(
            ErrorCode.MISMATCHED_ENDPOINT_TYPE,
            f"The request was sent to an endpoint of type BROKER, but we wanted an endpoint of type {wanted}",
        )
    image = services.image()
    brokers = reachable_brokers(image, context.listener_name, include_fenced=request.include_fenced_brokers)
    asked = request.include_cluster_authorized_operations
    return DescribeClusterResponse(
        endpoint_type=BROKERS,
        cluster_id=services.cluster_id,
        controller_id=cluster_controller(image, services.node_id),
        brokers=[
            DescribeClusterBroker(
                broker_id=broker.node_id,
                host=endpoint.host,
                port=endpoint.port,
                rack=broker.rack,
                is_fenced=broker.fenced and context.api_version >= 2,
            )
            for broker, endpoint in brokers
        ],
        cluster_authorized_operations=authorized_operations.CLUSTER if asked else authorized_operations.NOT_ASKED,
    )


def refuse(request: DescribeClusterRequest, error: KafkaError, version: int) -> DescribeClusterResponse:
    return DescribeClusterResponse(error_code=error.code, error_message=error.message)
