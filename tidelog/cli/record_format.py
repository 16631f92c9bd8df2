"""The text forms of records: a template over bytes, or one JSON object per line. Pure.

A template has Python's brace syntax with the names of `FIELDS`, without attributes, indexes and format specifications.
`from_json` reads the output of `json_writer`, so that records can be copied through a file. The name of a JSON field
states the form of its bytes (`value`: text, `value_base64`, `value_hex`, `value_json`).
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from string import Formatter
from typing import Any, NamedTuple, NoReturn

from tidelog.client.model import ConsumerRecord

NULL = b"null"
FORMATS = ("text", "hex", "base64", "json")
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\0": "\0"}
_TIMESTAMP_MAX = (1 << 63) - 1

Render = Callable[[ConsumerRecord], bytes]


class ParsedRecord(NamedTuple):
    """A record to send; None for a field that the line does not have."""

    topic: str | None
    partition: int | None
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]


# ------------------------------------------------------------------------------------------------------ keys and values


def encode(data: bytes, form: str) -> bytes:
    """Bytes as text of that form on one line. With the form `json`, bytes that are not JSON stay unchanged."""
    if form == "hex":
        return data.hex().encode()
    if form == "base64":
        return base64.b64encode(data)
    if form == "json":
        line = _json_line(data)
        return data if line is None else line.encode()
    return data


def decode(data: bytes, form: str) -> bytes:
    """The bytes of a text of that form. Raises ValueError."""
    if form == "hex":
        try:
            return bytes.fromhex(data.decode())
        except ValueError:
            raise ValueError(f"{_shown(data)} is not hexadecimal") from None
    if form == "base64":
        try:
            return base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"{_shown(data)} is not base64") from None
    if form == "json" and _json_line(data) is None:
        raise ValueError(f"{_shown(data)} is not JSON")
    return data


def _shown(data: bytes) -> str:
    return repr(data[:60].decode(errors="replace"))


def _json_line(data: bytes) -> str | None:
    """JSON on one line, unchanged if it has no line break; None if it is not JSON."""
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
        line = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        line.encode()
    except (ValueError, RecursionError):
        return None
    return line if "\n" in text or "\r" in text else text.strip()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# ------------------------------------------------------------------------------------------------------------ templates


def _headers(record: ConsumerRecord) -> bytes:
    return b",".join(name.encode() + b"=" + (NULL if value is None else value) for name, value in record.headers)


FIELDS: dict[str, Render] = {
    "topic": lambda record: record.topic.encode(),
    "partition": lambda record: b"%d" % record.partition,
    "offset": lambda record: b"%d" % record.offset,
    "timestamp": lambda record: b"%d" % record.timestamp_ms,
    "key": lambda record: NULL if record.key is None else record.key,
    "value": lambda record: NULL if record.value is None else record.value,
    "headers": _headers,
}


def compile_template(template: str, key_form: str = "text", value_form: str = "text") -> Render:
    """A function from a record to its line with a newline. Raises ValueError for an unknown field."""
    fields = {
        **FIELDS,
        "key": lambda record: NULL if record.key is None else encode(record.key, key_form),
        "value": lambda record: NULL if record.value is None else encode(record.value, value_form),
    }
    for written, meant in _ESCAPES.items():
        template = template.replace(written, meant)
    parts: list[bytes | Render] = []
    for literal, name, specification, conversion in Formatter().parse(template):
        if literal:
            parts.append(literal.encode(errors="surrogateescape"))  # bytes of the command line that are not UTF-8
        if name is None:
            continue
        if name in fields and (specification or conversion):
            raise ValueError(f"{{{name}}} takes no format specification or conversion")
        if name not in fields:
            raise ValueError(f"{{{repr(name)[1:-1]}}} is not one of {', '.join(f'{{{field}}}' for field in fields)}")
        parts.append(fields[name])
    parts.append(b"\n")
    return lambda record: b"".join(part if isinstance(part, bytes) else part(record) for part in parts)


# ----------------------------------------------------------------------------------------------------------------- JSON


def json_writer(key_form: str = "text", value_form: str = "text") -> Render:
    """A function from a record to a JSON object on a line."""
    return lambda record: as_json(record, key_form, value_form)


def as_json(record: ConsumerRecord, key_form: str = "text", value_form: str = "text") -> bytes:
    """One JSON object on one line. A key or value that does not have its form (text: UTF-8) becomes base64 under
    `key_base64` or `value_base64`.
    """
    shown: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
    }
    parts = [json.dumps(shown, ensure_ascii=False)[1:-1]]
    parts += [_member("key", record.key, key_form), _member("value", record.value, value_form)]
    if record.headers:
        headers = (f'{{"name": {_quoted(name)}, {_member("value", value, "text")}}}' for name, value in record.headers)
        parts.append(f'"headers": [{", ".join(headers)}]')
    return f"{{{', '.join(parts)}}}\n".encode()


def _member(name: str, data: bytes | None, form: str) -> str:
    if data is None:
        return f'"{name}": null'
    if form == "hex":
        return f'"{name}_hex": "{data.hex()}"'
    if form == "json":
        line = _json_line(data)
        if line is not None:
            return f'"{name}_json": {line}'
    if form != "base64":
        try:
            return f'"{name}": {_quoted(data.decode())}'
        except UnicodeDecodeError:
            pass
    return f'"{name}_base64": "{base64.b64encode(data).decode()}"'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_MEMBERS = frozenset(
    [f"{name}{suffix}" for name in ("key", "value") for suffix in ("", "_hex", "_base64", "_json")]
    + ["topic", "partition", "offset", "timestamp_ms", "headers"]
)


def from_json(line: bytes) -> ParsedRecord:
    """The record of a line of `as_json`, without its offset. Raises ValueError with a description."""
    try:
        shown = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ValueError(f"{_shown(line)} is not JSON") from None
    if not isinstance(shown, dict):
        raise ValueError(f"{_shown(line)} is not a JSON object")
    strange = sorted(shown.keys() - _MEMBERS)
    if strange:
        raise ValueError(f"{strange[0]!r} is no field of a record: {', '.join(sorted(_MEMBERS))}")
    topic = shown.get("topic")
    if topic is not None and not isinstance(topic, str):
        raise ValueError(f"topic is to be text, not {topic!r}")
    headers = shown.get("headers") or []
    if not isinstance(headers, list):
        raise ValueError("headers is to be a list of objects with name and value")
    return ParsedRecord(
        topic,
        _whole("partition", shown.get("partition"), (1 << 31) - 1),
        _timestamp(shown.get("timestamp_ms")),
        _data("key", shown),
        _data("value", shown),
        [_header(each) for each in headers],
    )


def _timestamp(given: Any) -> int | None:
    """The timestamp, or None for -1, the form of a record without a timestamp."""
    return None if given == -1 else _whole("timestamp_ms", given, _TIMESTAMP_MAX)


def _whole(name: str, given: Any, largest: int) -> int | None:
    if given is None:
        return None
    if type(given) is not int or not 0 <= given <= largest:
        raise ValueError(f"{name} is to be a whole number, not {given!r}")
    return given


def _header(shown: Any) -> tuple[str, bytes | None]:
    if not isinstance(shown, dict) or not isinstance(shown.get("name"), str):
        raise ValueError("a header is to be an object with name and value")
    strange = sorted(shown.keys() - {"name", "value", "value_hex", "value_base64", "value_json"})
    if strange:
        raise ValueError(f"{strange[0]!r} is no field of a header")
    return shown["name"], _data("value", shown)


def _data(name: str, shown: dict[str, Any]) -> bytes | None:
    given = [key for key in (name, f"{name}_hex", f"{name}_base64", f"{name}_json") if key in shown]
    if len(given) > 1:
        raise ValueError(f"{given[0]} and {given[1]} are both given")
    if not given:
        return None
    key, value = given[0], shown[given[0]]
    if key == f"{name}_json":
        return _encoded(key, json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")))
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{key} is to be text or null; JSON goes into {name}_json")
    return decode(_encoded(key, value), key.removeprefix(name).removeprefix("_") or "text")


def _encoded(key: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{key} has half of a surrogate pair, which no bytes stand for") from None
