"""PushTelemetry (key 72, version 0): served, not advertised; what is pushed is dropped, as by Kafka with no plugin."""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.push_telemetry import PushTelemetryRequest, PushTelemetryResponse

REQUEST = PushTelemetryRequest


def handle(services: Services, context: RequestContext, request: PushTelemetryRequest) -> PushTelemetryResponse:
    services.telemetry.push(
        context,
        request.client_instance_id,
        request.subscription_id,
        request.compression_type,
        len(request.metrics),
        is_terminating=request.terminating,
    )
    return PushTelemetryResponse()


def refuse(request: PushTelemetryRequest, error: KafkaError, version: int) -> PushTelemetryResponse:
    return PushTelemetryResponse(error_code=error.code)
