"""JSON as bytes, for `value_serializer` and `value_deserializer`."""

from __future__ import annotations

import json
from typing import Any


def to_json(value: Any) -> bytes | None:
    """UTF-8 JSON without spaces. None stays None: a record without a value, which deletes its key in a compacted topic.

    Raises:
        TypeError: JSON has no form for the value.
        ValueError: the value is not finite, or refers to itself.
    """
    if value is None:
        return None
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def from_json(data: bytes) -> Any:
    """The value of UTF-8 JSON.

    Raises:
        ValueError: the bytes are no JSON.
    """
    return json.loads(data)
