"""AddOffsetsToTxn (key 25, versions 0-4): the partition of a group's offsets joins a transaction.

Clients of transaction version 2 do not send it: TxnOffsetCommit adds the partition.
"""

from __future__ import annotations

from tidelog.broker.apis.services import Services
from tidelog.broker.apis.transactions.answers import error_for_version, mapped
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.internal_topics import OFFSETS_TOPIC
from tidelog.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse

REQUEST = AddOffsetsToTxnRequest

PRODUCER_FENCED_FROM = 2


def handle(
    services: Services, context: RequestContext, request: AddOffsetsToTxnRequest
) -> AddOffsetsToTxnResponse | Deferred:
    partition = (OFFSETS_TOPIC, services.groups.partition_for(request.group_id))
    answer = services.transactions.add_partitions(
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        [partition],
        verify_only=False,
        transaction_version=0,
    )

    def response(errors: dict[tuple[str, int], ErrorCode]) -> AddOffsetsToTxnResponse:
        error = error_for_version(errors[partition], context.api_version, PRODUCER_FENCED_FROM)
        return AddOffsetsToTxnResponse(error_code=error)

    return mapped(answer, response)


def refuse(request: AddOffsetsToTxnRequest, error: KafkaError, version: int) -> AddOffsetsToTxnResponse:
    return AddOffsetsToTxnResponse(error_code=error_for_version(error.code, version, PRODUCER_FENCED_FROM))
