"""How `tidelog consume` prints a record: a template over bytes, or JSON.

A template is Python's own brace syntax with the names of `FIELDS`, nothing else of it: no attributes, no indexes, no
format specifications. Keys and values are written as the bytes they are.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from string import Formatter
from typing import Any

from tidelog.client import ConsumerRecord

NULL = b"null"
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\0": "\0"}


def _headers(record: ConsumerRecord) -> bytes:
    return b",".join(name.encode() + b"=" + (NULL if value is None else value) for name, value in record.headers)


FIELDS: dict[str, Callable[[ConsumerRecord], bytes]] = {
    "topic": lambda record: record.topic.encode(),
    "partition": lambda record: b"%d" % record.partition,
    "offset": lambda record: b"%d" % record.offset,
    "timestamp": lambda record: b"%d" % record.timestamp_ms,
    "key": lambda record: NULL if record.key is None else record.key,
    "value": lambda record: NULL if record.value is None else record.value,
    "headers": _headers,
}


def compile_template(template: str) -> Callable[[ConsumerRecord], bytes]:
    """A function from a record to its line, newline included. Raises ValueError for a field that does not exist."""
    for written, meant in _ESCAPES.items():
        template = template.replace(written, meant)
    parts: list[bytes | Callable[[ConsumerRecord], bytes]] = []
    for literal, name, specification, conversion in Formatter().parse(template):
        if literal:
            parts.append(literal.encode())
        if name is None:
            continue
        if name in FIELDS and (specification or conversion):
            raise ValueError(f"{{{name}}} takes no format specification or conversion")
        if name not in FIELDS:
            raise ValueError(f"{{{name}}} is not one of {', '.join(f'{{{field}}}' for field in FIELDS)}")
        parts.append(FIELDS[name])
    parts.append(b"\n")
    return lambda record: b"".join(part if isinstance(part, bytes) else part(record) for part in parts)


def as_json(record: ConsumerRecord) -> bytes:
    """One JSON object on one line. Bytes that are not UTF-8 stand as base64 under `key_base64` or `value_base64`."""
    shown: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **_text("key", record.key),
        **_text("value", record.value),
    }
    if record.headers:
        shown["headers"] = [{"name": name, **_text("value", value)} for name, value in record.headers]
    return json.dumps(shown, ensure_ascii=False).encode() + b"\n"


def _text(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}
