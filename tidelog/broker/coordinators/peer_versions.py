"""Requests to brokers of other releases: each is sent in the newest version that both ends serve.

A broker that does not serve a version closes the connection. So the newest version is tried first, and after a
connection that broke the broker is asked (ApiVersions) before the next request; in a cluster of one release this costs
nothing.
"""

from __future__ import annotations

from typing import Any, Final

from tidelog.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable

API_VERSIONS_VERSION: Final = 3
# Addresses of brokers; a cluster has far fewer.
ENDPOINTS_MAX: Final = 4096


class VersionNotServed(PeerUnreachable):
    """The broker serves no version of this API that this node can send."""


class PeerVersions:
    """Sends the requests of one API in a version from `oldest` to `newest`."""

    def __init__(self, exchange: Exchange, oldest: int, newest: int) -> None:
        self._exchange = exchange
        self._oldest = oldest
        self._newest = newest
        self._versions: dict[Endpoint, int] = {}
        self._doubted: set[Endpoint] = set()

    async def exchange(self, endpoint: Endpoint, request: Any, *, timeout_ms: int, lane: str) -> Any:
        """Raises PeerUnreachable."""
        if endpoint in self._doubted:
            await self._ask(endpoint, type(request), timeout_ms, lane)
        version = self._versions.get(endpoint, self._newest)
        try:
            return await self._exchange(endpoint, request, version, timeout_ms=timeout_ms, lane=lane)
        except PeerUnreachable as error:
            if not error.refused:
                self._doubt(endpoint)
            raise

    def _doubt(self, endpoint: Endpoint) -> None:
        if len(self._doubted) + len(self._versions) >= ENDPOINTS_MAX:
            self._doubted.clear()
            self._versions.clear()
        self._doubted.add(endpoint)

    async def _ask(self, endpoint: Endpoint, request_type: type[Any], timeout_ms: int, lane: str) -> None:
        question = ApiVersionsRequest(client_software_name="tidelog", client_software_version="0")
        response: ApiVersionsResponse = await self._exchange(
            endpoint, question, API_VERSIONS_VERSION, timeout_ms=timeout_ms, lane=lane
        )
        served = [each.max_version for each in response.api_keys if each.api_key == request_type.API_KEY]
        version = min([self._newest, *served])
        if not served or version < self._oldest:
            name = request_type.__name__
            raise VersionNotServed(f"{endpoint} serves no version of {name} from {self._oldest} on")
        self._doubted.discard(endpoint)
        if version == self._newest:
            self._versions.pop(endpoint, None)
        else:
            self._versions[endpoint] = version
