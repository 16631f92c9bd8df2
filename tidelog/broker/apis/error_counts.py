"""Counts the error codes at all levels of a response, like Kafka's `errorCounts` of each response.

Pure. The fields of a message that can hold error codes are computed once per class.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from tidelog.protocol.codec.encoding import STEP_ELEMENTS
from tidelog.protocol.codec.schema import Message


def count_errors(response: Message, into: dict[int, int]) -> None:
    """Add every error code of the response except 0 to `into`: those of the whole, its topics, partitions, groups."""
    has_code, nested = _plan(type(response))
    if has_code:
        code: int = response.error_code  # type: ignore[attr-defined]
        if code:
            into[code] = into.get(code, 0) + 1
    for name, is_array in nested:
        value: Any = getattr(response, name)
        if value is None:
            continue
        if is_array:
            for each in value:
                count_errors(each, into)
        else:
            count_errors(value, into)


def count_errors_in_steps(response: Message, into: dict[int, int]) -> Iterator[None]:
    """As `count_errors`, of a response that may be large; yields after each STEP_ELEMENTS messages."""
    waiting: list[Iterator[Message]] = [iter((response,))]
    counted = 0
    while waiting:
        message = next(waiting[-1], None)
        if message is None:
            waiting.pop()
            continue
        has_code, nested = _plan(type(message))
        if has_code and (code := message.error_code):  # type: ignore[attr-defined]
            into[code] = into.get(code, 0) + 1
        for name, is_array in nested:
            value: Any = getattr(message, name)
            if value is not None:
                waiting.append(iter(value if is_array else (value,)))
        counted += 1
        if not counted % STEP_ELEMENTS:
            yield


@cache
def _plan(message: type[Message]) -> tuple[bool, tuple[tuple[str, bool], ...]]:
    """Whether it has an error code of its own, and its fields that hold messages with error codes, each with whether
    it is an array.
    """
    names = {name for name, _ in message.FIELDS}
    nested = tuple(
        (name, field.kind == "array")
        for name, field in message.FIELDS
        if isinstance(field.element, type) and issubclass(field.element, Message) and any(_plan(field.element))
    )
    return "error_code" in names, nested
