"""ListConfigResources (key 74, versions 0-1): the names of resources with configs: topics, brokers, groups and others.

All topics and brokers are listed, but only groups and metrics subscriptions that have configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.cluster_view import reachable_brokers
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)
from tidelog.replication.controller.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
)

REQUEST = ListConfigResourcesRequest
refuse = refusing(ListConfigResourcesResponse)

TYPES_FROM = 1


def handle(
    services: Services, context: RequestContext, request: ListConfigResourcesRequest
) -> ListConfigResourcesResponse:
    image = services.image()

    def brokers() -> Iterable[str]:
        nodes = reachable_brokers(image, context.listener_name, include_fenced=False)
        return (str(broker.node_id) for broker, _ in nodes)

    names: dict[int, Callable[[], Iterable[str]]] = {
        GROUP_RESOURCE: lambda: _configured(image, GROUP_RESOURCE),
        CLIENT_METRICS_RESOURCE: lambda: _configured(image, CLIENT_METRICS_RESOURCE),
        BROKER_LOGGER_RESOURCE: brokers,
        BROKER_RESOURCE: brokers,
        TOPIC_RESOURCE: lambda: image.topics_by_name,
    }
    supported = names if context.api_version >= TYPES_FROM else {CLIENT_METRICS_RESOURCE: None}
    types = set(request.resource_types) or set(supported)
    for kind in request.resource_types:
        if kind not in supported:
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"Unexpected resource type {kind}.")
    resources = [
        ConfigResource(resource_name=name, resource_type=kind)
        for kind, of_kind in names.items()
        if kind in types
        for name in of_kind()
    ]
    return ListConfigResourcesResponse(config_resources=resources)


def _configured(image: MetadataImage, kind: int) -> Iterable[str]:
    return (name for each, name in image.configs if each == kind)
