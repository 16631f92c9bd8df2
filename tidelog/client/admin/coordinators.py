"""The base of admin calls that coordinators of groups and of transactional ids answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tidelog.client.admin.base import AdminBase, error_of, is_final, outcomes_of, run_all
from tidelog.client.model import BrokerErrors, Node
from tidelog.client.network.cluster import COORDINATOR, Cluster
from tidelog.client.network.connection import Connection
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.describe_cluster import DescribeClusterRequest, DescribeClusterResponse

Response = TypeVar("Response", bound=Message)
Row = TypeVar("Row")
Listing = TypeVar("Listing")

GROUP, TRANSACTION = 0, 1
_NOUNS = {GROUP: "group", TRANSACTION: "transactional id"}
LOOKUPS_AT_ONCE = 50


class CoordinatorAdmin(AdminBase):
    """Calls to coordinators."""

    async def _call_coordinators(
        self,
        key_type: int,
        keys: list[str],
        request_for: Callable[[list[str]], Message],
        response_class: type[Response],
        rows: Callable[[Response], Mapping[str, tuple[int, Row]]],
    ) -> dict[str, tuple[Node | None, int, Row] | KafkaError]:
        """For each key its coordinator, error code and row, with one request to each coordinator; an error where the
        coordinator of the key has failed. Raises KafkaError where all have.

        Retriable errors, such as a moved coordinator, are retried.
        """
        results: dict[str, tuple[Node | None, int, Row] | KafkaError] = {}
        errors: dict[str, KafkaError] = {}
        unique_ids = list(dict.fromkeys(keys))

        def named(key: str, error: KafkaError) -> KafkaError:
            return KafkaError(error.code, f"{_NOUNS[key_type]} {key!r}: {error.message or error.code.name}")

        def note(key: str, error: KafkaError) -> None:
            (results if is_final(error) else errors)[key] = named(key, error)

        async def call(cluster: Cluster, node_id: int, part: list[str]) -> None:
            try:
                response = await cluster.call(node_id, request_for(part), response_class, purpose=COORDINATOR)
            except KafkaError as error:
                for key in part:
                    note(key, error)
                return
            answers = rows(response)
            for key in part:
                if key not in answers:
                    note(
                        key, KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the coordinator's answer does not mention it")
                    )
                    continue
                code, row = answers[key]
                refusal = error_of(code, None, f"{_NOUNS[key_type]} {key!r}")
                if refusal is not None and refusal.retriable:
                    errors[key] = refusal
                else:
                    results[key] = (cluster.metadata.nodes.get(node_id), code, row)

        async def attempt() -> None:
            cluster = await self._connected_cluster()
            missing = [key for key in unique_ids if key not in results]
            by_node: dict[int, list[str]] = {}
            for start in range(0, len(missing), LOOKUPS_AT_ONCE):
                part = missing[start : start + LOOKUPS_AT_ONCE]
                nodes, failures = await outcomes_of({key: cluster.find_coordinator(key, key_type) for key in part})
                for key, failure in failures.items():
                    note(key, failure)
                for key, node_id in nodes.items():
                    by_node.setdefault(node_id, []).append(key)
            await run_all(call(cluster, node_id, part) for node_id, part in by_node.items())
            for key in missing:
                if key not in results:
                    raise errors[key]

        try:
            await self._retry(attempt)
        except KafkaError as error:
            if not results:
                raise
            for key in unique_ids:
                results.setdefault(key, errors.get(key) or named(key, error))
        return {key: results[key] for key in unique_ids}

    async def _ask_every_broker(
        self,
        call: Callable[[Connection, int], Awaitable[Response]],
        listings_in: Callable[[Mapping[int, Response]], list[Listing]],
    ) -> list[Listing]:
        """What the answers of all brokers list. A retry asks only the brokers that have not answered.

        Raises KafkaError, BrokerErrors where some brokers have answered.
        """
        responses: dict[int, Response] = {}
        missing: dict[int, KafkaError | None] = {}

        async def ask(cluster: Cluster, node_id: int) -> None:
            try:
                responses[node_id] = await call(await cluster.connection(node_id), node_id)
                del missing[node_id]
            except KafkaError as error:
                missing[node_id] = error

        async def attempt() -> None:
            cluster = await self._connected_cluster()
            node_ids = await self._broker_ids(cluster)
            if any(node_id not in cluster.metadata.nodes for node_id in node_ids):
                await cluster.wait_for_metadata(self._config.request_timeout_ms)
            missing.clear()
            missing.update(dict.fromkeys(node_id for node_id in node_ids if node_id not in responses))
            await run_all([ask(cluster, node_id) for node_id in missing])
            for error in sorted(filter(None, missing.values()), key=is_final):
                raise error

        try:
            await self._retry(attempt)
        except KafkaError as error:
            if not responses or not missing:
                raise
            errors = {node_id: problem or error for node_id, problem in missing.items()}
            raise BrokerErrors(error.code, error.message, listings_in(responses), errors) from None
        return listings_in(responses)

    async def _broker_ids(self, cluster: Cluster) -> list[int]:
        """The brokers that are not fenced. Metadata names one that was fenced a moment ago, too, and a call to it would
        only fail.
        """
        if (await cluster.any_connection()).supports(DescribeClusterRequest, 0):
            answer = await cluster.call_any(DescribeClusterRequest(), DescribeClusterResponse)
            if answer.brokers:
                return [broker.broker_id for broker in answer.brokers]
        return [broker.node_id for broker in (await cluster.fetch_metadata([])).brokers]
