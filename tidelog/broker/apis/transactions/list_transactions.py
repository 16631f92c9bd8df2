"""ListTransactions (key 66, versions 0-2): the transactional ids that this broker coordinates.

A client sends it to all brokers. Version 1 filters by the age of the transaction, version 2 by a
pattern of the id. While a partition is loading, the whole request gets
COORDINATOR_LOAD_IN_PROGRESS. As in Kafka, an id without a transaction counts as older than any
duration. Deviation: patterns are those of Python's `re` with bounded matching
(`coordinators/transaction/patterns.py`); others are refused with INVALID_REGULAR_EXPRESSION.
"""

from __future__ import annotations

from tidelog.broker.apis.refusals import refusing
from tidelog.broker.apis.services import Services
from tidelog.broker.coordinators.transaction.patterns import IdPattern
from tidelog.broker.coordinators.transaction.states import STATE_NAMES, STATES_BY_NAME
from tidelog.broker.coordinators.transaction.transitions import TransactionMetadata
from tidelog.broker.network.request import RequestContext
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
    ListTransactionsResponseTransactionState,
)

REQUEST = ListTransactionsRequest
ANSWERS_MAY_BE_LARGE = True
refuse = refusing(ListTransactionsResponse)

# The matching steps that count as much as an id in the answer; a single id may take more (`patterns.STEPS_MAX`).
STEPS_PER_ELEMENT = 200


async def handle(
    services: Services, context: RequestContext, request: ListTransactionsRequest
) -> ListTransactionsResponse:
    pattern = _pattern(request.transactional_id_pattern)
    states = {STATES_BY_NAME[name] for name in request.state_filters if name in STATES_BY_NAME}
    producer_ids = frozenset(request.producer_id_filters)
    now_ms = services.clock_ms()
    response = ListTransactionsResponse(
        unknown_state_filters=[name for name in dict.fromkeys(request.state_filters) if name not in STATES_BY_NAME]
    )

    def is_wanted(transactional_id: str, metadata: TransactionMetadata) -> bool:
        return (
            (not producer_ids or metadata.producer_id in producer_ids)
            and (not request.state_filters or metadata.state in states)
            and (request.duration_filter < 0 or now_ms - metadata.start_ms > request.duration_filter)
            and (pattern is None or pattern.matches(transactional_id))
        )

    async with AnswerInPieces(services.scheduler, context.connection) as answer:
        await answer.add_elements(services.transactions.id_count)  # the list of all is held, too
        for transactional_id, metadata in services.transactions.transactions():
            if is_wanted(transactional_id, metadata):
                response.transaction_states.append(
                    ListTransactionsResponseTransactionState(
                        transactional_id=transactional_id,
                        producer_id=metadata.producer_id,
                        transaction_state=STATE_NAMES[metadata.state],
                    )
                )
            steps = 0 if pattern is None else pattern.steps(transactional_id)
            await answer.add_elements(1 + steps // STEPS_PER_ELEMENT)
    return response


def _pattern(text: str | None) -> IdPattern | None:
    if not text:
        return None
    try:
        return IdPattern(text)
    except ValueError as error:
        message = f"Transaction ID pattern `{text}` is not a valid regular expression: {error}."
        raise KafkaError(ErrorCode.INVALID_REGULAR_EXPRESSION, message) from None
