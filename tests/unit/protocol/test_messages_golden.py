"""Messages as Kafka 4.3.1 itself wrote them: the records of its metadata log and of the coordinators.

`tests/golden/messages_by_kafka.jsonl` holds one message a line: its name, the version, the bytes made by Kafka's
generated class, and the fields as Kafka's JSON converter shows them. kio has the requests and responses, but not these.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from tidelog.protocol.codec.fields import Field
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.messages import control_records, group_records, metadata_records, transaction_records
from tidelog.protocol.uuids import uuid_from_text

GOLDEN = Path(__file__).parents[2] / "golden" / "messages_by_kafka.jsonl"
LINES = [json.loads(line) for line in GOLDEN.read_text(encoding="ascii").splitlines()]


def message_class(name: str) -> type[Message]:
    for module in (metadata_records, group_records, control_records, transaction_records):
        if hasattr(module, name):
            found: type[Message] = getattr(module, name)
            return found
    raise AssertionError(f"{name} is not declared")


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part[:1].upper() + part[1:] for part in rest)


def build(message: type[Message], fields: dict[str, Any]) -> Message:
    values = {
        name: value(field.element or field.kind, fields[camel(name)], field)
        for name, field in message.FIELDS
        if camel(name) in fields
    }
    assert len(values) == len(fields)
    return message(**values)


def value(kind: Any, shown: Any, field: Field) -> Any:
    if shown is None:
        return None
    if isinstance(shown, list):
        return [value(kind, each, field) for each in shown]
    if isinstance(kind, type):
        return build(kind, shown)
    if kind == "uuid":
        return uuid_from_text(shown)
    if kind == "bytes":
        return base64.b64decode(shown)
    return shown


@pytest.mark.parametrize("line", LINES, ids=[f"{place}-{line['message']}" for place, line in enumerate(LINES)])
def test_kafkas_bytes_and_ours_are_the_same(line: dict[str, Any]):
    message = message_class(line["message"])
    encoded = bytes.fromhex(line["hex"])
    expected = build(message, line["fields"])
    assert message.decode(encoded, line["version"]) == expected
    assert expected.encode(line["version"]) == encoded


def test_every_version_of_every_record_is_there():
    declared = {
        (each.__name__, version)
        for module in (metadata_records, group_records)
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Message) and each.API_KEY is not None
        for version in each.VERSIONS
    }
    assert declared <= {(line["message"], line["version"]) for line in LINES}
