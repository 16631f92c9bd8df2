"""GetTelemetrySubscriptions (key 71, version 0): served, not advertised, as Kafka does without a receiver plugin."""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.apis.telemetry import ACCEPTED_COMPRESSION
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)

REQUEST = GetTelemetrySubscriptionsRequest


def handle(
    services: Services, context: RequestContext, request: GetTelemetrySubscriptionsRequest
) -> GetTelemetrySubscriptionsResponse:
    telemetry = services.telemetry
    client_instance_id, subscription = telemetry.subscribe(context, request.client_instance_id)
    return GetTelemetrySubscriptionsResponse(
        client_instance_id=client_instance_id,
        subscription_id=subscription.subscription_id,
        accepted_compression_types=list(ACCEPTED_COMPRESSION),
        push_interval_ms=subscription.push_interval_ms,
        telemetry_max_bytes=telemetry.bytes_max,
        delta_temporality=True,
        requested_metrics=subscription.metrics,
    )


def refuse(
    request: GetTelemetrySubscriptionsRequest, error: KafkaError, version: int
) -> GetTelemetrySubscriptionsResponse:
    return GetTelemetrySubscriptionsResponse(error_code=error.code)
