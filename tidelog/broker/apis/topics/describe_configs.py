"""DescribeConfigs (key 32, versions 1-4): every config of topics, brokers, loggers, groups and metrics subscriptions.

Each key has its value, source and type, and on request its synonyms and documentation; sensitive values are never
shown. As in Kafka, a broker describes only itself and the cluster's defaults (empty name), and a
type that does not exist makes the whole request fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tidelog.broker.apis.repeats import check_repeats
from tidelog.broker.apis.services import Services
from tidelog.broker.config import logger_levels
from tidelog.broker.config.entries import (
    BROKER_LOGGER_SOURCE,
    UNKNOWN_TYPE,
    ConfigEntry,
    broker_entries,
    client_metrics_entries,
    cluster_entries,
    group_entries,
    topic_entries,
)
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.broker.scheduling.pieces import UNCOUNTED_BYTES_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer
from tidelog.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from tidelog.replication.controller.decisions.topic_names import topic_name_problem
from tidelog.replication.controller.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)

REQUEST = DescribeConfigsRequest
ANSWERS_MAY_BE_LARGE = True
COUNTED_ABOVE_BYTES = UNCOUNTED_BYTES_MAX
# To describe a resource takes some tenths of a millisecond, whatever is wanted of it: as much as so many elements.
DESCRIBED_ELEMENTS = 16

_TYPES = (TOPIC_RESOURCE, BROKER_RESOURCE, BROKER_LOGGER_RESOURCE, CLIENT_METRICS_RESOURCE, GROUP_RESOURCE)
_OF_THIS_BROKER = (BROKER_RESOURCE, BROKER_LOGGER_RESOURCE)

Resource = tuple[int, str, frozenset[str] | None]
# The answers for topics by their own configs and the keys wanted: most of many topics have the same, often none.
Alike = dict[tuple[frozenset[tuple[str, str]], frozenset[str] | None], list[DescribeConfigsResourceResult]]


async def handle(
    services: Services, context: RequestContext, request: DescribeConfigsRequest
) -> DescribeConfigsResponse:
    # All names of broker resources count as one, because 1 and 01 name the same broker.
    check_repeats(
        (each.resource_type, each.resource_name if each.resource_type not in _OF_THIS_BROKER else "")
        for each in request.resources
    )
    for resource in request.resources:
        if resource.resource_type not in _TYPES:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unsupported resource type: {resource.resource_type}")
    results: list[DescribeConfigsResult] = []
    described: dict[Resource, DescribeConfigsResult] = {}
    alike: Alike = {}
    names: set[tuple[int, str]] = set()
    async with AnswerInPieces(services.scheduler, context.connection) as answer:
        for resource in request.resources:
            keys = resource.configuration_keys
            key = resource.resource_type, resource.resource_name, frozenset(keys) if keys else None
            if answer.is_full and key[:2] in names:
                results.append(_refused(resource, KafkaError(ErrorCode.INVALID_REQUEST, "asked for again")))
                continue
            names.add(key[:2])
            result = described.get(key)
            elements = 1
            if result is None:
                result = described[key] = _describe(services, request, resource, key[2], alike)
                elements = DESCRIBED_ELEMENTS
            results.append(result)
            await answer.add_elements(elements + len(result.configs))
    return DescribeConfigsResponse(results=results)


def _describe(
    services: Services,
    request: DescribeConfigsRequest,
    resource: DescribeConfigsResource,
    names: frozenset[str] | None,
    alike: Alike,
) -> DescribeConfigsResult:
    result = DescribeConfigsResult(
        error_message="", resource_type=resource.resource_type, resource_name=resource.resource_name
    )
    try:
        entries = _entries(services, resource)
        own = frozenset(services.image().topic_config(resource.resource_name).items())
        configs = alike.get((own, names)) if resource.resource_type == TOPIC_RESOURCE else None
        if configs is None:
            configs = [_shown(entry, request) for entry in entries if names is None or entry.name in names]
        if resource.resource_type == TOPIC_RESOURCE:
            alike[own, names] = configs
        result.configs = configs
    except KafkaError as error:
        result.error_code, result.error_message, result.configs = error.code, error.message, []
    return result


def _entries(services: Services, resource: DescribeConfigsResource) -> Iterable[ConfigEntry]:
    kind, name = resource.resource_type, resource.resource_name
    image, config = services.image(), services.config
    layers = image.broker_config_layers(services.node_id)
    if kind == TOPIC_RESOURCE:
        problem = topic_name_problem(name)
        if problem is not None:
            raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)
        if name not in image.topics_by_name:
            raise KafkaError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "")
        return topic_entries(config, layers, image.topic_config(name))
    if kind == BROKER_RESOURCE:
        if not name:
            return cluster_entries(config, layers)
        _check_broker(services, name, f"{services.node_id} or empty string,")
        return broker_entries(config, layers)
    if kind == BROKER_LOGGER_RESOURCE:
        if not name:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Broker id must not be empty")
        _check_broker(services, name, str(services.node_id))
        return _loggers()
    if kind == GROUP_RESOURCE:
        if not name:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "Group name must not be empty")
        return group_entries(config, layers, image.configs.get((GROUP_RESOURCE, name), {}))
    if not name:
        raise KafkaError(ErrorCode.INVALID_REQUEST, "Client metrics subscription name must not be empty")
    return client_metrics_entries(image.configs.get((CLIENT_METRICS_RESOURCE, name), {}))


def _check_broker(services: Services, name: str, expected: str) -> None:
    try:
        broker_id = parse_integer(name)
    except ValueError:
        message = f"Broker id must be an integer, but it is: {name}"
        raise KafkaError(ErrorCode.INVALID_REQUEST, message) from None
    if broker_id != services.node_id:
        raise KafkaError(ErrorCode.INVALID_REQUEST, f"Unexpected broker id, expected {expected} but received {name}")


def _loggers() -> Iterator[ConfigEntry]:
    for name, level in logger_levels.levels():
        yield ConfigEntry(name, level, BROKER_LOGGER_SOURCE, False, False, UNKNOWN_TYPE, "", [])


def _shown(entry: ConfigEntry, request: DescribeConfigsRequest) -> DescribeConfigsResourceResult:
    with_documentation = request.include_documentation or entry.source == BROKER_LOGGER_SOURCE  # a logger's is empty
    return DescribeConfigsResourceResult(
        name=entry.name,
        value=entry.value,
        read_only=entry.read_only,
        config_source=entry.source,
        is_sensitive=entry.sensitive,
        synonyms=[
            DescribeConfigsSynonym(name=synonym.name, value=synonym.value, source=synonym.source)
            for synonym in (entry.synonyms if request.include_synonyms else ())
        ],
        config_type=entry.type,
        documentation=entry.documentation if with_documentation else None,
    )


def refuse(request: DescribeConfigsRequest, error: KafkaError, version: int) -> DescribeConfigsResponse:
    return DescribeConfigsResponse(results=[_refused(resource, error) for resource in request.resources])


def _refused(resource: DescribeConfigsResource, error: KafkaError) -> DescribeConfigsResult:
    return DescribeConfigsResult(
        error_code=error.code,
        error_message=error.message,
        resource_type=resource.resource_type,
        resource_name=resource.resource_name,
    )
