"""The admin client and all that has configs: topics, brokers, their loggers, groups, metrics subscriptions.

`describe_configs` and `incremental_alter_configs` are the short way for topics and brokers, the others address every
kind alike. Invariant: what belongs to one broker is asked of that broker, the rest of any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tidelog.client.admin.base import AdminBase, check
from tidelog.client.model import ConfigEntry, as_names
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
_OF_ONE_BROKER = ("broker", "broker-logger")
SET, DELETE, APPEND, SUBTRACT = range(4)


class ConfigResource(NamedTuple):
    """`type` is one of `TYPES`; the name of a broker is its id, empty for what holds for all of them."""

    type: str
    name: str

    def __str__(self) -> str:
        return f"{self.type} {self.name!r}" if self.name else f"every {self.type}"


class ConfigChange(NamedTuple):
    """One key set (`value`), put back (DELETE), or its list made longer or shorter by values with commas between."""

    name: str
    value: str | None
    operation: int = SET


class ConfigAdmin(AdminBase):
    """The part of `Admin` that is about configs of any kind."""

    async def describe_configs(
        self,
        *,
        topics: Iterable[str] = (),
        brokers: Iterable[int] = (),
        keys: Iterable[str] | None = None,
        documentation: bool = False,
    ) -> dict[str | int, dict[str, ConfigEntry]]:
        """Configuration by topic name or broker id, with where each value comes from; only `keys` when given."""
        asked: dict[ConfigResource, str | int] = {ConfigResource("topic", name): name for name in as_names(topics)}
        asked |= {ConfigResource("broker", str(broker)): broker for broker in brokers}
        found = await self.describe_config_resources(asked, keys=keys, documentation=documentation)
        return {asked[resource]: entries for resource, entries in found.items()}

    async def incremental_alter_configs(
        self,
        *,
        topics: Mapping[str, Mapping[str, str | None]] | None = None,
        brokers: Mapping[int | None, Mapping[str, str | None]] | None = None,
        validate_only: bool = False,
    ) -> None:
        """Set single configs by topic name or broker id (None: of every broker); None as a value puts a default back.

        Raises the KafkaError of the first resource that was refused; others may have been changed.
        """
        of_brokers = dict(brokers or {})
        of_all = of_brokers.pop(None, None)
        wanted = {ConfigResource("broker", str(broker)): configs for broker, configs in of_brokers.items()}
        wanted |= {ConfigResource("topic", name): configs for name, configs in (topics or {}).items()}
        if of_all is not None:
            wanted[ConfigResource("broker", "")] = of_all
        changes = {
            resource: [ConfigChange(key, value, DELETE if value is None else SET) for key, value in configs.items()]
            for resource, configs in wanted.items()
        }
        await self.alter_config_resources(changes, validate_only=validate_only)

    async def list_config_resources(self, types: Iterable[str] = ()) -> list[ConfigResource]:
        """All there are, or those of some types. Groups and metrics subscriptions: those with configs of their own."""
        request = ListConfigResourcesRequest(resource_types=[TYPES[name] for name in types])

        async def attempt() -> ListConfigResourcesResponse:
            connection = await (await self._reach()).any_connection()
            return await connection.call(request, ListConfigResourcesResponse, self._config.request_timeout_ms)

        response = await self._until(attempt)
        check(response.error_code, None, "the list of resources")
        found = [ConfigResource(_NAMES[each.resource_type], each.resource_name) for each in response.config_resources]
        return sorted(found)

    async def describe_config_resources(
        self, resources: Iterable[ConfigResource], *, keys: Iterable[str] | None = None, documentation: bool = False
    ) -> dict[ConfigResource, dict[str, ConfigEntry]]:
        """Every config of these, or some keys. Raises the KafkaError of the first that is refused."""
        wanted = None if keys is None else list(keys)
        found: dict[ConfigResource, dict[str, ConfigEntry]] = {}
        for broker, some in _by_broker(resources).items():
            request = DescribeConfigsRequest(
                resources=[
                    DescribeConfigsResource(
                        resource_type=TYPES[each.type], resource_name=each.name, configuration_keys=wanted
                    )
                    for each in some
                ],
                include_synonyms=True,
                include_documentation=documentation,
            )
            for result in await self._ask_for_configs(broker, request):
                resource = ConfigResource(_NAMES[result.resource_type], result.resource_name)
                check(result.error_code, result.error_message, f"configuration of {resource}")
                found[resource] = {each.name: each for each in _entries(result, documentation)}
        return found

    async def _ask_for_configs(
        self, broker: int | None, request: DescribeConfigsRequest
    ) -> Sequence[DescribeConfigsResult]:
        async def attempt() -> DescribeConfigsResponse:
            cluster = await self._reach()
            connection = await (cluster.any_connection() if broker is None else cluster.connection(broker))
            if not connection.supports(DescribeConfigsRequest, 3):
                request.include_documentation = False
            return await connection.call(request, DescribeConfigsResponse, self._config.request_timeout_ms)

        return (await self._until(attempt)).results

    async def alter_config_resources(
        self, changes: Mapping[ConfigResource, Sequence[ConfigChange]], *, validate_only: bool = False
    ) -> None:
        """Change single configs. Raises the KafkaError of the first that is refused; others may have been changed."""
        for broker, some in _by_broker(changes).items():
            request = IncrementalAlterConfigsRequest(
                resources=[
                    AlterConfigsResource(
                        resource_type=TYPES[resource.type],
                        resource_name=resource.name,
                        configs=[
                            AlterableConfig(name=change.name, config_operation=change.operation, value=change.value)
                            for change in changes[resource]
                        ],
                    )
                    for resource in some
                ],
                validate_only=validate_only,
            )
            for answer in (await self._ask_to_alter(broker, request)).responses:
                resource = ConfigResource(_NAMES[answer.resource_type], answer.resource_name)
                check(answer.error_code, answer.error_message, f"configuration of {resource}")

    async def _ask_to_alter(
        self, broker: int | None, request: IncrementalAlterConfigsRequest
    ) -> IncrementalAlterConfigsResponse:
        async def attempt() -> IncrementalAlterConfigsResponse:
            cluster = await self._reach()
            connection = await (self._controller() if broker is None else cluster.connection(broker))
            answer = await connection.call(request, IncrementalAlterConfigsResponse, self._config.request_timeout_ms)
            self._redirect(cluster, (each.error_code for each in answer.responses))
            return answer

        return await self._until(attempt)


def _entries(result: DescribeConfigsResult, documentation: bool) -> list[ConfigEntry]:
    return [
        ConfigEntry(
            each.name,
            each.value,
            each.config_source,
            each.read_only,
            each.is_sensitive,
            tuple((synonym.name, synonym.value, synonym.source) for synonym in each.synonyms),
            each.documentation if documentation else None,
        )
        for each in result.configs
    ]


def _by_broker(resources: Iterable[ConfigResource]) -> dict[int | None, list[ConfigResource]]:
    """Which broker to ask for what; None: any."""
    found: dict[int | None, list[ConfigResource]] = {}
    for resource in resources:
        is_own = resource.type in _OF_ONE_BROKER and resource.name
        found.setdefault(int(resource.name) if is_own else None, []).append(resource)
    return found
