"""The refusal of a whole request, made from the declaration of its response."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import KafkaError

Response = TypeVar("Response", bound=Message)


def refusing(response: type[Response]) -> Callable[[Any, KafkaError, int], Response]:
    """The `refuse` of an API: `response` with the error code, and with the message where it has a field for one.

    The encoder leaves out an error message that a version has no room for, as the schemas declare it ignorable.
    """
    names = {name for name, _ in response.FIELDS}
    assert "error_code" in names, f"{response.__name__} has no error code for the whole request"
    has_message = "error_message" in names

    def refuse(request: Any, error: KafkaError, version: int) -> Response:
        values: dict[str, Any] = {"error_code": error.code}
        if has_message:
            values["error_message"] = error.message
        return response(**values)

    return refuse
