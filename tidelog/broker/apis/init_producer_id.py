"""InitProducerId (key 22, versions 0-5): a producer id and epoch for an idempotent producer.

Without a transactional id every call gets a new id with epoch 0, whatever id it had, as in Kafka. Deviation:
transactional producers are refused with COORDINATOR_NOT_AVAILABLE, since no transaction coordinator is served yet.
"""

from __future__ import annotations

from tidelog.broker.request import RequestContext
from tidelog.broker.services import Services
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

REQUEST = InitProducerIdRequest


async def handle(services: Services, context: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    if (request.producer_id == -1) != (request.producer_epoch == -1) or request.transactional_id == "":
        raise KafkaError(ErrorCode.INVALID_REQUEST)
    if request.transactional_id is not None:
        raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE)
    return InitProducerIdResponse(producer_id=await services.producer_ids.next(), producer_epoch=0)


def refuse(request: InitProducerIdRequest, error: KafkaError, version: int) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=error.code, producer_id=-1, producer_epoch=-1)
