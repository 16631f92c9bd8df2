"""ApiVersions (key 18, versions 0-4): the APIs of this listener, and the cluster's supported and finalized features.

The answer to an unknown version has the form of version 0, with UNSUPPORTED_VERSION and the versions of this API
(KIP-511); `dispatch` calls `refuse` for it. Below version 4 features that may be at level 0 are omitted, because old
clients cannot read them. Features that Tidelog does not support are not listed, even if the log of a former Kafka node
has them.
"""

from __future__ import annotations

import re
from functools import lru_cache

from tidelog.broker.apis.cluster_roles import at_controller, quorum
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.api import CONTROLLER_SERVED, SERVED, ApiKey
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from tidelog.replication.controller.decisions.supported_features import SUPPORTED_FEATURES

REQUEST = ApiVersionsRequest

NAMED_SOFTWARE_FROM = 3
LEVEL_ZERO_FROM = 4

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def handle(services: Services, context: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    if context.api_version >= NAMED_SOFTWARE_FROM and not (
        _SOFTWARE.fullmatch(request.client_software_name) and _SOFTWARE.fullmatch(request.client_software_version)
    ):
        raise KafkaError(ErrorCode.INVALID_REQUEST)
    image = services.image()
    finalized = {**image.features, "kraft.version": quorum(services).kraft_version}
    return _response(context.api_version, at_controller(services, context), image.offset, tuple(finalized.items()))


@lru_cache(maxsize=64)
def _response(
    version: int, is_at_controller: bool, image_offset: int, finalized: tuple[tuple[str, int], ...]
) -> ApiVersionsResponse:
    """The response, the same for all clients until the metadata changes. It is shared, so no caller may change it."""
    return ApiVersionsResponse(
        api_keys=_served(CONTROLLER_SERVED if is_at_controller else SERVED),
        supported_features=[
            SupportedFeatureKey(name=name, min_version=lowest, max_version=highest)
            for name, (lowest, highest) in SUPPORTED_FEATURES.items()
            if highest > 0 and (lowest > 0 or version >= LEVEL_ZERO_FROM)
        ],
        finalized_features_epoch=image_offset,
        finalized_features=[
            FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in finalized
            if 0 < level <= SUPPORTED_FEATURES.get(name, (0, 0))[1]
        ],
    )


def _served(table: dict[int, range]) -> list[ApiVersion]:
    return [
        ApiVersion(api_key=key, min_version=versions.start, max_version=versions.stop - 1)
        for key, versions in sorted(table.items())
    ]


def refuse(request: ApiVersionsRequest | None, error: KafkaError, version: int) -> ApiVersionsResponse:
    versions = SERVED[ApiKey.API_VERSIONS]
    own = ApiVersion(api_key=ApiKey.API_VERSIONS, min_version=versions.start, max_version=versions.stop - 1)
    return ApiVersionsResponse(
        error_code=error.code, api_keys=[own] if error.code is ErrorCode.UNSUPPORTED_VERSION else []
    )
