"""UpdateFeatures (key 57, versions 0-2): another level for features of the whole cluster.

The answer to a refusal names no single feature, as in Kafka.
"""

from __future__ import annotations

from tidelog.broker.apis.cluster_roles import controller
from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.update_features import UpdateFeaturesRequest, UpdateFeaturesResponse

REQUEST = UpdateFeaturesRequest


async def handle(services: Services, context: RequestContext, request: UpdateFeaturesRequest) -> UpdateFeaturesResponse:
    response: UpdateFeaturesResponse = await controller(services).update_features(request, context.api_version)
    return response


def refuse(request: UpdateFeaturesRequest, error: KafkaError, version: int) -> UpdateFeaturesResponse:
    return UpdateFeaturesResponse(error_code=error.code, error_message=error.message)
