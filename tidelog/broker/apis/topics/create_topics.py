"""CreateTopics (key 19, versions 2-7): creates or only validates topics, by counts or by manual assignment.

The controller decides. This handler refuses duplicate names, and adds the effective configs of each created topic.
"""

from __future__ import annotations

from collections import Counter

from tidelog.broker.apis.cluster_roles import check_time, controller
from tidelog.broker.apis.services import Services
from tidelog.broker.config.definition_types import INTERNAL
from tidelog.broker.config.definitions import TOPIC
from tidelog.broker.config.entries import (
    DYNAMIC_BROKER_SOURCE,
    DYNAMIC_DEFAULT_BROKER_SOURCE,
    TOPIC_SOURCE,
    canonical_text,
    effective_topic_source,
)
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfigs,
    CreatableTopicResult,
    CreateTopicsRequest,
    CreateTopicsResponse,
)
from tidelog.replication.controller.decisions.state import MAX_PARTITIONS_PER_REQUEST, CreatedTopic, NewTopic

REQUEST = CreateTopicsRequest
# An answer is built in steps of so many topics: each topic has all its configs.
TOPICS_AT_ONCE = 500


async def handle(services: Services, context: RequestContext, request: CreateTopicsRequest) -> CreateTopicsResponse:
    if len(request.topics) > MAX_PARTITIONS_PER_REQUEST:  # each topic has at least one partition
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "Excessively large number of partitions per request.")
    names = [topic.name for topic in request.topics]
    twice = {name for name, times in Counter(names).items() if times > 1}
    topics = [topic for topic in request.topics if topic.name not in twice]
    if topics:
        check_time(request.timeout_ms)
    outcomes = await controller(services).create_topics(
        [_new_topic(topic) for topic in topics],
        validate_only=request.validate_only,
        timeout_ms=request.timeout_ms,
    )
    results: list[CreatableTopicResult] = []
    common: list[CreatableTopicConfigs] = []
    for number, name in enumerate(dict.fromkeys(names)):
        if number % TOPICS_AT_ONCE == 0:
            await services.scheduler.begin()  # very many requests may have waited for the same commit
            common = _configs(services)
        if name in twice:
            results.append(_refused(name, KafkaError(ErrorCode.INVALID_REQUEST, "Duplicate topic name.")))
        else:
            outcome = outcomes[name]
            if isinstance(outcome, KafkaError):
                results.append(_refused(name, outcome))
            else:
                results.append(_created(common, outcome))
    return CreateTopicsResponse(topics=results)


def _new_topic(topic: CreatableTopic) -> NewTopic:
    return NewTopic(
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        [(assignment.partition_index, assignment.broker_ids) for assignment in topic.assignments],
        [(config.name, config.value) for config in topic.configs],
    )


def _configs(services: Services) -> list[CreatableTopicConfigs]:
    """The effective configs of a topic without own ones."""
    config = services.config
    layers = services.image().broker_config_layers(services.node_id)
    configs: list[CreatableTopicConfigs] = []
    for name, definition in TOPIC.items():
        if definition.update_mode == INTERNAL:
            continue
        value, source = config.topic_default(name, layers), effective_topic_source(config, layers, name)
        if source not in (DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE):
            value = canonical_text(definition, value)
        configs.append(CreatableTopicConfigs(name=name, value=value, config_source=source))
    return configs


def _created(common: list[CreatableTopicConfigs], topic: CreatedTopic) -> CreatableTopicResult:
    """Topics share the messages of configs that are not their own: an answer has hundreds of thousands."""
    configs = common
    if topic.configs:
        # As in Kafka, a topic's own value is returned unchanged.
        own = {
            name: CreatableTopicConfigs(name=name, value=value, config_source=TOPIC_SOURCE)
            for name, value in topic.configs.items()
        }
        by_name = {each.name: each for each in common} | own
        configs = [by_name[name] for name in TOPIC if name in by_name]
    return CreatableTopicResult(
        name=topic.name,
        topic_id=topic.topic_id,
        error_message=None,
        num_partitions=topic.partition_count,
        replication_factor=topic.replication_factor,
        configs=configs,
    )


def _refused(name: str, error: KafkaError) -> CreatableTopicResult:
    return CreatableTopicResult(name=name, error_code=error.code, error_message=error.message)


def refuse(request: CreateTopicsRequest, error: KafkaError, version: int) -> CreateTopicsResponse:
    return CreateTopicsResponse(topics=[_refused(topic.name, error) for topic in request.topics])
