"""InitProducerId (key 22, versions 0-5): a producer id and epoch for an idempotent producer.

Without a transactional id every call gets a new id with epoch 0, whatever id it had, as in Kafka. Deviation:
transactional producers are refused for good (`NO_TRANSACTIONS`), since no transaction coordinator is served yet.
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

REQUEST = InitProducerIdRequest

NO_TRANSACTIONS = KafkaError(
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    "transactions are not served by this broker; use no transactional.id",
)
"""The one code that Java, librdkafka, aiokafka and kafka-python all take as fatal at once: librdkafka asks for a
coordinator again after any other but CLUSTER_AUTHORIZATION_FAILED, until its caller runs out of time."""


async def handle(services: Services, context: RequestContext, request: InitProducerIdRequest) -> InitProducerIdResponse:
    if (request.producer_id == -1) != (request.producer_epoch == -1) or request.transactional_id == "":
        raise KafkaError(ErrorCode.INVALID_REQUEST)
    if request.transactional_id is not None:
        raise NO_TRANSACTIONS
    return InitProducerIdResponse(producer_id=await services.producer_ids.next(), producer_epoch=0)


def refuse(request: InitProducerIdRequest, error: KafkaError, version: int) -> InitProducerIdResponse:
    return InitProducerIdResponse(error_code=error.code, producer_id=-1, producer_epoch=-1)
