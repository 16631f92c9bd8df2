"""EndTxn (key 26, versions 0-5): commit or abort a transaction.

The answer leaves when the decision is stored; the markers are written later. Clients of transaction
version 2 send version 5, and the answer has the producer id and epoch for the next transaction.
Before version 2 the error PRODUCER_FENCED is INVALID_PRODUCER_EPOCH.
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.apis.transactions.answers import error_for_version, mapped
from tidelog.broker.coordinators.transaction.transitions import EPOCH_BUMP_VERSION, ProducerIdentity
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import KafkaError
from tidelog.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse

REQUEST = EndTxnRequest

EPOCH_BUMP_FROM = 5
PRODUCER_FENCED_FROM = 2


def handle(services: Services, context: RequestContext, request: EndTxnRequest) -> EndTxnResponse | Deferred:
    answer = services.transactions.end(
        request.transactional_id,
        ProducerIdentity(request.producer_id, request.producer_epoch),
        request.committed,
        EPOCH_BUMP_VERSION if context.api_version >= EPOCH_BUMP_FROM else 0,
    )
    return mapped(answer, _response)


def _response(identity: ProducerIdentity) -> EndTxnResponse:
    return EndTxnResponse(producer_id=identity.producer_id, producer_epoch=identity.epoch)


def refuse(request: EndTxnRequest, error: KafkaError, version: int) -> EndTxnResponse:
    return EndTxnResponse(error_code=error_for_version(error.code, version, PRODUCER_FENCED_FROM))
