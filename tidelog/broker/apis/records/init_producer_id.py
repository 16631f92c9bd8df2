"""InitProducerId (key 22, versions 0-5): a producer id and epoch for an idempotent or transactional producer.

As in Kafka, every call without a transactional id gets a new producer id with epoch 0, even if the producer has an id.
With a transactional id the transaction coordinator answers. It fences the former producer of the id, after it has ended
that producer's open transaction; meanwhile the client gets CONCURRENT_TRANSACTIONS. Before version 4 the error
PRODUCER_FENCED is INVALID_PRODUCER_EPOCH.
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.apis.transactions.answers import error_for_version, mapped
from tidelog.broker.coordinators.transaction.transitions import NO_IDENTITY, ProducerIdentity
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse

REQUEST = InitProducerIdRequest

PRODUCER_FENCED_FROM = 4


async def handle(
    services: Services, context: RequestContext, request: InitProducerIdRequest
) -> InitProducerIdResponse | Deferred:
    if (request.producer_id == -1) != (request.producer_epoch == -1):
        raise KafkaError(ErrorCode.INVALID_REQUEST)
    if request.transactional_id is None:
        return _response(ProducerIdentity(await services.producer_ids.next(), 0))
    if services.producer_ids.is_empty:
        await services.producer_ids.fill()  # the coordinator may need an id and cannot wait for one
    present = ProducerIdentity(request.producer_id, request.producer_epoch)
    answer = services.transactions.initialize(
        request.transactional_id, request.transaction_timeout_ms, None if present == NO_IDENTITY else present
    )
    return mapped(answer, _response)


def _response(identity: ProducerIdentity) -> InitProducerIdResponse:
    return InitProducerIdResponse(producer_id=identity.producer_id, producer_epoch=identity.epoch)


def refuse(request: InitProducerIdRequest, error: KafkaError, version: int) -> InitProducerIdResponse:
    code = error_for_version(error.code, version, PRODUCER_FENCED_FROM)
    return InitProducerIdResponse(error_code=code, producer_id=-1, producer_epoch=-1)
