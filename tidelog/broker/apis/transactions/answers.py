"""The common part of the transaction APIs' answers: errors for old versions, and deferred answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tidelog.broker.network.request import Deferred
from tidelog.protocol.errors import ErrorCode, KafkaError

Response = TypeVar("Response")


def error_for_version(error: ErrorCode, version: int, producer_fenced_from: int) -> ErrorCode:
    """The error for a client's version: old clients know INVALID_PRODUCER_EPOCH instead of PRODUCER_FENCED."""
    if error is ErrorCode.PRODUCER_FENCED and version < producer_fenced_from:
        return ErrorCode.INVALID_PRODUCER_EPOCH
    return error


def mapped(answer: Any, response: Callable[[Any], Response]) -> Response | Deferred:
    """Apply `response` to a present or deferred answer. A deferred KafkaError stays unchanged."""
    if not isinstance(answer, Deferred):
        return response(answer)
    deferred = Deferred()

    def answered(result: Any) -> None:
        deferred.complete(result if result is None or isinstance(result, KafkaError) else response(result))

    answer.on_complete(answered)
    return deferred
