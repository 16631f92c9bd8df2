"""What the answers of the transaction APIs have in common: errors of old versions, and later answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError

Response = TypeVar("Response")


def error_for_version(error: ErrorCode, version: int, producer_fenced_from: int) -> ErrorCode:
    """Old clients do not know PRODUCER_FENCED, and take INVALID_PRODUCER_EPOCH for the same."""
    if error is ErrorCode.PRODUCER_FENCED and version < producer_fenced_from:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def mapped(answer: Any, response: Callable[[Any], Response]) -> Response | Deferred:
    """`response` of an answer that is there or comes later; a KafkaError that comes later stays one."""
    if not isinstance(answer, Deferred):
        return response(answer)
    deferred = Deferred()

    def answered(result: Any) -> None:
        deferred.complete(result if result is None or isinstance(result, KafkaError) else response(result))

    answer.on_complete(answered)
    return deferred
