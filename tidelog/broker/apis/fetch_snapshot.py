"""FetchSnapshot (key 59, versions 0-1): a piece of a snapshot of the metadata log."""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.fetch_snapshot import FetchSnapshotRequest, FetchSnapshotResponse

REQUEST = FetchSnapshotRequest


async def handle(services: Services, context: RequestContext, request: FetchSnapshotRequest) -> FetchSnapshotResponse:
    response: FetchSnapshotResponse = await quorum(services).fetch_snapshot(request, context.api_version)
    return response


def refuse(request: FetchSnapshotRequest, error: KafkaError, version: int) -> FetchSnapshotResponse:
    return FetchSnapshotResponse(error_code=error.code)
