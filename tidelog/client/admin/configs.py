"""Admin calls about configs: of topics, brokers, broker loggers, groups and metrics subscriptions.

`describe_configs` and `incremental_alter_configs` are shortcuts for topics and brokers. The other
calls address every type of resource. Invariant: requests for a resource of one broker go to that
broker, all others to any broker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tidelog.client.admin.base import (
    WAIT_SHARE,
    AdminBase,
    in_one_limit,
    outcomes_of,
    raise_broker_errors,
    raise_on_error,
)
from tidelog.client.arguments import (
    INT32_MAX,
    WrongArgument,
    as_broker_ids,
    as_choice,
    as_config_value,
    as_flag,
    as_int,
    as_list,
    as_list_of,
    as_mapping,
    as_text,
    as_texts,
    as_topic_name,
    as_topic_names,
    shown,
)
from tidelog.client.model import BrokerErrors, ConfigEntry
from tidelog.client.network.connection import Connection
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
    DescribeConfigsResult,
)
from tidelog.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tidelog.protocol.messages.list_config_resources import ListConfigResourcesRequest, ListConfigResourcesResponse

TYPES = {"topic": 2, "broker": 4, "broker-logger": 8, "client-metrics": 16, "group": 32}
_NAMES = {number: name for name, number in TYPES.items()}
_UNKNOWN_TYPE = "unknown"
"""The type of a resource in an answer of a broker that has more types than this client."""
_BROKER_SPECIFIC_TYPES = ("broker", "broker-logger")
SET, DELETE, APPEND, SUBTRACT = range(4)


ConfigValue = str | int | float | bool


class ConfigResource(NamedTuple):
    """`type` is one of `TYPES`, in an answer also "unknown": the broker has more types.

    The name of a broker is its id, empty for the default of all brokers.
    """

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type} {self.name!r}" if self.name else f"every {self.type}"


def _named_resource(type_number: int, name: str) -> ConfigResource:
    return ConfigResource(_NAMES.get(type_number, _UNKNOWN_TYPE), name)


class ConfigChange(NamedTuple):
    """One change of a key. `operation` is one of `tidelog.client.admin.configs`: SET `value` (0), DELETE
    (1: restore the default), APPEND to a list (2) and SUBTRACT from it (3).

    List values are separated by commas.
    """

    name: str
    value: ConfigValue | None
    operation: int = SET


class ConfigAdmin(AdminBase):
    """The config calls of `Admin`."""

    async def describe_configs(
        self,
        *,
        topics: Iterable[str] = (),
        brokers: Iterable[int] = (),
        keys: Iterable[str] | None = None,
        documentation: bool = False,
    ) -> dict[str | int, dict[str, ConfigEntry]]:
        """Configs by topic name or broker id, with the source of each value.

        `keys` selects single keys. Raises as `describe_config_resources` does.
        """
        resources: dict[ConfigResource, str | int] = {
            ConfigResource("topic", name): name for name in as_topic_names("topics", topics)
        }
        resources |= {ConfigResource("broker", str(broker)): broker for broker in as_broker_ids("brokers", brokers)}

        def by_name(
            configs: Mapping[ConfigResource, dict[str, ConfigEntry]],
        ) -> dict[str | int, dict[str, ConfigEntry]]:
            return {resources[resource]: entries for resource, entries in configs.items()}

        try:
            return by_name(await self.describe_config_resources(resources, keys=keys, documentation=documentation))
        except BrokerErrors as error:
            raise BrokerErrors(error.code, error.message, by_name(error.answers), error.errors) from None

    async def incremental_alter_configs(
        self,
        *,
        topics: Mapping[str, Mapping[str, ConfigValue | None]] | None = None,
        brokers: Mapping[int | None, Mapping[str, ConfigValue | None]] | None = None,
        validate_only: bool = False,
    ) -> None:
        """Set single configs by topic name or broker id. Broker id None is the default of all
        brokers.

        A value of None restores the default. Raises the KafkaError of the first refused resource.
        Other resources may have changed.
        """
        by_resource: dict[ConfigResource, Any] = {}
        broker_configs = as_mapping("brokers", brokers or {}, "configs by broker id")
        default_configs = broker_configs.pop(None, None)
        for broker, configs in broker_configs.items():
            by_resource[ConfigResource("broker", str(as_int("a key of brokers", broker)))] = configs
        for topic, configs in as_mapping("topics", topics or {}, "configs by topic").items():
            by_resource[ConfigResource("topic", as_topic_name("a key of topics", topic))] = configs
        if default_configs is not None:
            by_resource[ConfigResource("broker", "")] = default_configs
        changes = {
            resource: [
                ConfigChange(key, value, DELETE if value is None else SET)
                for key, value in as_mapping(f"the configs of {resource}", configs, "values by key").items()
            ]
            for resource, configs in by_resource.items()
        }
        await self.alter_config_resources(changes, validate_only=validate_only)

    async def list_config_resources(self, types: Iterable[str] = ()) -> list[ConfigResource]:
        """All resources, or those of some types.

        Groups and metrics subscriptions appear when they have configs.
        """
        names = [as_choice("an item of types", name, TYPES) for name in as_list("types", types, "types")]
        request = ListConfigResourcesRequest(resource_types=[TYPES[name] for name in names])

        async def attempt() -> ListConfigResourcesResponse:
            return await (await self._connected_cluster()).call_any(request, ListConfigResourcesResponse)

        response = await self._retry(attempt)
        raise_on_error(response.error_code, None, "the list of resources")
        return sorted(
            _named_resource(resource.resource_type, resource.resource_name) for resource in response.config_resources
        )

    @in_one_limit
    async def describe_config_resources(
        self, resources: Iterable[ConfigResource], *, keys: Iterable[str] | None = None, documentation: bool = False
    ) -> dict[ConfigResource, dict[str, ConfigEntry]]:
        """All configs of these resources, or some keys.

        Raises the KafkaError of the first refused resource; BrokerErrors, with the configs of the other resources,
        where only brokers have failed that were asked for their own.
        """
        configuration_keys = None if keys is None else as_texts("keys", keys)
        as_flag("documentation", documentation)
        targets = as_list_of("resources", resources, "ConfigResources", _as_resource)
        deadline = self._deadline(WAIT_SHARE)

        async def ask(broker: int | None, group: list[ConfigResource]) -> dict[ConfigResource, dict[str, ConfigEntry]]:
            request = DescribeConfigsRequest(
                resources=[
                    DescribeConfigsResource(
                        resource_type=TYPES[resource.type],
                        resource_name=resource.name,
                        configuration_keys=configuration_keys,
                    )
                    for resource in group
                ],
                include_synonyms=True,
                include_documentation=documentation,
            )
            described: dict[ConfigResource, dict[str, ConfigEntry]] = {}
            for result in await self._fetch_configs(broker, request, deadline):
                resource = _named_resource(result.resource_type, result.resource_name)
                raise_on_error(result.error_code, result.error_message, f"configuration of {resource}")
                described[resource] = {entry.name: entry for entry in _entries(result, documentation)}
            return described

        answers, errors = await outcomes_of(
            {broker: ask(broker, group) for broker, group in _by_broker(targets).items()}
        )
        configs = {resource: entries for answer in answers.values() for resource, entries in answer.items()}
        _raise_errors(errors, configs)
        for resource in targets:
            if resource not in configs:
                raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the answer does not mention {resource}")
        return {resource: configs[resource] for resource in targets}

    async def _fetch_configs(
        self, broker: int | None, request: DescribeConfigsRequest, deadline: float
    ) -> Sequence[DescribeConfigsResult]:
        async def ask(connection: Connection) -> DescribeConfigsResponse:
            if not connection.supports(DescribeConfigsRequest, 3):
                request.include_documentation = False
            return await connection.call(request, DescribeConfigsResponse, self._config.request_timeout_ms)

        async def attempt() -> DescribeConfigsResponse:
            cluster = await self._connected_cluster()
            response = await (cluster.ask_any(ask) if broker is None else ask(await self._connection_to(broker)))
            for result in response.results:
                if result.resource_type == TYPES["topic"]:
                    self._retry_if_new(result.resource_name, result.error_code)
            return response

        return (await self._retry(attempt, deadline=deadline)).results

    @in_one_limit
    async def alter_config_resources(
        self, changes: Mapping[ConfigResource, Sequence[ConfigChange]], *, validate_only: bool = False
    ) -> None:
        """Change single configs. Raises the KafkaError of the first refused resource; BrokerErrors where only brokers
        have failed that take their own.

        Others may have changed.
        """
        configs = {
            _as_resource("a key of changes", resource): [
                _as_change(resource, change)
                for change in as_list(f"changes of {shown(resource)}", resource_changes, "ConfigChanges")
            ]
            for resource, resource_changes in as_mapping("changes", changes, "ConfigChanges by ConfigResource").items()
        }
        as_flag("validate_only", validate_only)
        deadline = self._deadline(WAIT_SHARE)

        async def ask(broker: int | None, group: list[ConfigResource]) -> None:
            request = IncrementalAlterConfigsRequest(
                resources=[
                    AlterConfigsResource(
                        resource_type=TYPES[resource.type],
                        resource_name=resource.name,
                        configs=configs[resource],
                    )
                    for resource in group
                ],
                validate_only=validate_only,
            )
            for result in (await self._send_alter_request(broker, request, deadline)).responses:
                resource = _named_resource(result.resource_type, result.resource_name)
                raise_on_error(result.error_code, result.error_message, f"configuration of {resource}")

        answers, errors = await outcomes_of(
            {broker: ask(broker, group) for broker, group in _by_broker(configs).items()}
        )
        _raise_errors(errors, answers)

    async def _send_alter_request(
        self, broker: int | None, request: IncrementalAlterConfigsRequest, deadline: float
    ) -> IncrementalAlterConfigsResponse:
        async def attempt() -> IncrementalAlterConfigsResponse:
            cluster = await self._connected_cluster()
            connection = await (self._controller() if broker is None else self._connection_to(broker))
            answer = await connection.call(request, IncrementalAlterConfigsResponse, self._config.request_timeout_ms)
            self._redirect(cluster, (result.error_code for result in answer.responses))
            return answer

        return await self._retry(attempt, deadline=deadline)


def _raise_errors(errors: Mapping[int | None, KafkaError], answers: Mapping[Any, Any]) -> None:
    """Raise the first error, where there is one; that of the request that any broker takes (None) as it is."""
    if (error := errors.get(None)) is not None:
        raise error
    raise_broker_errors({broker: each for broker, each in errors.items() if broker is not None}, answers)


def _entries(result: DescribeConfigsResult, documentation: bool) -> list[ConfigEntry]:
    return [
        ConfigEntry(
            config.name,
            config.value,
            config.config_source,
            config.read_only,
            config.is_sensitive,
            tuple((synonym.name, synonym.value, synonym.source) for synonym in config.synonyms),
            config.documentation if documentation else None,
        )
        for config in result.configs
    ]


def _as_resource(name: str, value: Any) -> ConfigResource:
    if not isinstance(value, ConfigResource):
        raise TypeError(f"{name} must be a ConfigResource, not {shown(value)}")
    as_choice("ConfigResource.type", value.type, TYPES)
    as_text("ConfigResource.name", value.name)
    if value.type in _BROKER_SPECIFIC_TYPES and value.name and not _is_broker_id(value.name):
        raise WrongArgument(f"ConfigResource.name must be the id of a broker, not {shown(value.name)}")
    return value


def _is_broker_id(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) <= len(str(INT32_MAX)) and int(name) <= INT32_MAX


def _as_change(resource: ConfigResource, value: Any) -> AlterableConfig:
    if not isinstance(value, ConfigChange):
        raise TypeError(f"changes of {resource} must be ConfigChanges, not {shown(value)}")
    return AlterableConfig(
        name=as_text(f"a key of {resource}", value.name),
        config_operation=as_int("ConfigChange.operation", value.operation, SET, SUBTRACT),
        value=None if value.value is None else as_config_value(f"{value.name} of {resource}", value.value),
    )


def _by_broker(resources: Iterable[ConfigResource]) -> dict[int | None, list[ConfigResource]]:
    """Resources by the broker that answers for them; None: any broker."""
    groups: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        is_broker_specific = resource.type in _BROKER_SPECIFIC_TYPES and resource.name
        groups.setdefault(int(resource.name) if is_broker_specific else None, []).append(resource)
    return groups
